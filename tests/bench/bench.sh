#!/usr/bin/env bash
# Tests of `cp_attn bench`; CMakeLists.txt beside it calls it.
#     bench.sh right    PROGRAM    every benchmark finds no wrong result, and says so in the table, the JSON, the exit code
#     bench.sh wrong    TWIN       a fault in the kernel is counted under #wrong, exit 1
#     bench.sh device   PROGRAM    the same on RANKS devices, one case of each kind
#     bench.sh bad      PROGRAM    bad usage is one line and exit 2; a JSON file of an earlier run stays
# The environment gives MPIRUN (with its options, -np excepted). Where there are fewer devices, `device` exits 77.
set -euo pipefail

fail() {
    echo "bench.sh: $*" >&2
    exit 1
}

# bench RANKS ARGUMENT...: runs it on $device into out.txt and err.txt; the exit code in $code. One rank runs without
# mpirun, which takes seconds to end a job that fails.
bench() {
    local start=""
    [ "$1" = 1 ] || start="$MPIRUN -np $1"
    shift
    code=0
    $start "$program" bench "$@" --device $device --threads 1 >out.txt 2>err.txt || code=$?
    cat out.txt err.txt
}

# No row is wrong, and every row has checked something. The last columns are `checked` and `#wrong`.
expect_right() { # CASES
    [ "$code" = 0 ] || fail "exit $code"
    awk -v cases="$1" '!/^#/ { n++; if ($(NF - 1) <= 0 || $NF != 0) bad = 1 } END { exit bad || n != cases }' out.txt ||
        fail "not $1 rows that are checked and right"
}

# The file is JSON with that many rows; each has a positive time and has checked something, none is wrong.
expect_json() { # FILE ROWS
    python3 - "$1" "$2" <<'END' || fail "$1 does not hold $2 right rows"
import json, sys
rows = json.load(open(sys.argv[1]))["rows"]
good = [row for row in rows if row["time_us"] > 0 and row["gflops"] > 0 and row["checked"] > 0 and row["wrong"] == 0]
sys.exit(not len(rows) == len(good) == int(sys.argv[2]))
END
}

# The steps and the one sequence of as many pairs, of lengths of its own and of a trace: work to within a token a prompt.
varlen_steps_do_the_work_of_one_sequence() {
    printf '{"timestamp": 0, "input_length": %d, "output_length": 1}\n' 700 90 430 >trace.jsonl
    local own=6x100:length-scale=0.02 traced=3x64 list
    for list in "$own,$own:as-one=true" "$traced,$traced:as-one=true --trace trace.jsonl"; do
        rm -f varlen.json
        bench 1 varlen --iters 3 --result-json varlen.json --shapes $list
        expect_right 2
        expect_json varlen.json 2
        python3 - <<'END' || fail "the work differs"
import json, sys
steps, one = (row["gflops"] * row["time_us"] for row in json.load(open("varlen.json"))["rows"])
sys.exit(abs(steps / one - 1) > 0.02)
END
    done
    bench 1 varlen --iters 3 --shapes 65x100
    [ "$code" = 2 ] || fail "65 of 64 prompts: exit $code"
    grep -q "at most the 64" err.txt || fail "the line does not say how many prompts there are"
}

results_are_right() {
    local dtype
    for dtype in fp32 bf16 fp16; do
        rm -f attend.json
        bench 1 attend --dtype $dtype --shapes 1x96x96,2x33x201 --iters 3 --result-json attend.json
        expect_right 2
        expect_json attend.json 2
        grep -q '"kernels": *"[A-Za-z]' attend.json || fail "the file names no kernel"
        bench 1 varlen_attend --dtype $dtype --shapes 3x77x77:mask=full,2x5x130:head-dim=72 --iters 3
        expect_right 2
        bench 1 merge --dtype $dtype --shapes 40x2,1200x5 --iters 3
        expect_right 2
        bench 1 kv_write --dtype $dtype --shapes 100,65:block-size=32,70:dtype=fp32 --iters 3
        expect_right 3
        bench 1 kv_pack --dtype $dtype --shapes 100,65:block-size=32:pages=ordered --iters 3
        expect_right 2
        bench 1 kv_convert --dtype $dtype --shapes 96:layout=vllm-x,64:layout=head-major:block-size=32 --iters 3
        expect_right 2
        bench 1 linear --dtype $dtype --shapes 3x128x300,20x64x33 --iters 3
        expect_right 2
        bench 1 expert_linear --dtype $dtype --shapes 3x140x300:top-k=2,20x64x33:experts=30:fp8-weights=true --iters 3
        expect_right 2
        bench 1 rmsnorm --dtype $dtype --shapes 3x100,40x64 --iters 3
        expect_right 2
        bench 1 rmsnorm_codes --dtype $dtype --shapes 3x100,40x256 --iters 3
        expect_right 2
        bench 1 rmsnorm2 --dtype $dtype --shapes 3,40 --iters 3
        expect_right 2
        bench 1 rotate --dtype $dtype --shapes 3x5,40x2 --iters 3
        expect_right 2
        bench 1 latent_norm_rope --dtype $dtype --shapes 3,40:kv-cache-dtype=fp8_t128 --iters 3
        expect_right 2
        bench 1 q_norm_rope_kv_write --dtype $dtype --shapes 3x5,40x2 --iters 3
        expect_right 2
        bench 1 inverse_rope_quant --dtype $dtype --shapes 3x5,40x2 --iters 3
        expect_right 2
        bench 1 compress_write --dtype $dtype --shapes 3x4,40x4,2x128 --iters 3
        expect_right 3
        bench 1 index_write --dtype $dtype --shapes 3,40 --iters 3
        expect_right 2
        bench 1 index_q --dtype $dtype --shapes 3,40 --iters 3
        expect_right 2
        bench 1 index_logits --dtype $dtype --shapes 2x3x70,1x1x300:block-size=64 --iters 3
        expect_right 2
        bench 1 swiglu --dtype $dtype --shapes 3x100,40x64 --iters 3
        expect_right 2
        bench 1 qk_norm_rope --dtype $dtype --shapes 5,50:kv-cache-dtype=int8 --iters 3
        expect_right 2
        bench 1 sample --dtype $dtype --shapes 3x1000,20x500 --iters 3
        expect_right 2
        bench 1 topk --dtype $dtype --shapes 3x1000x50,20x500x600 --iters 3
        expect_right 2
    done
    for ranks in 1 2 3; do
        bench $ranks step --shapes 5x300:block-size=16,9x4K:block-size=16:shared=2K --iters 2000
        expect_right 2
    done
    bench 1 attend --shapes 3x1x500,9x1x500:ragged=true,1x20x90:mask=full,1x20x90:v-head-dim=72:dtype=bf16 --iters 3
    expect_right 4
    awk '!/^#/ && $(NF - 3) <= 0 { bad = 1 } END { exit bad }' out.txt || fail "no share of the read bandwidth"
    awk '!/^#/ && $(NF - 2) !~ /^[A-Za-z]/ { bad = 1 } END { exit bad }' out.txt || fail "no kernel is named"
    bench 1 attend --shapes 3x1x500:kv-cache-dtype=int8,2x33x201:kv-cache-dtype=fp8_e4m3:dtype=bf16 --iters 3
    expect_right 2
    # LSEs of 17.6, and scores of many terms, which fp32 rounds by more than the least tolerance.
    bench 1 attend --shapes 4x1x1K:kv-cache-dtype=fp8_e4m3,1x64x64:head-dim=256 --iters 3
    expect_right 2
    varlen_steps_do_the_work_of_one_sequence
    bench 2 attend --q-heads 6 --kv-heads 3 --head-dim 40 --block-size 4 --shapes 1x50x70 --iters 3
    expect_right 1
    for ranks in 2 3; do
        bench $ranks exchange --shapes 1,1000,64K,1000:pattern=at-once --iters 3
        expect_right 4
        ! grep -qE 'GFLOP|%| - ' out.txt || fail "a column of the exchange has no figures"
        # The columns behind the time and the iterations; what is printed has two decimals.
        awk -v n=$ranks '!/^#/ { algbw = $4; busbw = $5; time_us = $2; sum += busbw; rows++
                if ($1 == "64K" && ((d = busbw - (n - 1) * 65536 / time_us / 1e3) > 0.02 || d < -0.02)) bad = 1
                if ((d = algbw * (n - 1) / n - busbw) > 0.02 || d < -0.02) bad = 1 }
            /^# average busbw:/ { average = $4 }
            END { d = average - sum / rows; exit bad || rows != 4 || d > 0.02 || d < -0.02 }' out.txt ||
            fail "algbw, busbw and their average do not agree"
    done
    for ranks in 1 2 3; do
        rm -f scaling.json
        bench $ranks scaling --context 400 --max-num-batched-tokens 150 --batch 4 --decode-context 130 --dtype bf16 \
            --iters 4 --result-json scaling.json
        expect_right $((ranks == 1 ? 2 : 4))
        # 400 tokens of prefill in three steps, and one of decode.
        python3 -c 'import json, sys
sys.exit({row["iterations"] for row in json.load(open("scaling.json"))["rows"]} != {3 * 4, 4})' ||
            fail "not as many iterations as were asked for"
        expect_json scaling.json $((ranks == 1 ? 2 : 4))
    done
    bench 3 scaling --ranks 1,2,3 --shapes 1x70x200,3x1x100 --min-time 0 --iters 2
    expect_right 6
    [ "$(awk '!/^#/ { printf "%s%s ", $1, $3 }' out.txt)" = "prefill1 prefill2 prefill3 decode1 decode2 decode3 " ] ||
        fail "not the ranks that were asked for"
    bench 3 scaling --ranks 2 --shapes 3x1x100 --min-time 0 --iters 2
    expect_right 2
    bench 2 scaling --shapes 1x70x200:kv-cache-dtype=int8,3x1x100 --max-num-batched-tokens 40 --min-time 0.1
    expect_right 4
    grep -q '^# cores: ' out.txt || awk '$1 == "prefill" && $13 != "-" || $1 == "decode" && $3 == 2 && $13 !~ /^-?[0-9.]+$/ { bad = 1 }
        END { exit bad }' out.txt || fail "what decode adds to attention is not there, or something else is"
    $MPIRUN -np 2 "$program" bench scaling --device host --threads "$(nproc)" --shapes 2x1x100 --iters 1 >out.txt
    grep -q '^# cores: the ranks of a host share them' out.txt || fail "not said that cores are shared"
    awk '$1 == "decode" && $13 != "-" { bad = 1 } END { exit bad }' out.txt || fail "added, on shared cores"
    awk '$1 == "decode" && $3 == 3 && ($9 <= 0 || $12 <= 0) { bad = 1 } END { exit bad }' out.txt ||
        fail "no speedup, or nothing was sent"
}

device_results_are_right() { # RANKS
    local attend=1x96x96,3x1x500:dtype=fp16,2x65x201:block-size=16:head-dim=64,1x130x130:head-dim=256:mask=full
    attend+=,9x1x500:ragged=true:kv-cache-dtype=int8,1x70x300:kv-cache-dtype=fp8_e4m3,1x40x90:head-dim=72
    device=cuda
    bench "$1" merge --iters 3 --shapes 40x2,1200x5:dtype=fp32
    ! grep 'found [0-9]* CUDA devices for' err.txt || exit 77
    expect_right 2
    bench "$1" step --iters 500 --shapes 5x300:block-size=16,9x4K:block-size=16:shared=2K
    expect_right 2
    if [ "$1" -gt 1 ]; then
        bench "$1" exchange --iters 3 --shapes 1000:transport=peer,1M:transport=nccl:pattern=at-once
        expect_right 2
        bench "$1" scaling --iters 3 --shapes 1x500x2000,5x1x1000 --max-num-batched-tokens 200
        expect_right 4
        awk -v n="$1" '$3 == n && ($9 <= 0 || $12 <= 0) { bad = 1 } END { exit bad }' out.txt || fail "nothing was sent"
        return
    fi
    bench 1 attend --iters 3 --shapes $attend
    expect_right 7
    bench 1 varlen --iters 3 --shapes 6x100:length-scale=0.02
    expect_right 1
    bench 1 varlen_attend --iters 3 --shapes 3x577x577:head-dim=64:mask=full,2x300x300:head-dim=80,4x1x1500
    expect_right 3
    bench 1 kv_write --iters 3 --shapes 100,70:dtype=fp32:kv-cache-dtype=bf16
    expect_right 2
    bench 1 kv_pack --iters 3 --shapes 100,65:block-size=16:pages=ordered
    expect_right 2
}

faults_are_counted() {
    local fault
    for fault in off-by-one-mask swapped-kv-head; do
        export CPATTN_FAULT=$fault
        bench 1 attend --shapes 1x96x96 --iters 3
        [ "$code" = 1 ] || fail "$fault: exit $code, expected 1"
        awk '!/^#/ && $NF > 0 { found = 1 } END { exit !found }' out.txt || fail "$fault: no wrong rows"
    done
    export CPATTN_FAULT=wrong-scale
    bench 1 attend --shapes 1x96x96:kv-cache-dtype=int8 --iters 3
    [ "$code" = 1 ] || fail "wrong-scale: exit $code, expected 1"
    export CPATTN_FAULT=dropped-shard
    bench 2 scaling --context 200 --batch 4
    [ "$code" = 1 ] || fail "dropped-shard: exit $code, expected 1"
}

expect_refusal() { # WORD: one line on stderr that contains it, exit 2, no table
    [ "$code" = 2 ] || fail "exit $code, expected 2"
    [ "$(grep -c '^cp_attn: ' err.txt)" = 1 ] || fail "not one line"
    grep -q -- "^cp_attn: .*$1" err.txt || fail "the line does not name $1"
    [ ! -s out.txt ] || fail "a table was printed"
}

bad_usage_is_refused() {
    bench 1 nothing && expect_refusal nothing
    bench 1 attend --no-such-option 1 && expect_refusal no-such-option
    bench 1 attend --dtype int7 && expect_refusal int7
    bench 1 attend --shapes 1x2 && expect_refusal 1x2
    bench 1 attend --shapes 1x2x3:head-dim=0 && expect_refusal head-dim
    bench 1 attend --shapes 1x2x3:threads=2 && expect_refusal threads=2
    bench 1 attend --shapes 1x2x3: && expect_refusal 1x2x3:
    bench 1 attend --shapes 1x2x3:kv-heads=3 && expect_refusal "multiple of the 3 KV heads"
    bench 1 attend --shapes 1x2x3:kernels=simple && expect_refusal CUDA
    bench 1 attend --device=gpu && expect_refusal gpu
    bench 1 kv_write --shapes 64:dtype=bf16:kv-cache-dtype=fp16 && expect_refusal bf16
    bench 2 exchange --shapes 64:transport=nccl && expect_refusal transport
    bench 2 scaling --context 0 && expect_refusal context
    bench 2 scaling --ranks 1,3 && expect_refusal "found '1,3', expected numbers from 1 to the 2"
    grep -q 'start it as mpirun -np 3 cp_attn bench scaling --ranks 1,3' err.txt || fail "no line with 3 ranks: $(cat err.txt)"
    bench 2 scaling --ranks 2,1 && expect_refusal "each larger than the one before"
    bench 2 scaling --ranks 2, && expect_refusal "found '2,'"
    bench 1 attend --shapes 1x9x3 && expect_refusal "context of 3"
    bench 1 kv_pack --kv-cache-dtype int8 && expect_refusal int8
    bench 2 scaling --shapes 1x9x3 && expect_refusal "context of 3"
    bench 1 exchange && expect_refusal "at least 2"
    bench 2 exchange --shapes 3x3 && expect_refusal 3x3
    echo kept >kept.json
    bench 1 merge --shapes 8 --result-json kept.json && expect_refusal "expected 2 numbers"
    [ "$(cat kept.json)" = kept ] || fail "a run that was refused touched kept.json"
    bench 1 merge --shapes 8x2 --iters 1 --result-json none/kept.json && expect_refusal none/kept.json
    bench 1 merge --shapes 8x2 --iters 1 --result-json kept.json
    [ "$(cat kept.json.old)" = kept ] || fail "what an earlier run left in kept.json is lost"
    code=0
    "$program" bench merge --shapes 8x2 --iters 1 --device host --result-json full.json >/dev/full 2>err.txt || code=$?
    [ "$code" = 3 ] || fail "exit $code with standard output full"
    grep -q '^cp_attn: .*standard output could not be written' err.txt || fail "no line about standard output"
}

program=$2
device=host
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
case $1 in
    right) results_are_right ;;
    wrong) faults_are_counted ;;
    device) device_results_are_right "$RANKS" ;;
    bad) bad_usage_is_refused ;;
    *) fail "unknown command '$1'" ;;
esac
