# Cases of program_test.sh. Where memory lacks.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

answer=(generate --model-dir "$MODELS/tiny-llama" --prompt Hello --max-tokens 2 --skip-self-test --join-timeout 5
    --rank-timeout 3)

# expect_end_in_want WHAT: the run ended, and said why unless it did what it should; Open MPI has words of its own.
expect_end_in_want() {
    [ "$code" -le 3 ] || fail "exit code $code: $1: $(cat err)"
    [ "$code" != 2 ] || fail "want of memory is no bad input: $1: $(cat err)"
    [ "$code" = 0 ] || our_lines | grep -q . || grep -q '_init failed for some reason' err ||
        fail "no line: $1: $(cat out err)"
}

# with_failure RANKS RANK NUMBER: the run with one allocation of one rank failing.
with_failure() {
    local start="" ranks=$1
    [ "$ranks" = 1 ] || start="$MPIRUN -np $ranks"
    export CP_ATTN FAIL_MALLOC_LIBRARY
    # shellcheck disable=SC2086,SC2016
    timeout -k 1 "$limit" $start bash -c '[ "${OMPI_COMM_WORLD_RANK:-0}" != "$0" ] ||
        export LD_PRELOAD=$FAIL_MALLOC_LIBRARY FAIL_MALLOC=$1; shift; exec "$CP_ATTN" "$@"' \
        "$2" "$3" "${answer[@]}" >out 2>err
    code=$?
    expect_end_in_want "allocation $3 of rank $2 of $ranks"
}

# lack_of_memory [all]: an allocation that fails, and an address space that is too small, end a run soon, with a line. Of
# the allocations some fail, one at a time; all: each of one rank, and one in ten of two.
lack_of_memory() {
    local count n every=1 kilobytes
    for n in 1 2; do
        [ "${1:-}" = all ] || every=$((n * 130))
        with_failure "$n" 0 count
        count=$(sed -n 's/^allocations: //p' err)
        [ "$count" -gt 100 ] || fail "the allocations were not counted: $(cat err)"
        for ((i = every; i <= count; i += every)); do with_failure "$n" $((i / every % n)) "$i"; done
        [ "${1:-}" != all ] || every=10
    done
    for kilobytes in 100000 300000; do
        # shellcheck disable=SC2016,SC2086
        timeout -k 1 "$limit" $MPIRUN -np 2 bash -c 'ulimit -v "$0"; exec "$CP_ATTN" "$@"' \
            $kilobytes "${answer[@]}" >out 2>err
        code=$?
        # The loader of a larger program ends it before it begins.
        grep -q 'error while loading shared libraries' err || expect_end_in_want "$kilobytes KB of address space"
    done
}

# What is large does not lie on the stack.
small_stack() {
    (ulimit -s 256 && exec "$CP_ATTN" "${answer[@]}") >out 2>err
    code=$?
    expect_code 0 "a stack of 256 KB"
    small_model
    (ulimit -s 256 && exec "$CP_ATTN" --model model.yaml --requests 1 --input-len 20 --output-len 2) >out 2>err
    code=$?
    expect_code 0 "a stack of 256 KB, and a model of a file"
}
