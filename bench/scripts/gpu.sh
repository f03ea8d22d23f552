#!/usr/bin/env bash
# gpu.sh BUILD OUT: one visit to a machine with GPUs. BUILD is a build folder, or what was carried of one (see
# tests/run_device.sh); OUT takes every output. Runs the device tests, the sanitizer on small cases, and every benchmark
# beside its peer, then prints one table: work, ours, peer, ratio, goal, met, of which OUT/table.json keeps all that was
# measured (what a file of bench/results/ holds). Rows whose GPUs or step are not there say so. Exits 1 if anything failed
# or was wrong; a goal that is missed is no failure.
#     STEPS="tests sanitizer prefill encoders decode cascade quantised latents sparse xattn skip offload selection experts varlen memory step exchange scaling peers million" bench/scripts/gpu.sh BUILD OUT
#     ROUNDS=3 TRACE=requests.jsonl COMMIT=abc1234 PYTHON=python3 bench/scripts/gpu.sh BUILD OUT
# The steps from `prefill` to `step` take some five minutes on one GPU, those from `exchange` on three on four; they are
# left out on one. With TRACE, varlen takes its lengths from there.
set -uo pipefail
build=${1:?usage: gpu.sh BUILD OUT}
out=${2:?usage: gpu.sh BUILD OUT}
here=$(dirname "$0")
python=${PYTHON:-python3}
steps=${STEPS:-tests sanitizer prefill encoders decode cascade quantised latents sparse xattn skip offload selection experts varlen memory step exchange scaling peers million}
rounds=${ROUNDS:-3} # of what is compared with cuDNN, in turn with it: clocks drift
program=$build/main/cp_attn
# shellcheck source=bench/scripts/steps.sh
. "$here/steps.sh"

cases() {
  "$python" "$here/gpu_cases.py" "$1"
}

# bench NAME SECONDS RANKS BENCHMARK LIST [ARGUMENT...]: a benchmark of ours over a list of gpu_cases.py.
bench() {
  local name=ours-$1 limit=$2 ranks=$3 benchmark=$4 list=$5
  shift 5
  program_step "$name" "$limit" "$ranks" bench "$benchmark" --device cuda --shapes "$(cases "$list")" "$@"
}

# serve NAME SECONDS RANKS ARGUMENT...: the whole service.
serve() {
  local name=ours-$1 limit=$2 ranks=$3
  shift 3
  program_step "$name" "$limit" "$ranks" --block-size 64 --requests 1 --skip-self-test "$@"
}

tests() {
  step tests-gpu 300 "$here/../../tests/run_device.sh" "$build" gpu -j4
  [ "$gpus" -lt 2 ] || step tests-multigpu 300 "$here/../../tests/run_device.sh" "$build" multigpu
}

sanitizer() { step sanitizer 300 "$here/../../tests/sanitizer_gpu.sh" "$build"; }

prefill() {
  local round
  bench short-prompts 60 1 attend short-prompts
  for ((round = 1; round <= rounds; round++)); do
    bench "prefill-$round" 60 1 attend prefill
    step "peer-cudnn-$round" 60 "$python" "$here/torch_attend.py" --device cuda --dtype bf16 --heads 32/8 \
      --shapes "$(cases cudnn)" --result-json "$out/peer-cudnn-$round.json"
  done
}

encoders() {
  local round
  for ((round = 1; round <= rounds; round++)); do
    bench "encoders-$round" 60 1 varlen_attend varlen_attend
    step "peer-encoders-$round" 60 "$python" "$here/torch_attend.py" --device cuda --dtype bf16 \
      --shapes "$(cases varlen_attend)" --result-json "$out/peer-encoders-$round.json"
  done
}

decode() {
  bench decode 60 1 attend decode
  bench decode-large 60 1 attend decode-large # on its own: smaller devices have no room for it
  bench small-blocks 60 1 attend small-blocks
  bench rules 60 1 attend rules
  bench ruled-caches 60 1 attend ruled-caches
}

cascade() { bench cascade 60 1 attend cascade; }

quantised() { bench quantised 60 1 attend quantised; }

latents() {
  bench latents 90 1 attend latents
  bench expanded 90 1 attend expanded
  step peer-expanded 90 "$python" "$here/torch_attend.py" --device cuda --dtype bf16 --shapes "$(cases expanded)" \
    --result-json "$out/peer-expanded.json"
  step peer-flashinfer 180 "$python" "$here/flashinfer_latents.py" --shapes "$(cases flashinfer)" \
    --result-json "$out/peer-flashinfer.json"
}

sparse() { bench sparse 90 1 sparse sparse; }

xattn() {
  bench xattn-dense 30 1 attend xattn-dense
  bench attend_blocks 60 1 attend_blocks attend_blocks
  bench attend_beside 30 1 attend_beside attend_beside
  bench beside-chunk 30 1 attend_blocks beside-chunk
  bench beside-decode 30 1 attend beside-decode
  bench xattn_estimate 60 1 xattn_estimate xattn
  bench xattn 60 1 xattn xattn
}

offload() {
  bench offload-memory 60 1 attend offload-memory
  bench offload 90 1 offload offload
}

skip() { bench skip-tiles 120 1 attend skip-tiles; }

selection() {
  local name
  for name in index_logits topk index_write index_q q_norm_rope_kv_write inverse_rope_quant compress_write; do
    bench $name 60 1 $name $name
  done
  step peer-topk 60 "$python" "$here/torch_topk.py" --shapes "$(cases topk)" --result-json "$out/peer-topk.json"
}

experts() {
  bench experts 90 1 expert_linear experts
  bench dense-product 60 1 linear dense-product
}

varlen() { bench varlen 60 1 varlen varlen ${TRACE:+--trace "$TRACE"}; }

memory() { bench layouts 30 1 attend layouts; for name in merge kv_write kv_pack kv_convert; do bench $name 30 1 $name $name; done; }

step_of_layers() { # RANKS
  serve "step-$1" 30 "$1" --model "$here/../../configs/llama-3-8b.yaml" --input-len 8192 --output-len 256 --verify 0
}

exchange() { bench exchange 40 "$gpus" exchange exchange; }

scaling() {
  bench scaling 90 "$gpus" scaling scaling
  step_of_layers "$gpus"
}

peers() {
  step peer-context_parallel 90 "$python" -m torch.distributed.run --nproc-per-node "$gpus" \
    "$here/torch_context_parallel.py" --shapes "$(cases context_parallel)" \
    --result-json "$out/peer-context_parallel.json"
}

million() {
  sed 's/^layers: .*/layers: 1/' "$here/../../configs/llama-3-8b.yaml" >"$out/one-layer.yaml"
  serve million 60 "$gpus" --model "$out/one-layer.yaml" --input-len 1000000 --output-len 2 \
    --max-num-batched-tokens 65536 --staging-bytes $((1 << 30)) --verify 0.000001
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/machine.txt"
gpus=$(wc -l <"$out/machine.txt")
printf '{"gpus": %d, "device": "%s", "date": "%s", "commit": "%s", "steps": "%s"}\n' "$gpus" \
  "$(head -n 1 "$out/machine.txt")" "$(date -u +%FT%TZ)" \
  "${COMMIT:-$(git -C "$here" rev-parse --short HEAD 2>/dev/null || echo unknown)}" "$steps" >"$out/machine.json"
for name in $steps; do
  case $name in
    tests | sanitizer | prefill | encoders | decode | cascade | quantised | latents | sparse | xattn | skip | offload | selection | experts | varlen | memory) "$name" ;;
    step) step_of_layers 1 ;;
    exchange | scaling | peers | million) [ "$gpus" -lt 2 ] || "$name" ;;
    *) echo "gpu.sh: STEPS: found $name, expected one of those in the first lines of $0" >&2 && exit 2 ;;
  esac
done
"$python" "$here/gpu_table.py" "$out" | tee "$out/table.md" || failed=1
exit $failed
