# Cases of program_test.sh. How ranks find, and lose, each other.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# listens PORT: whether some process does.
listens() { grep -qh "$(printf ':%04X 0*:0000 0A' "$1")" /proc/net/tcp /proc/net/tcp6; }

start_rank() { # RANK ARGUMENT...
    RANK=$1 timeout "$limit" "$CP_ATTN" "${@:2}" >out."$1" 2>err."$1" &
    pids["$1"]=$!
}

# start_store RANKS ARGUMENT...: ranks that the shell starts, without mpirun: pids, and out.RANK and err.RANK. They meet
# at a port that nobody else has: rank 0 listens there before the others begin, or another is tried.
start_store() {
    local ranks=$1 rank
    shift
    pids=()
    export WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT CPATTN_JOB_SECRET="a secret of this test"
    for ((i = 0; i < 20; i++)); do
        MASTER_PORT=$((20000 + RANDOM % 10000))
        listens $MASTER_PORT && continue
        start_rank 0 "$@"
        while kill -0 "${pids[0]}" && ! listens $MASTER_PORT; do sleep 0.01; done
        kill -0 "${pids[0]}" && break
    done 2>/dev/null
    for ((rank = 1; rank < ranks; rank++)); do start_rank $rank "$@"; done
    unset WORLD_SIZE MASTER_ADDR MASTER_PORT CPATTN_JOB_SECRET
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
    # Nor do ranks meet without a secret, or with one that is none.
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29000 run 1 "${arguments[@]}"
    expect_code 2 "no secret"
    expect_line "CPATTN_JOB_SECRET: found none, expected a secret that all 2 ranks are given"
    echo short >secret
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29000 run 1 "${arguments[@]}" --job-secret-file secret
    expect_code 2 "a short secret"
    expect_line "--job-secret-file: secret: found 5 letters, expected 16 to 255, the same on all ranks"
    echo 'job-secret-file: secret' >settings.yaml
    run 1 --config settings.yaml
    expect_code 2 "a secret in a settings file"
    expect_line "job-secret-file: found in a file, expected in the command line or the environment of each rank"
}

# start_mpi RANKS ARGUMENT...: ranks of mpirun in the background: job, pid.RANK, out and err. Returns when the run has
# begun.
start_mpi() {
    local ranks=$1
    shift
    export CP_ATTN
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" $MPIRUN -np "$ranks" \
        bash -c 'echo $$ >"pid.$OMPI_COMM_WORLD_RANK"; exec "$CP_ATTN" "$@"' cp_attn "$@" >out 2>err &
    job=$!
    for ((i = 0; i < 300; i++)); do
        grep -q '^run ' out && return
        sleep 0.1
    done
    fail "the run did not begin"
}

# A run that takes far longer than a test.
long_run=(--model model.yaml --requests 2 --input-len 16 --output-len 1000000 --skip-self-test --verify 0
    --num-blocks 70000 --rank-timeout 3 --result-json r.json)

# A rank that is stopped for a while is no fault; one that stays stopped ends the job with a line that names it.
stopped_rank() {
    small_model
    start_mpi 3 "${long_run[@]}"
    kill -STOP "$(cat pid.1)"
    sleep 1.5
    kill -CONT "$(cat pid.1)"
    sleep 3
    kill -0 "$(cat pid.0)" || { fail "a pause of 1.5 s ended the run"; cat err; }
    kill -STOP "$(cat pid.1)"
    local begin=$SECONDS
    wait $job
    code=$?
    expect_code 3 "a rank was stopped"
    expect_line 'rank 1 has not been heard of for 3.'
    [ $((SECONDS - begin)) -lt 12 ] || fail "the others went on for $((SECONDS - begin)) s"
    our_lines
    expect_broken_off 'rank 1 has not been heard of for 3.'
}

# A rank that is stopped before it is in MPI, or after its work, keeps the others from beginning or from ending: that has
# a limit, and what is said by then stands.
stopped_at_an_end() {
    small_model
    local fault line
    export CP_ATTN
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" $MPIRUN -np 3 bash -c '[ "$OMPI_COMM_WORLD_RANK" != 0 ] || kill -STOP $$; exec "$CP_ATTN" "$@"' \
        cp_attn --model model.yaml --requests 1 --input-len 16 --output-len 2 --join-timeout 1 >out 2>err
    code=$?
    expect_code 3 "a rank was stopped before MPI_Init"
    expect_line 'rank 1: MPI_Init has taken more than 1 s (--join-timeout): a rank is stopped'
    our_lines
    CP_ATTN=$CP_ATTN_FAULTS
    for fault in stopped-last stopped-in-mpi; do
        line='rank 0: rank 1 has not been heard of for 2.'
        [ $fault = stopped-last ] || line='rank 0: MPI_Finalize has taken more than 1 s (--rank-timeout): a rank is'
        CPATTN_FAULT=$fault run 2 --model model.yaml --requests 1 --input-len 16 --output-len 2 --skip-self-test \
            --rank-timeout 1 --result-json $fault.json
        expect_code 3 "$fault"
        expect_line "$line"
        grep -q '^requests *1 of 1 completed' out || fail "no report of a run whose end hung"
        expect_value completed 1 $fault.json
        our_lines
    done
}

# Over TCP nobody but the ranks themselves knows that one has died.
dead_rank_of_store() {
    small_model
    start_store 3 "${long_run[@]}"
    for ((i = 0; i < 300; i++)); do
        grep -q '^run ' out.0 && break
        sleep 0.1
    done
    kill -9 "$(pgrep -P "${pids[1]}")"
    for rank in 0 2; do
        wait "${pids[$rank]}"
        code=$?
        cp err.$rank err
        expect_code 3 "rank 1 died, seen by rank $rank"
        expect_line 'rank 1'
        our_lines
    done
    mv out.0 out
    expect_broken_off 'rank 1'
}
