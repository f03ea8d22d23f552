#!/usr/bin/env bash
# Tests of `cp_attn bench`; tests/bench.cmake calls it.
#     bench.sh right    PROGRAM    every benchmark finds no wrong result, and says so in the table, the JSON, the exit code
#     bench.sh wrong    TWIN       a fault in the kernel is counted under #wrong, exit 1
#     bench.sh bad      PROGRAM    bad usage is one line and exit 2; a JSON file is never overwritten
# The environment gives MPIRUN (with its options, -np excepted).
set -euo pipefail

fail() {
    echo "bench.sh: $*" >&2
    exit 1
}

# bench RANKS ARGUMENT...: runs it into out.txt and err.txt; the exit code in $code. One rank runs without mpirun, which
# takes seconds to end a job that fails.
bench() {
    local start=""
    [ "$1" = 1 ] || start="$MPIRUN -np $1"
    shift
    code=0
    $start "$program" bench "$@" --threads 1 >out.txt 2>err.txt || code=$?
    cat out.txt err.txt
}

# No row is wrong, and every row has checked something. The last columns are `checked` and `#wrong`.
expect_right() { # CASES
    [ "$code" = 0 ] || fail "exit $code"
    awk -v cases="$1" '!/^#/ { n++; if ($(NF - 1) <= 0 || $NF != 0) bad = 1 } END { exit bad || n != cases }' out.txt ||
        fail "not $1 rows that are checked and right"
}

results_are_right() {
    local dtype
    for dtype in fp32 bf16 fp16; do
        rm -f attend.json
        bench 1 attend --dtype $dtype --shapes 1x96x96,2x33x201 --iters 3 --json attend.json
        expect_right 2
        [ "$(grep -c '"wrong": 0' attend.json)" = 2 ] || fail "attend.json does not hold two right rows"
        bench 1 merge --dtype $dtype --shapes 40x2,40x5 --iters 3
        expect_right 2
    done
    bench 1 attend --shapes 3x1x500 --iters 3
    expect_right 1
    awk '!/^#/ && $(NF - 2) <= 0 { bad = 1 } END { exit bad }' out.txt || fail "no read bandwidth beside decode"
    bench 2 attend --q-heads 6 --kv-heads 3 --head-dim 40 --block-size 4 --shapes 1x50x70 --iters 3
    expect_right 1
    for ranks in 2 3; do
        bench $ranks exchange --shapes 1,1000,64K --iters 3
        expect_right 3
    done
}

faults_are_counted() {
    local fault
    for fault in off-by-one-mask swapped-kv-head; do
        export CPATTN_FAULT=$fault
        bench 1 attend --shapes 1x96x96 --iters 3
        [ "$code" = 1 ] || fail "$fault: exit $code, expected 1"
        awk '!/^#/ && $NF > 0 { found = 1 } END { exit !found }' out.txt || fail "$fault: no wrong rows"
    done
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
    bench 1 attend --shapes 1x9x3 && expect_refusal "context of 3"
    bench 1 exchange && expect_refusal "at least 2"
    bench 2 exchange --shapes 3x3 && expect_refusal 3x3
    echo kept >kept.json
    bench 1 merge --shapes 8x2 --json kept.json && expect_refusal kept.json
    [ "$(cat kept.json)" = kept ] || fail "kept.json was overwritten"
}

program=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
case $1 in
    right) results_are_right ;;
    wrong) faults_are_counted ;;
    bad) bad_usage_is_refused ;;
    *) fail "unknown command '$1'" ;;
esac
