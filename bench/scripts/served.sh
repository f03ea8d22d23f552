#!/usr/bin/env bash
# served.sh BUILD OUT: what HTTP and scheduling by arrival cost: the same requests as a batch run and through the server, each in
# a process of its own, in turn, on one GPU. BUILD is a build folder or what was carried of one; OUT takes every output. Writes
# a Llama of random weights if WORK has none, and prints one table.
#     SHAPE=8b WORK=/tmp/llama bench/scripts/served.sh BUILD OUT
set -uo pipefail
build=${1:?usage: served.sh BUILD OUT}
out=${2:?usage: served.sh BUILD OUT}
here=$(dirname "$0")
python=${PYTHON:-python3}
shape=${SHAPE:-8b}
work=${WORK:-/tmp/llama-$shape}
device=${DEVICE:-cuda}
streams=${STREAMS:-64} input=${INPUT:-1024} output=${OUTPUT:-256} repeats=${REPEATS:-2} port=${PORT:-18273}
goal=${GOAL:-0.97}
program=$build/main/cp_attn
# shellcheck source=bench/scripts/steps.sh
. "$here/steps.sh"

engine=(--device "$device" --model-dir "$work" --block-size 64 --verify 0 --skip-self-test --max-num-batched-tokens 8192)
requests=(--requests "$streams" --input-len "$input" --output-len "$output")

# served NAME: a server, the requests, and its end.
served() {
  local server status
  "$program" serve "${engine[@]}" --port "$port" >"$out/$1-server.txt" 2>&1 &
  server=$!
  step "$1" "${LIMIT:-150}" "$program" bench serve --url "http://127.0.0.1:$port" "${requests[@]}" --vocabulary "$vocabulary" \
    --ready-timeout 100 --result-json "$out/$1.json"
  kill -TERM "$server"
  wait "$server"
  status=$?
  [ "$status" = 0 ] || { echo "$1: the server ended with $status"; tail -n 5 "$out/$1-server.txt"; failed=1; }
}

[ -f "$work/config.json" ] || step write 200 "$python" "$here/torch_llama.py" write "$work" --shape "$shape"
vocabulary=$(sed -n 's/.*"vocab_size": *\([0-9]*\).*/\1/p' "$work/config.json")
for ((i = 1; i <= repeats; i++)); do
  program_step "batch-$i" "${LIMIT:-150}" 1 "${engine[@]}" "${requests[@]}"
  served "served-$i"
done
"$python" - "$out" "$repeats" "$goal" <<'END' | tee "$out/table.md" || failed=1
import json, pathlib, sys

out, repeats, goal = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
runs = {name: [json.loads((out / f"{name}-{i}.json").read_text()) for i in range(1, repeats + 1)]
        for name in ("batch", "served")}
print("| run | requests | output tokens/s | TTFT, median ms | TPOT, median ms | seconds |")
print("|---|---|---|---|---|---|")
for name, results in runs.items():
    for r in results:
        print(f"| {name} | {r['completed']} of {r['num_prompts']} | {r['output_throughput']:.1f} | {r['median_ttft_ms']:.1f} | "
              f"{r['median_tpot_ms']:.3f} | {r['duration']:.3f} |")
best = {name: max(r["output_throughput"] for r in results) for name, results in runs.items()}
share = best["served"] / best["batch"]
whole = all(r["completed"] == r["num_prompts"] for results in runs.values() for r in results)
print(f"\nserved / batch, the best of each: {share:.4f}, goal {goal}: {'met' if share >= goal else 'missed'}")
sys.exit(share < goal or not whole)
END
exit "$failed"
