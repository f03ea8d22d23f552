#!/usr/bin/env bash
# tenants.sh OUT [SERVER OPTION...]: what the requests of one tenant do to another: the median time to the first token of requests
# that come one a second, beside 500 requests of another salt at any time, and beside 12 of the same lengths, in turn. OUT takes
# every output. Ends with 1 unless the first time is at most twice the second.
#     RANKS=2 bench/scripts/tenants.sh OUT
set -uo pipefail
out=${1:?usage: tenants.sh OUT [SERVER OPTION...]}
shift
here=$(dirname "$0")
program=${PROGRAM:-$here/../../cp_attn}
model=${MODEL_DIR:-$here/../../tests/data/tiny-llama}
ranks=${RANKS:-1} rounds=${ROUNDS:-3} most=${MOST:-2}
input=${INPUT:-256} output=${OUTPUT:-250}             # tokens of each request of the flood
other_input=${OTHER_INPUT:-64} other_output=${OTHER_OUTPUT:-8} requests=${REQUESTS:-10}
start=()
[ "$ranks" = 1 ] || start=(mpirun --oversubscribe -np "$ranks")
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mkdir -p "$out"
for ((i = 0; i < requests; i++)); do
  echo "{\"timestamp\": $((i * 1000)), \"input_length\": $other_input, \"output_length\": $other_output, \"salt\": \"other\"}"
done >"$out/other.jsonl"

# measure NAME N [SERVER OPTION...]: a server of its own, a client that keeps N requests under way until the other one is done.
measure() {
  local name=$1 url='' server flood
  "${start[@]}" "$program" serve --model-dir "$model" --port 0 --shutdown-timeout 0 "${@:3}" >"$out/$name-server.txt" 2>&1 &
  server=$!
  for ((i = 0; i < 600 && ${#url} == 0; i++)); do
    sleep 0.1
    url=$(sed -n 's/^serving .* on \(http:.*\)$/\1/p' "$out/$name-server.txt")
  done
  # Clients of that many have cores of their own elsewhere: here they leave them to what is measured.
  nice -n 19 "$program" bench serve --url "$url" --requests 100000 --max-concurrency "$2" --input-len "$input" \
    --output-len "$output" --extra-body '{"cache_salt": "flood"}' --result-json "$out/$name-flood.json" >"$out/$name-flood.txt" 2>&1 &
  flood=$!
  sleep 2
  "$program" bench serve --url "$url" --trace "$out/other.jsonl" --time-scale 1 --percentiles 90 \
    --result-json "$out/$name.json" >"$out/$name.txt" 2>&1
  kill -INT "$flood"
  wait "$flood"
  kill -TERM "$server"
  wait "$server"
}

for ((round = 1; round <= rounds; round++)); do
  for flood in 500 12; do measure "$flood-$round" "$flood" "$@"; done
done
"${PYTHON:-python3}" - "$out" "$rounds" "$most" <<'END'
import json, pathlib, statistics, sys

out, rounds, most = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
medians = {500: [], 12: []}
print("| beside | tokens/s of its whole answers | requests | TTFT, median ms | p90 |")
print("|---|---|---|---|---|")
for n in medians:
    for i in range(1, rounds + 1):
        flood, other = (json.loads((out / f"{n}-{i}{which}.json").read_text()) for which in ("-flood", ""))
        medians[n].append(other["median_ttft_ms"])
        print(f"| {n} | {flood['output_throughput']:.0f} | {other['completed']} of {other['num_prompts']} | "
              f"{other['median_ttft_ms']:.1f} | {other['p90_ttft_ms']:.1f} |")
ratio = statistics.median(medians[500]) / statistics.median(medians[12])
print(f"\nbeside 500 / beside 12, medians of the rounds: {ratio:.2f}, goal {most:g} at most: {'met' if ratio <= most else 'missed'}")
sys.exit(ratio > most)
END
