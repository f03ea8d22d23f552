#!/usr/bin/env bash
# constrained.sh BUILD OUT: what answers bound to a JSON schema cost those beside them: STREAMS requests at once, of which BOUND have
# a schema, beside the same requests without one, in turn, through one server on one GPU. BUILD is a build folder or what was
# carried of one; OUT takes every output. Writes a Llama of random weights and a tokenizer of its vocabulary if WORK has none.
# Ends with 1 unless the time of an output token is at most MOST times that without.
#     SHAPE=8b WORK=/tmp/llama bench/scripts/constrained.sh BUILD OUT
set -uo pipefail
build=${1:?usage: constrained.sh BUILD OUT}
out=${2:?usage: constrained.sh BUILD OUT}
here=$(dirname "$0")
python=${PYTHON:-python3}
shape=${SHAPE:-8b}
work=${WORK:-/tmp/llama-$shape}
device=${DEVICE:-cuda}
streams=${STREAMS:-256} bound=${BOUND:-64} input=${INPUT:-128} output=${OUTPUT:-256} repeats=${REPEATS:-3} port=${PORT:-18274}
most=${MOST:-1.10}
program=$build/main/cp_attn
# shellcheck source=bench/scripts/steps.sh
. "$here/steps.sh"

# Strings, numbers and names that end soon, so that masks change from token to token, in an answer that does not end.
schema='{"type": "json_schema", "json_schema": {"name": "rows", "schema": {"type": "array", "minItems": 1000, "items": {
  "type": "object", "required": ["name", "kind", "amount", "tags"], "additionalProperties": false, "properties": {
    "name": {"type": "string", "minLength": 1, "maxLength": 24}, "kind": {"enum": ["order", "refund", "transfer", "note"]},
    "amount": {"type": "integer", "minimum": 0, "maximum": 99999},
    "tags": {"type": "array", "maxItems": 4, "items": {"type": "string", "pattern": "^[a-z]{2,8}$"}}}}}}}'

# client NAME N EXTRA_BODY [OPTION...]: N requests at once.
client() {
  step "$1" "${LIMIT:-150}" "$program" bench serve --url "http://127.0.0.1:$port" --endpoint /v1/chat/completions --prompts text \
    --requests "$2" --input-len "$input" --output-len "$output" --temperature 1 --extra-body "$3" --ready-timeout 200 \
    "${@:4}" --result-json "$out/$1.json"
}

[ -f "$work/config.json" ] || step write 200 "$python" "$here/torch_llama.py" write "$work" --shape "$shape"
vocabulary=$(sed -n 's/.*"vocab_size": *\([0-9]*\).*/\1/p' "$work/config.json")
[ -f "$work/tokenizer.json" ] || step tokenizer 300 "$python" "$here/train_tokenizer.py" "$work" --size "$vocabulary"
"$program" serve --device "$device" --model-dir "$work" --block-size 64 --verify 0 --skip-self-test --max-num-seqs "$streams" \
  --max-num-batched-tokens 8192 --chat-template chatml --port "$port" >"$out/server.txt" 2>&1 &
server=$!
step ready 200 "$program" bench serve --url "http://127.0.0.1:$port" --requests 1 --output-len 2 --ready-timeout 200
step answer 60 curl -sS --fail-with-body "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' -d "{
  \"temperature\": 1, \"max_tokens\": 64, \"messages\": [{\"role\": \"user\", \"content\": \"rows\"}],
  \"response_format\": $schema}"
cat "$out/answer.txt"
for ((i = 1; i <= repeats; i++)); do
  for kind in free bound; do
    these=('{}')
    [ "$kind" = free ] || these=("{\"response_format\": $schema}" --no-ignore-eos)
    client "$kind-others-$i" $((streams - bound)) '{}' &
    others=$!
    client "$kind-$i" "$bound" "${these[@]}"
    wait "$others" || failed=1
  done
done
kill -TERM "$server"
wait "$server" || failed=1
"$python" - "$out" "$repeats" "$most" <<'END' | tee "$out/table.md" || failed=1
import json, pathlib, statistics, sys

out, repeats, most = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
runs = {kind: [[json.loads((out / f"{kind}{who}-{i}.json").read_text()) for who in ("-others", "")]
               for i in range(1, repeats + 1)] for kind in ("free", "bound")}
print("| run | requests | TPOT of the others, median ms | TPOT of these, median ms | TTFT of these, median ms |")
print("|---|---|---|---|---|")
for kind, results in runs.items():
    for others, these in results:
        print(f"| {kind} | {others['completed']} + {these['completed']} | {others['median_tpot_ms']:.3f} | "
              f"{these['median_tpot_ms']:.3f} | {these['median_ttft_ms']:.1f} |")
whole = all(r["completed"] == r["num_prompts"] for results in runs.values() for pair in results for r in pair)
step = {kind: statistics.median(r["median_tpot_ms"] for r, _ in results) for kind, results in runs.items()}
ratio = step["bound"] / step["free"]
print(f"\nbound / free, medians: {ratio:.3f}, goal {most} at most: {'met' if ratio <= most else 'missed'}")
sys.exit(ratio > most or not whole)
END
exit "$failed"
