#!/usr/bin/env bash
# llama.sh BUILD OUT: a Llama of random weights beside transformers, on the GPUs of one machine. BUILD is a build folder or
# what was carried of one; OUT takes every output. Writes the weights, lets transformers answer prompts and times it on one
# GPU, feeds its tokens to cp_attn, which says what it would have answered, times the same work on one GPU and on all, and
# prints one table.
#     SHAPE=8b WORK=/tmp/llama TRACE=requests.jsonl bench/scripts/llama.sh BUILD OUT
set -uo pipefail
build=${1:?usage: llama.sh BUILD OUT}
out=${2:?usage: llama.sh BUILD OUT}
here=$(dirname "$0")
python=${PYTHON:-python3}
shape=${SHAPE:-8b}
work=${WORK:-/tmp/llama-$shape}
device=${DEVICE:-cuda}
long=${LONG:-32768} decode=${DECODE:-8192} longest=${LONGEST:-131072}
program=$build/main/cp_attn
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
# shellcheck source=bench/scripts/steps.sh
. "$here/steps.sh"

# serve NAME RANKS ARGUMENT...: a run of the service with the model.
serve() {
  local name=ours-$1 ranks=$2
  shift 2
  program_step "$name" 100 "$ranks" --device "$device" --model-dir "$work" --block-size 64 --verify 0 --skip-self-test "$@"
}

[ -f "$work/config.json" ] || step write 200 "$python" "$here/torch_llama.py" write "$work" --shape "$shape"
step transformers 200 "$python" "$here/torch_llama.py" run "$work" --prefill "$long" --decode "1x$decode,32x1024" \
  --greedy "${GREEDY:-4x64x256}" --result-json "$out/peer.json" --ids "$out"
for prompt in "$out"/prompt-*.ids; do
  name=$(basename "$prompt" .ids)
  step "ours-$name" 60 "$program" generate --device "$device" --model-dir "$work" --block-size 64 --skip-self-test \
    --prompt-ids "@$prompt" --given-ids "@${prompt/prompt-/answer-}" --json
done
for ranks in 1 $([ "$gpus" = 1 ] || echo "$gpus"); do
  serve "prefill-$ranks" "$ranks" --requests 3 --max-num-seqs 1 --no-enable-prefix-caching --input-len "$long" --output-len 1 \
    --max-num-batched-tokens 8192
  serve "decode-$ranks" "$ranks" --requests 1 --input-len "$decode" --output-len 200 --max-num-batched-tokens 8192
  serve "batch-$ranks" "$ranks" --requests 32 --input-len 1024 --output-len 200 --max-num-batched-tokens 8192
  [ "$ranks" = 1 ] || serve "whole_decode-$ranks" "$ranks" --slice-weights off --requests 1 --input-len "$decode" \
    --output-len 200 --max-num-batched-tokens 8192
  [ "$gpus" = 1 ] || serve "longest-$ranks" "$ranks" --requests 1 --input-len "$longest" --output-len 1 \
    --max-num-batched-tokens 16384
  [ -z "${TRACE:-}" ] || serve "mixed-$ranks" "$ranks" --trace "$TRACE" --requests 64 --length-scale 0.1
done
"$python" "$here/torch_llama.py" table "$work" --out "$out" | tee "$out/table.md" || failed=1
exit $failed
