# Cases of program_test.sh. How ranks find, and lose, each other.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# start_store RANKS ARGUMENT...: ranks that the shell starts, without mpirun: pids, and out.RANK and err.RANK.
start_store() {
    local ranks=$1 rank
    shift
    pids=()
    export WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
    for ((rank = 0; rank < ranks; rank++)); do
        RANK=$rank timeout "$limit" "$CP_ATTN" "$@" >out.$rank 2>err.$rank &
        pids+=($!)
    done
    unset WORLD_SIZE MASTER_ADDR MASTER_PORT
}

# Ranks that meet over TCP, without MPI, give what those of mpirun give.
store() {
    small_model
    mixed_trace >trace.jsonl
    local arguments=(--model model.yaml --trace trace.jsonl --verify 0.2 --skip-self-test)
    run 3 "${arguments[@]}" --result-json mpi.json
    expect_code 0 "three ranks of mpirun"
    start_store 3 "${arguments[@]}" --result-json tcp.json
    for rank in 0 1 2; do
        wait "${pids[$rank]}" || { fail "rank $rank over TCP ended with $?"; cat out.$rank err.$rank; }
    done
    expect_value violations 0 tcp.json
    grep '^digest' out out.0
    [ "$(grep '^digest' out)" = "$(grep '^digest' out.0)" ] || fail "other results over TCP than over MPI"
    # What cannot be a place to meet is said, by every rank.
    RANK=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29000 run 1 "${arguments[@]}"
    expect_code 2 "a rank beyond the last"
    expect_line "RANK: found '2', expected a number of 0..1"
}
