# Cases of program_test.sh. Where something is missing, breaks off, or computes wrongly.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# Without a device that CUDA sees.
no_device() {
    export CUDA_VISIBLE_DEVICES=""
    expect_bad '--device: found 0 CUDA devices for 1 ranks on a host: no GPU, no driver' --device cuda
    ranks=2 expect_bad 'use --device host' --device cuda
    unset CPATTN_DEVICE
    run 1 --requests 1 --input-len 20 --output-len 2
    expect_code 0 "--device auto without a device"
    grep -q '^device *1 rank: host' out || fail "$(grep ^device out)"
}

# More ranks than devices, and more blocks than the memory of the device.
too_little() {
    local most=$most_ranks
    most_ranks=2
    CUDA_VISIBLE_DEVICES=0 ranks=2 expect_bad '--device: found 1 CUDA devices for 2 ranks on a host, expected one a'
    most_ranks=$most
    expect_bad '--num-blocks: found 2000000000, expected at most' --num-blocks 2000000000
    # A cache that fits, but leaves no room for the rows of such large steps.
    local fits
    fits=$(our_lines | sed 's/.*expected at most \([0-9]*\) .*/\1/')
    run 1 --num-blocks $((fits / 10 * 9)) --max-num-batched-tokens 16777216 --result-json result.json
    expect_code 3 "no memory beside the cache"
    expect_line 'lower --num-blocks ('
    said 'no memory for [0-9]* bytes; [0-9]* of [0-9]* are free' || fail "no numbers: $(our_lines)"
    [ ! -e result.json ] || fail "a result file of a run that did not begin"
    our_lines
}

# Without NCCL peer memory serves the ranks of one host, and the log says which library was looked for; a run that is to
# use NCCL ends with that.
no_nccl() {
    small_model
    mixed_trace >trace.jsonl
    mkdir broken
    : >broken/libnccl.so.2 # the loader finds it first, and that it is none
    LD_LIBRARY_PATH=$PWD/broken:${LD_LIBRARY_PATH:-} run 2 --model model.yaml --trace trace.jsonl --verify 0.2 \
        --log-level info --result-json r.json
    expect_code 0 "a run without NCCL"
    expect_value violations 0 r.json
    said 'NCCL is not used: .*cannot load NCCL (.*libnccl.so.2.*LD_LIBRARY_PATH' ||
        { fail "the log does not say why NCCL is not used"; cat err; }
    our_lines | grep NCCL
    LD_LIBRARY_PATH=$PWD/broken:${LD_LIBRARY_PATH:-} run 2 --model model.yaml --trace trace.jsonl --transport nccl
    expect_code 3 "a run over NCCL without NCCL"
    expect_line 'cannot load NCCL ('
}

# What an earlier run has left is not taken for the results of one that fails; standard output that cannot be written
# is a failure.
outputs() {
    small_model
    local options=(--model model.yaml --requests 1 --input-len 20 --output-len 2) arguments
    run 1 "${options[@]}" --result-json r.json --timeline t.json
    expect_code 0 "a run"
    CPATTN_FAULT=failed-rank CP_ATTN=$CP_ATTN_FAULTS run 1 "${options[@]}" --result-json r.json --timeline t.json
    expect_code 3 "a run that fails"
    [ ! -e t.json ] || fail "an old file looks new"
    expect_value completed 0 r.json
    grep -q '^  "error": ".*a step fails on this rank alone' r.json || fail "no error in the results"
    expect_value completed 1 r.json.old
    expect_value error null r.json.old
    [ -s t.json.old ] || fail "the timeline of the run before is lost"
    run 1 "${options[@]}" --result-json r.json --dtype int4
    [ -e r.json.old ] || fail "a run that is refused touches files"
    for arguments in --help --print-config --version "${options[*]}" "--dry-run ${options[*]}"; do
        # shellcheck disable=SC2086
        "$CP_ATTN" $arguments >/dev/full 2>err
        code=$?
        expect_code 3 "$arguments with standard output full"
        expect_line 'standard output could not be written (No space left on device)'
    done
    "$CP_ATTN" --help >&- 2>err
    code=$?
    expect_code 3 "--help with standard output closed"
    expect_line 'standard output could not be written'
}

# Keys of NaN are counted and named, and the check agrees: they make the same rows NaN in its reference. A quantised cache
# holds no NaN; the keys count all the same. --fail-on-nonfinite ends the run with one line.
nonfinite() {
    small_model
    local n options=(--model model.yaml --requests 3 --input-len 40 --output-len 4 --verify 1)
    export CPATTN_FAULT=nan-key CP_ATTN=$CP_ATTN_FAULTS
    for n in 1 2 3; do
        run "$n" "${options[@]}" --result-json "$n.json"
        expect_code 1 "keys of NaN on $n ranks"
        expect_line 'failed: not finite: token 7, layer 0'
        expect_value violations 0 "$n.json"
        expect_value failed_alone 3 "$n.json"
        grep -q ' 3 failed, 0 cancelled, 0 expired' out || fail "no word of what has failed"
        # Of each request its token 7, the row that yields a token, and the one that was on its way by then.
        grep -q '^not finite  *9 rows; first request [0-2], token 7, layer 0$' out || fail "$(grep '^not' out)"
        expect_value token 7 "$n.json"
        expect_value layer 0 "$n.json"
    done
    run 2 "${options[@]}" --kv-cache-dtype int8
    expect_code 1 "keys of NaN in a quantised cache"
    grep -q '^not finite  *3 rows; first request [0-2], token 7, layer 0$' out || fail "$(grep '^not' out)"
    for n in 1 2; do
        run "$n" "${options[@]}" --fail-on-nonfinite
        expect_code 1 "--fail-on-nonfinite on $n ranks"
        expect_line 'token 7, layer 0: its key, value or result has a NaN or an infinity'
    done
}

# begin RANKS ARGUMENT...: starts a run in the background, $job, which writes the processes of its ranks to ./pid.RANK, and
# waits until the requests are on their way.
begin() {
    local start="" ranks=$1
    [ "$ranks" = 1 ] || start="$MPIRUN -np $ranks"
    shift
    export CP_ATTN
    rm -f pid.* out err
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" $start bash -c 'echo $$ >"pid.${OMPI_COMM_WORLD_RANK:-0}"; exec "$CP_ATTN" "$@"' cp_attn "$@" \
        >out 2>err &
    job=$!
    for ((i = 0; i < 300; i++)); do
        grep -q '^run ' out 2>/dev/null && break
        sleep 0.1
    done
    grep -q '^run ' out || fail "the run did not begin"
    sleep 0.5
}

# stopped CODE SIGNAL: the job ends with that code, by that signal, and leaves report and results. They are there within
# 0.8 s; a busy machine is given more, a step that would take far longer is none.
stopped() {
    for ((i = 0; i < 2000; i++)); do
        [ ! -e r.json ] || break
        sleep 0.01
    done
    [ -e r.json ] || fail "no results within 20 seconds of $2"
    wait $job
    code=$?
    expect_code "$1" "a run that was stopped by $2"
    expect_line "stopped by signal $(kill -l "${2#SIG}"): 2 of 2 requests were not finished"
    grep -q '^requests *0 of 2 completed' out || fail "no report of a run that was stopped"
    expect_value failed 2 r.json
    expect_value stopped_by "$2" r.json
    grep -q '^cpattn_iteration_tokens_total_count' <<<"$(tail -n 1 m.prom)" || fail "no whole file of metrics"
    rm -f r.json
}

# SIGTERM and SIGINT, to any rank and to mpirun, in runs and in steps that would take far longer.
signal() {
    small_model
    local n endless=(--model model.yaml --requests 2 --input-len 16 --output-len 1000000 --skip-self-test --verify 0
        --num-blocks 70000 --result-json r.json --metrics-file m.prom)
    local long_step=(--model model.yaml --requests 2 --input-len 200000 --output-len 4 --skip-self-test --verify 0
        --max-num-batched-tokens 400000 --result-json r.json --metrics-file m.prom)
    begin 1 "${endless[@]}"
    kill -TERM "$(cat pid.0)"
    stopped 143 SIGTERM
    grep -q '^cpattn_generation_tokens_total{.*} [1-9]' m.prom || fail "the metrics are not those of the end"
    n=$(few 3)
    [ "$n" -gt 1 ] || return
    begin "$n" "${endless[@]}"
    kill -INT "$(cat pid.1)"
    stopped 130 SIGINT
    begin "$n" "${endless[@]}"
    pkill -TERM -P $job # what mpirun makes of it is its exit code
    stopped 1 SIGTERM
    [ "$device" = host ] || return
    begin "$n" "${long_step[@]}"
    kill -TERM "$(cat pid.$((n - 1)))"
    stopped 143 SIGTERM
    grep -q '^stopped *in the middle of a step' out || fail "the step was not given up"
    begin 1 "${long_step[@]}"
    kill -STOP "$(cat pid.0)" && kill -INT "$(cat pid.0)" && kill -CONT "$(cat pid.0)"
    stopped 130 SIGINT
}

# With --shutdown-timeout requests that have arrived may finish after a signal to any rank, for as long as that; those that
# have not arrived are cancelled. A second signal ends it.
shutdown() {
    small_model
    local n run=(--model model.yaml --requests 3 --skip-self-test --verify 0 --num-blocks 200000 --result-json r.json)
    local endless=(--input-len 16 --output-len 1000000 --shutdown-timeout)
    n=$(few 2)
    printf '{"timestamp": %d, "input_length": 16, "output_length": 1500, "hash_ids": [%d]}\n' 0 1 1 2 1800000 3 >t.jsonl
    rm -f r.json
    begin "$n" "${run[@]}" --trace t.jsonl --time-scale 1 --shutdown-timeout 60
    kill -TERM "$(cat "pid.$((n - 1))")"
    wait $job
    code=$?
    expect_code 143 "a run that was drained"
    grep -q '^requests *2 of 3 completed' out || fail "requests did not finish: $(grep ^requests out)"
    grep -q ' 0 failed, 1 cancelled, 0 expired' out || fail "no word of what was cancelled"
    expect_value cancelled 1 r.json
    expect_value stopped_by SIGTERM r.json
    rm -f r.json
    begin "$n" "${run[@]}" "${endless[@]}" 60
    kill -INT "$(cat pid.0)"
    sleep 0.7
    [ ! -e r.json ] || fail "the time for the shutdown was not given"
    kill -INT "$(cat "pid.$((n - 1))")"
    expect_end 130 SIGINT
    begin "$n" "${run[@]}" "${endless[@]}" 0.6
    kill -TERM "$(cat pid.0)"
    expect_end 143 SIGTERM
    [ "$n" -gt 1 ] || return
    MPIRUN="$MPIRUN --mca odls_base_sigkill_timeout 3" begin "$n" "${run[@]}" "${endless[@]}" 60
    pkill -TERM -P $job # of six seconds three are half, and one of these is for the end
    sleep 1
    [ ! -e r.json ] || fail "mpirun's time for the shutdown was not given"
    for ((i = 0; i < 2000; i++)); do
        [ ! -e r.json ] || break
        sleep 0.01
    done
    expect_end 1 SIGTERM
}

# expect_end CODE SIGNAL: the job ends long before the time for its shutdown is up, and leaves results.
expect_end() {
    local began=$SECONDS
    wait $job
    code=$?
    [ $((SECONDS - began)) -le 30 ] || fail "it took $((SECONDS - began)) s to end"
    expect_code "$1" "a run that was shut down by $2"
    grep -q '^requests *0 of 3 completed' out || fail "no report of a run that was shut down"
    expect_value stopped_by "$2" r.json
    rm -f r.json
}

# expect_broken_off ERROR: report and results tell how far a run came, and that it ended for want of a rank.
expect_broken_off() {
    grep -q "^error  .*$1" out || { fail "no '$1' in the report"; cat out; }
    grep -q '^requests *0 of 2 completed' out || fail "no report of a run that broke off"
    [ -e r.json ] || { fail "no results of a run that broke off"; return; }
    grep -q "^  \"error\": \".*$1" r.json || fail "no '$1' in the results: $(grep error r.json)"
    expect_value failed 2 r.json
    expect_value stopped_by null r.json
}

# A rank that dies in the middle of a run ends the job, soon, and is named.
dead_rank() {
    small_model
    begin "$(few 3)" --model model.yaml --requests 2 --input-len 16 --output-len 1000000 --skip-self-test --verify 0 \
        --num-blocks 70000 --result-json r.json
    kill -9 "$(cat pid.1)"
    local started=$SECONDS
    wait $job
    code=$?
    [ $code != 0 ] && [ $code != 124 ] || fail "exit code $code after a rank died"
    [ $((SECONDS - started)) -lt 30 ] || fail "the others went on for $((SECONDS - started)) s"
    grep -qE 'rank 1 .*(signal 9|Killed)' err || { fail "the rank that died is not named"; cat err; }
    expect_broken_off 'rank 1 '
    grep -E 'rank 1 .*(signal 9|Killed)' err
}

# fault NAME: an armed fault is found by the sampled check, and before the run by the self-test.
fault() {
    local cause
    case $1 in
        dropped-shard) cause='missing from it' ;;
        stale-block) cause='a stale block' ;;
        off-by-one-mask) cause='the causal mask is off by one' ;;
        base2-lse) cause='in base 2' ;;
        swapped-kv-head) cause='it reads KV head' ;;
        wrong-scale) cause='float64 reference' ;;
        swapped-halves) cause='the halves of the rotated elements of its keys are swapped' ;;
        wrong-tile) cause='tile 1 of the latents has the scale of tile 0' ;;
        late-values) cause='its values begin in the wrong column of the latents' ;;
    esac
    [ "$1" != wrong-scale ] || export CPATTN_KV_CACHE_DTYPE=int8
    [ "$1" != wrong-tile ] || export CPATTN_KV_CACHE_DTYPE=fp8_t128
    mixed_trace >trace.jsonl
    local n args=(--model model.yaml --trace trace.jsonl)
    case $1 in
        swapped-halves | wrong-tile | late-values)
            latent_model
            args=(--model model.yaml --requests 4 --input-len 90 --output-len 6)
            ;;
        *) small_model ;;
    esac
    CP_ATTN=$CP_ATTN_FAULTS
    for n in $(printf '%s\n' "$(few 2)" "$(few 3)" | uniq); do
        CPATTN_FAULT=$1 run $n "${args[@]}" --verify 0.05 --result-json r.json
        expect_code 1 "$1 on $n ranks"
        expect_line 'token'
        said 'layer' || fail "the message names no layer: $(our_lines)"
        said -F "$cause" || fail "the message does not say '$cause': $(our_lines)"
        [ "$(value violations r.json)" -gt 0 ] || fail "no violation in the result file"
        [ "$(value failed r.json)" -gt 0 ] || fail "no failed request in the result file"
        our_lines
    done
    CPATTN_FAULT=$1@start run 2 "${args[@]}"
    expect_code 1 "$1 from the start"
    expect_line 'self-test'
    our_lines
    run 2 "${args[@]}" --verify 0.05
    expect_code 0 "the twin without a fault"
}

# Of an indexer's choice and of attention by it the check says which is wrong, with the keys; and the row is kept.
wrong_choice() {
    local n args=(--model-dir "$MODELS/tiny-deepseek-v32" --requests 4 --input-len 90 --output-len 6 --verify 0.05)
    CP_ATTN=$CP_ATTN_FAULTS
    for n in $(printf '%s\n' 1 "$(few 2)" "$(few 3)" | uniq); do
        rm -rf rows && mkdir rows
        CPATTN_FAULT=wrong-choice run "$n" "${args[@]}" --violation-dump rows --result-json r.json
        expect_code 1 "another choice on $n ranks"
        expect_line 'another choice: key '
        said 'token .* layer .* is on the list, with the index score .*, but not key .* with .*(allowed ' ||
            fail "no keys and scores: $(our_lines)"
        [ "$(value violations r.json)" -gt 0 ] || fail "no violation in the result file"
        run 1 check rows/row-*
        expect_code 1 "a row with another choice"
        grep -q '^another choice: key .* was chosen, with the index score' out || fail "no choice: $(cat out)"
        grep -q 'result of the run .*: right' out || fail "the result by the list is wrong: $(cat out)"
    done
    # Rows that are absorbed have results of another width than their O, by a matrix of their head.
    rm -rf rows && mkdir rows
    CPATTN_FAULT=wrong-choice run "$(few 2)" "${args[@]}" --short-prompts absorb --violation-dump rows
    expect_code 1 "another choice of an absorbed row"
    run 1 check rows/row-*
    expect_code 1 "an absorbed row with another choice"
    grep -q 'results of 16 by a matrix' out || fail "no matrix: $(cat out)"
    grep -q 'result of the run .*: right' out || fail "the absorbed result is wrong: $(cat out)"
    grep -Eq '^host, portable +[0-9.e-]+ ' out || fail "the host did not attend it: $(cat out)"
    [ "$(few 2)" = 1 ] || {
        CPATTN_FAULT=dropped-shard run 2 "${args[@]}"
        expect_code 1 "a right choice, and a shard that is not attended"
        expect_line 'another result: |result - float64 reference| = '
        said 'of rank . is missing from it' || fail "no shard is missing: $(our_lines)"
    }
    run "$(few 2)" "${args[@]}"
    expect_code 0 "the twin without a fault"
}

# What a wrong row had is kept, and computed again alone: the host says what is right, and the keys what is missing.
violation_dump() {
    small_model
    mkdir rows
    ranks=2
    expect_bad "--violation-dump: found 'none', expected a folder" --violation-dump none
    CP_ATTN=$CP_ATTN_FAULTS
    export CPATTN_FAULT=dropped-shard
    local options=(--model model.yaml --requests 2 --input-len 300 --output-len 3 --verify 0.05) file
    run 2 "${options[@]}"
    expect_code 1 "a fault"
    said 'with violation_dump what the row had would be kept' || fail "no word of it: $(our_lines)"
    CPATTN_FAULT=lost-rules run 2 "${options[@]}" --skip-self-test --alibi --sink-logits
    said 'the score rules of the layer are missing from it' || fail "no word of rules: $(our_lines)"
    run 2 "${options[@]}" --skip-self-test --alibi --sink-logits
    said 'of rank . is missing from it' || fail "no shard is missing under rules: $(our_lines)"
    run 2 "${options[@]}" --violation-dump rows --dtype bf16
    expect_code 1 "a fault"
    file=$(ls rows/row-*)
    said -F "to compute it again: cp_attn check $file" || fail "no command: $(our_lines)"
    unset CPATTN_FAULT
    run 1 check "$file"
    expect_code 1 "a row that is wrong"
    grep -q 'result of the run .*: wrong' out || fail "the row is not wrong: $(cat out)"
    grep -q 'of rank .* the result is that without these keys' out || fail "no shard is missing: $(cat out)"
    local off allowed
    allowed=$(sed -n 's/^as the run had it .*allowed //p' out)
    while read -r off; do
        awk -v off="$off" -v allowed="$allowed" 'BEGIN { exit !(off <= allowed) }' || fail "the host is off by $off"
    done < <(sed -n 's/^host, [^ ]*  *\([^ ]*\) .*/\1/p' out)
    [ "$(grep -c '^host, ' out)" -ge 1 ] || fail "no path of the host: $(cat out)"
    run 1 check model.yaml
    expect_code 2 "a file that is no row"
    grep -q 'model.yaml:1: found .*, expected a row' err || fail "no reason: $(cat err)"
    run 1 check
    expect_code 2 "no file"
    ln -sf /dev/full "$file"
    CPATTN_FAULT=dropped-shard run 2 "${options[@]}" --violation-dump rows --dtype bf16
    expect_code 1 "a full disk"
    said 'cannot be written: No space left on device' || fail "no reason: $(our_lines)"
}

# A rank that fails alone, in the self-test or in the run, ends the job with a line of its own: the others say nothing,
# however long mpirun takes to end them.
failed_rank() {
    small_model
    CP_ATTN=$CP_ATTN_FAULTS
    local when
    for when in failed-rank@start failed-rank; do
        local begin=$SECONDS
        CPATTN_FAULT=$when run 3 --model model.yaml --requests 2 --input-len 40 --output-len 4 --result-json r.json
        expect_code 3 "$when"
        expect_line "rank $(($(few 3) - 1)): "
        said 'a step fails on this rank alone' || fail "no reason: $(our_lines)"
        [ $((SECONDS - begin)) -lt 60 ] || fail "it took $((SECONDS - begin)) s"
        our_lines
        [ $when != failed-rank@start ] || [ ! -e r.json ] || fail "results of a run that did not begin"
    done
    expect_broken_off "rank $(($(few 3) - 1))"
}
