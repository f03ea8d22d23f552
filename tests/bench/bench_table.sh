#!/usr/bin/env bash
# Tests of bench/scripts/gpu_table.py over made-up measurements of every case of bench/scripts/gpu_cases.py: what reaches its goal is met,
# what does not is not, a wrong result is neither, and what was not measured counts as not run.
set -euo pipefail
bench=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../bench/scripts" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONDONTWRITEBYTECODE=1

fail() {
    echo "bench_table.sh: $*" >&2
    exit 1
}

# measure FOLDER: a measurement of each case that reaches every goal.
measure() {
    rm -rf "$1" && mkdir "$1"
    PYTHONPATH=$bench python3 - "$1" <<'END'
import json, pathlib, sys
import gpu_cases
folder = pathlib.Path(sys.argv[1])
row = {"time_us": 100.0, "gflops": 600e3, "gbytes_per_s": 3000.0, "share_of_bandwidth": 0.95, "efficiency": 0.995,
       "speedup": 3.8, "exposed_share": 0.001, "added_us": 9.0, "differ_us": 1.0, "shard_us": 50.0, "wrong": 0}
def save(name, cases, **changed):
    rows = [row | {"shape": case, "ranks": 4} | changed for case in cases]
    for quick in (r for r in rows if "kv-cache-dtype=int8" in r["shape"] or "fp8" in r["shape"]):
        quick["time_us"] = 50.0
    for skipped in (r for r in rows if "light-keys" in r["shape"] and "skip-tiles" in r["shape"]):
        skipped |= {"time_us": 70.0, "tiles_left_out": 0.6}
    run = {"rows": rows, "ranks": 4, "read_gbytes_per_s": 3100.0, "copy_gbytes_per_s": 3000.0, "link_gbytes_per_s": 3100.0, "launch_us": 2.5}
    (folder / f"{name}.json").write_text(json.dumps(run))
for name in ("decode", "decode-large", "cascade", "quantised", "small-blocks", "rules", "ruled-caches", "short-prompts", "varlen", "merge", "kv_write", "kv_pack", "kv_convert", "layouts", "exchange", "scaling", "latents", "expanded", "experts", "dense-product"):
    save(f"ours-{name}", gpu_cases.LISTS[name])
for name in ("index_write", "index_q", "q_norm_rope_kv_write", "inverse_rope_quant", "compress_write"):
    save(f"ours-{name}", gpu_cases.LISTS[name])
for name in ("sparse", "index_logits", "topk"): # a layer that chooses takes these three, a small part of all keys
    save(f"ours-{name}", gpu_cases.LISTS[name], time_us=4.5, gflops=1400e3)
save("peer-topk", gpu_cases.LISTS["topk"], time_us=18.0)
save("peer-flashinfer", gpu_cases.LISTS["latents"] + gpu_cases.LISTS["cascade"], time_us=110.0)
for round in (1, 2):
    save(f"ours-prefill-{round}", gpu_cases.LISTS["prefill"])
    save(f"peer-cudnn-{round}", gpu_cases.LISTS["cudnn"], gflops=590e3)
    save(f"ours-encoders-{round}", gpu_cases.LISTS["varlen_attend"])
    save(f"peer-encoders-{round}", gpu_cases.LISTS["varlen_attend"], gflops=590e3)
for name, cases in (("xattn-dense", "xattn-dense"), ("attend_blocks", "attend_blocks"), ("attend_beside", "attend_beside"), ("beside-chunk", "beside-chunk"), ("beside-decode", "beside-decode"), ("xattn", "xattn"), ("xattn_estimate", "xattn"), ("offload-memory", "offload-memory")):
    save(f"ours-{name}", gpu_cases.LISTS[cases])
save("ours-skip-tiles", gpu_cases.LISTS["skip-tiles"], tiles_left_out=0.0)
save("ours-offload", gpu_cases.LISTS["offload"], gbytes_per_s=2000.0)
save("peer-expanded", gpu_cases.LISTS["expanded"], gflops=590e3)
save("peer-context_parallel", gpu_cases.LISTS["context_parallel"], gflops=500e3, rotate="allgather")
served = {"median_itl_ms": 1.4, "duration": 9.0, "completed": 1, "verify": {"violations": 0},
          "cp": {"size": 4, "staging_bytes": 1 << 29}}
for name in ("step-1", "step-4", "million"):
    (folder / f"ours-{name}.json").write_text(json.dumps(served))
END
}

again() { # FOLDER: the same measurement
    rm -rf "$1" && cp -r "$work/all" "$1" && rm "$1/table.json"
}

# change FILE SHAPE COLUMN VALUE: changes one figure.
change() {
    python3 - "$@" <<'END'
import json, sys
path, shape, column, value = sys.argv[1:]
run = json.load(open(path))
for row in run["rows"]:
    if row["shape"] == shape:
        row[column] = float(value)
json.dump(run, open(path, "w"))
END
}

table() { # FOLDER: into table.md, the exit code in $code
    code=0
    python3 "$bench/gpu_table.py" "$1" >"$work/table.md" || code=$?
}

expect_line() { # PATTERN: lines of the table
    grep -q -- "$1" "$work/table.md" || { cat "$work/table.md" && fail "no line is like '$1'"; }
}

measure "$work/all"
table "$work/all"
[ "$code" = 0 ] || fail "exit $code"
expect_line '^[1-9][0-9]* goals met, 0 missed, 0 not run; 0 wrong results$'
goals=$(sed -n 's/ goals met.*//p' "$work/table.md")
[ "$(python3 -c 'import json, sys; print(sum(r["met"] == "yes" for r in json.load(open(sys.argv[1]))["rows"] if r["goal"]))' \
    "$work/all/table.json")" = "$goals" ] || fail "table.json does not hold the $goals rows that are met"
table "$work/all" # its own table.json is no measurement
expect_line "^$goals goals met, 0 missed"

# One figure short of its goal at a time.
missed() { # FILE SHAPE COLUMN VALUE LINES: so many goals are missed then
    again "$work/missed"
    change "$work/missed/$1" "$2" "$3" "$4"
    table "$work/missed"
    [ "$code" = 0 ] || fail "exit $code for a missed goal"
    expect_line "^$((goals - $5)) goals met, $5 missed, 0 not run"
}
missed peer-cudnn-1.json 1x8Kx8K:mask=full gflops 700e3 1 # the median with the other round: 645e3
missed ours-encoders-1.json 64x577x577:mask=full:q-heads=16:kv-heads=16:head-dim=64 gflops 340e3 2 # 470e3 with the other: beside cuDNN, and long segments
missed ours-varlen.json 64x8K gflops 530e3 1
missed ours-decode.json 1x1x16K time_us 200 0 # 190 us of reading: held to the share
missed ours-decode.json 1x1x1K share_of_bandwidth 0.3 1 # 30 us of reading: at most 42 us
missed ours-quantised.json 16x1x128K:kv-cache-dtype=int8 time_us 56 1
missed ours-cascade.json 64x1x17K:shared=16K time_us 131 1
missed ours-cascade.json 2x1x4K:shared=2K time_us 104 1
missed ours-latents.json 64x1x16K:v-in-k=true:q-heads=128 gflops 590e3 1
missed ours-latents.json 64x1x16K:v-in-k=true:q-heads=16 share_of_bandwidth 0.91 1
missed peer-flashinfer.json 64x1x16K:v-in-k=true:q-heads=128 time_us 95 1
missed ours-sparse.json 64x8Mx2K time_us 5.5 1
missed ours-topk.json 1x128Kx2K time_us 30 1
missed peer-topk.json 64x128Kx2K time_us 12 1
missed ours-index_logits.json 1x4Kx64K gflops 1380e3 1
missed ours-index_q.json 8K share_of_bandwidth 0.85 1
missed ours-expanded.json 1x16Kx16K:q-heads=128:kv-heads=128:head-dim=192:v-head-dim=128 gflops 580e3 1
missed ours-experts.json 4Kx4Kx7K:experts=256 gflops 410e3 1
missed ours-attend_blocks.json 64Kx64Kx25 gflops 530e3 1
missed ours-attend_beside.json 16Kx64Kx25x63x16K time_us 220 1
missed ours-skip-tiles.json 1x64Kx64K:skip-tiles=1000 time_us 102 1
missed ours-skip-tiles.json 1x64Kx64K:light-keys=0.7:skip-tiles=6 time_us 73 1
missed ours-xattn.json 256Kx256Kx8x90 gflops 500e3 1
missed ours-xattn_estimate.json 64Kx64Kx16x90 gflops 500e3 1
missed ours-offload.json 1x1x128K share_of_bandwidth 0.79 1
missed ours-offload.json 1x16Kx128K time_us 115 1 # 100 us in memory, 74 us of the link
missed ours-merge.json 32Kx3 share_of_bandwidth 0.87 1
missed ours-merge.json 32Kx3 share_of_bandwidth 0.84 2
missed ours-scaling.json 1x512Kx512K efficiency 0.985 1
missed ours-scaling.json 64x1x8K added_us 11.5 1
missed ours-scaling.json 64x1x128K differ_us -7.0 1
missed peer-context_parallel.json 1x64Kx64K gflops 550e3 1

again "$work/missed"
change "$work/missed/ours-decode.json" 16x1x16K wrong 1
table "$work/missed"
[ "$code" = 1 ] || fail "exit $code for a wrong result"
expect_line '^| decode 16x1x16K |.*| WRONG |$'
expect_line ' 1 missed, 0 not run; 1.* wrong results$'

# One GPU: what needs four was not run and is not met.
rm -rf "$work/one" && mkdir "$work/one"
cp "$work/all"/*-{prefill,cudnn}-?.json "$work/one"
table "$work/one"
expect_line '^| causal prefill 1x64Kx64K over 4 GPUs |  |  |  | >= 0.96 x | not run |$'
grep 'over 4 GPUs\|merge 32K' "$work/table.md" | grep -v '| not run |$' && fail "a row that was not run has a verdict"
[ "$(grep -c '| yes |$' "$work/table.md")" -gt 20 ] || fail "what was run has none"

# Two GPUs are not four.
mkdir "$work/two"
sed 's/"ranks": 4/"ranks": 2/g' "$work/all/ours-scaling.json" >"$work/two/ours-scaling.json"
table "$work/two"
expect_line '^0 goals met, 0 missed'

# Beside a baseline: nothing is worse than itself; a slower figure and a goal that is missed now are named.
worse() { # LINES PATTERN: compare.py finds so many lines in the folder "missed", one like the pattern
    code=0
    table "$work/missed"
    python3 "$bench/compare.py" "$work/baseline.json" "$work/missed/table.json" >"$work/worse" || code=$?
    [ "$code" = $(($1 > 0)) ] && [ "$(wc -l <"$work/worse")" = $(($1 + 1)) ] && grep -q "$2" "$work/worse" ||
        { cat "$work/worse" && fail "compare.py: not $1 lines, one like '$2'"; }
}
python3 "$bench/compare.py" --baseline "$work/all/table.json" >"$work/baseline.json"
again "$work/missed"
worse 0 ' 0 worse$'
change "$work/missed/ours-prefill-1.json" 1x64Kx64K gflops 500e3 # the median with the other round: 550e3; four works use it
worse 5 "^slower by 8.3%: prefill 1x64Kx64K: 550 TFLOP/s, was 600 TFLOP/s$"
again "$work/missed"
change "$work/missed/ours-merge.json" 32Kx3 share_of_bandwidth 0.84
worse 1 '^goal missed that was met: merge 32Kx3: '
