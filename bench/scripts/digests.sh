#!/usr/bin/env bash
# The output digests of host runs, which depend on requests, ranks, shapes, dtypes, seed and instruction set alone:
#     bench/scripts/digests.sh PROGRAM [TABLE]
# prints one line a run: ranks, trace, algorithm, options, digest. With TABLE, an earlier output of the same instruction
# set, it exits 1 and names the runs that differ. FEW=1 leaves out most of them.
set -euo pipefail

program=$(realpath "${1:?usage: digests.sh PROGRAM [TABLE]}")
table=${2:+$(realpath "$2")}
read -ra mpirun <<<"${MPIRUN:-mpirun --allow-run-as-root --oversubscribe --bind-to none}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# requests AWK_PROGRAM: a trace of what the program prints as "timestamp input output hash...".
requests() {
    awk "BEGIN { $1 }" | awk '{ line = ""; for (i = 4; i <= NF; i++) line = line (i > 4 ? "," : "") $i
        printf "{\"timestamp\": %d, \"input_length\": %d, \"output_length\": %d, \"hash_ids\": [%s]}\n", $1, $2, $3, line }'
}
requests 'split("1 17 511 512 513 700 1025 64 333 2", n); for (i = 1; i <= 10; i++) {
    printf "0 %d %d", n[i], i % 4 + 1; for (b = 0; b * 512 < n[i]; b++) printf " %d", i * 10 + b; print "" }' >"$work/ragged"
requests 'for (i = 0; i < 8; i++) print 0, 1025 + 37 * i, 3, 1, 2, i % 2 + 3' >"$work/shared"
requests 'for (i = 0; i < 12; i++) print int(i / 4) * 60, 100 + 80 * (i % 5), 2 + i % 3, i' >"$work/bursty"
requests 'for (i = 0; i < 6; i++) print 0, 20 + 30 * i, 40, i' >"$work/decode"

# digest RANKS TRACE ALGORITHM OPTION...
digest() {
    local start=() ranks=$1 trace=$2 algorithm=$3
    shift 3
    [ "$ranks" = 1 ] || start=("${mpirun[@]}" -np "$ranks")
    local options=(--device host --trace "$work/$trace" --algorithm "$algorithm" --verify 0.001 --threads 1 "$@")
    [ "$trace" != bursty ] || options+=(--time-scale 1)
    "${start[@]}" "$program" "${options[@]}" --result-json "$work/result.json" >"$work/out" 2>&1 ||
        { cat "$work/out" >&2; echo "digests.sh: ranks $ranks, $trace, $algorithm $* failed" >&2; exit 1; }
    echo "$ranks $trace $algorithm ${*:-default} $(sed -n 's/.*"output_digest": *"\{0,1\}\([0-9a-fx]*\)"\{0,1\}.*/\1/p' "$work/result.json")"
}

all() {
    local ranks trace algorithm
    for ranks in 1 2 3 4; do
        for trace in ragged shared bursty decode; do
            for algorithm in auto pass-kv pass-q; do
                [ -z "${FEW:-}" ] || [ "$ranks$trace$algorithm" = 2raggedpass-kv ] || [ "$ranks$trace$algorithm" = 3decodepass-q ] || continue
                digest "$ranks" "$trace" "$algorithm"
            done
        done
    done
    for ranks in 1 3; do
        [ -z "${FEW:-}" ] || break
        digest "$ranks" ragged auto --dtype bf16
        digest "$ranks" ragged auto --dtype fp16 --kv-cache-dtype int8
        digest "$ranks" shared auto --dtype bf16 --kv-cache-dtype fp8_e4m3
        digest "$ranks" ragged auto --kv-cache-dtype fp8_e4m3 --k-scale 0.5 --v-scale 0.25
        digest "$ranks" shared pass-kv --kv-layout head-major --window 300 --sinks 4
        digest "$ranks" decode auto --local-context 100 --block-size 32
        digest "$ranks" bursty auto --num-blocks 200 --swap-space 1 --preemption-mode swap
    done
}

all | tee "$work/digests"
[ -z "$table" ] || { differing=$(grep -vxF -f "$table" "$work/digests" || true)
    [ -z "$differing" ] || { printf 'digests.sh: not as in %s:\n%s\n' "$table" "$differing" >&2; exit 1; }; }
