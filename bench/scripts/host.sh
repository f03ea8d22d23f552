#!/usr/bin/env bash
# Measures the host back end on one core beside PyTorch's CPU attention on the same core, in turn, and records both:
# bench/results/<date>-host-<cpu>.md and .json, which must not exist. Run ./quickstart build first.
#     PYTHON=python3 ROUNDS=2 bench/scripts/host.sh
# PYTHON names an interpreter that has PyTorch; each round runs ours and then the peer. A wrong result of ours ends it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3} rounds=${ROUNDS:-2}

[ -x ./cp_attn ] || { echo "host.sh: no ./cp_attn; run ./quickstart build" >&2; exit 2; }
"$python" -c 'import torch' 2>/dev/null || { echo "host.sh: $python has no PyTorch; set PYTHON" >&2; exit 2; }
cpu=$(lscpu | sed -n 's/^Model name: *//p' | head -n 1)
slug=$(tr '[:upper:]' '[:lower:]' <<<"$cpu" | sed 's/(r)//g; s/(tm)//g; s/[^a-z0-9]\+/-/g; s/^-//; s/-$//')
result=bench/results/$(date -u +%F)-host-$slug
for file in "$result.md" "$result.json"; do
    [ ! -e "$file" ] || { echo "host.sh: $file exists and is not overwritten" >&2; exit 2; }
done

# The program binds its one thread to the first core that it may use; the peer is put on the same one.
core=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*\([0-9]*\).*/\1/p' /proc/self/status)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

record() { # NAME COMMAND...: runs it on the core, shows and keeps what it prints
    local name=$1
    shift
    { echo "\$ $*"; taskset -c "$core" "$@"; echo; } | tee -a "$work/$name.txt"
}

for dtype in fp32 bf16; do
    for ((round = 1; round <= rounds; round++)); do
        record tables ./cp_attn bench attend --threads 1 --dtype "$dtype" --result-json "$work/ours-$dtype-$round.json"
        record tables "$python" bench/scripts/torch_attend.py --threads 1 --dtype "$dtype" \
            --result-json "$work/peer-$dtype-$round.json"
    done
done
record tables ./cp_attn bench merge --threads 1 --result-json "$work/merge-fp32-1.json"

mkdir -p bench/results
{
    echo "# Host back end, one core, $(date -u +%F)"
    echo
    echo "$cpu, one core; $(. /etc/os-release && echo "$PRETTY_NAME"); $(cc --version | head -n 1);" \
        "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown). Command: \`ROUNDS=$rounds bench/scripts/host.sh\`;" \
        "figures are the median over rounds of each case's median."
    echo
    "$python" bench/scripts/summary.py "$work" "$result.json"
    echo
    echo '```'
    sed "s|$work/||g; s|^\\\$ $python|\$ python3|" "$work/tables.txt"
    echo '```'
} >"$work/result.md"
mv -n "$work/result.md" "$result.md"
echo "host.sh: wrote $result.md and $result.json"
