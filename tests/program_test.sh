#!/usr/bin/env bash
# One case of the program, end to end: program_test.sh CASE [ARGUMENT...].
# CP_ATTN and CP_ATTN_FAULTS name the programs, MPIRUN starts ranks, CONFIGS is the folder of examples. Runs are on the
# back end CPATTN_TEST_DEVICE, host or cuda, on at most RANKS ranks. Exits 77, with a line, where there are fewer devices.
set -uo pipefail

device=${CPATTN_TEST_DEVICE:-host}
most_ranks=${RANKS:-8}
skipped=77

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
unset "${!CPATTN_@}"
export CPATTN_DEVICE=$device
failed=0
limit=60 # seconds for one run; a hanging rank ends in exit code 124

fail() {
    echo "FAILED: $*"
    failed=1
}

# few RANKS: as many, or the most that this test may have.
few() { echo $(($1 < most_ranks ? $1 : most_ranks)); }

# run RANKS ARGUMENT...: leaves its exit code in $code and what it prints in ./out and ./err. One rank runs without
# mpirun, which takes seconds to end a job that fails.
run() {
    local start=""
    [ "$(few "$1")" = 1 ] || start="$MPIRUN -np $(few "$1")"
    shift
    # shellcheck disable=SC2086
    timeout "$limit" $start "$CP_ATTN" "$@" >out 2>err
    code=$?
}

expect_code() {
    [ "$code" = "$1" ] || { fail "exit code $code, expected $1: $2"; cat out err; }
}

# What the program itself says on stderr, without mpirun's words.
our_lines() { grep '^cp_attn: ' err; }

# expect_line TEXT: the program has said one line, with this text in it.
expect_line() {
    [ "$(our_lines | wc -l)" = 1 ] || { fail "expected one line"; cat err; }
    our_lines | grep -qF -- "$1" || fail "expected '$1' in: $(our_lines)"
}

# expect_bad TEXT ARGUMENT...: exit code 2 on $ranks ranks, one line with the text, nothing on stdout, no result file.
ranks=1
expect_bad() {
    local text=$1
    shift
    run "$ranks" "$@" --result-json result.json
    expect_code 2 "$*"
    expect_line "$text"
    [ ! -s out ] || fail "output of a run that was refused: $*"
    [ -z "$(ls result.json* 2>/dev/null)" ] || fail "a result file of a run that was refused: $*"
}

# A run that is refused for want of memory, or of devices, whichever comes first: ends the test in the second case.
need_devices() {
    [ "$device" = cuda ] || return 0
    run "$most_ranks" --num-blocks 2147483647
    grep -q 'found [0-9]* CUDA devices for' err || return 0
    echo "skipped: $(our_lines)"
    exit $skipped
}

# value KEY FILE: a number or string of a result file (its keys are unique).
value() { sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}$/\1/p" "$2"; }

expect_value() {
    [ "$(value "$1" "$3")" = "$2" ] || fail "$1 is '$(value "$1" "$3")' in $3, expected $2"
}

small_model() {
    printf '%s\n' "layers: 2" "q_heads: 4" "kv_heads: 2" "head_dim: 16" "dtype: fp32" >model.yaml
}

# trace_line TIMESTAMP INPUT OUTPUT HASH...
trace_line() {
    local hashes
    hashes=$(IFS=, && echo "${*:4}")
    echo "{\"timestamp\": $1, \"input_length\": $2, \"output_length\": $3, \"hash_ids\": [$hashes]}"
}

mixed_trace() {
    trace_line 0 700 6 1 2
    trace_line 10 513 1 1 3
    trace_line 20 5 9 4
    trace_line 30 1 2 5
    trace_line 40 90 4 6
    trace_line 50 600 3 1 2
}

bad_input() {
    trace_line 0 -5 1 >bad.jsonl
    expect_bad 'bad.jsonl:1: found "input_length": -5, expected' --trace bad.jsonl
    { trace_line 0 5 1 7 && echo '{"timestamp": 1,'; } >bad.jsonl
    expect_bad 'bad.jsonl:2: found malformed JSON' --trace bad.jsonl
    : >bad.jsonl
    expect_bad 'bad.jsonl:1: found no request' --trace bad.jsonl
    expect_bad 'none.jsonl: found no readable file (No such file' --trace none.jsonl
    expect_bad "found unknown option '--blok-size', expected '--block-size'" --blok-size 16
    expect_bad "--block-size: found '24', expected a power of two between 16 and 512" --block-size 24
    expect_bad '--cp-kv-cache-interleave-size: found 24' --cp-kv-cache-interleave-size 24
    expect_bad 'staging of 10 bytes, expected at least' --staging-bytes 10
    expect_bad 'request 1: 100 prompt + 8 output tokens need 7 blocks' --input-len 100 --output-len 8 --num-blocks 3
    expect_bad 'request 1: found 1099511627903 tokens, which need' --input-len 1099511627776
    expect_bad '--num-blocks: found 2147483647, expected at most' --num-blocks 2147483647
    printf 'seed: 1\nblok-size: 16\n' >bad.yaml
    expect_bad "bad.yaml:2: found unknown key 'blok-size', expected 'block-size'" --config bad.yaml
    printf 'layers: 2\nq_heads: 7\nkv_heads: 2\nhead_dim: 64\ndtype: fp32\n' >bad.yaml
    expect_bad 'bad.yaml:2: q_heads: found 7, expected a multiple of kv_heads (2)' --model bad.yaml
    CPATTN_VERIFY=2 expect_bad "CPATTN_VERIFY: found '2', expected a number from 0 to 1"
    mkdir result.json
    run 1 --result-json result.json
    expect_code 2 "a folder as the result file"
    expect_line "--result-json: found 'result.json'"
    run 1 --result-json none/result.json
    expect_code 2 "a result file in no folder"
    expect_line "--result-json: found 'none/result.json'"
}

bad_input_on_many_ranks() {
    ranks=3
    trace_line 0 -5 1 >bad.jsonl
    expect_bad 'bad.jsonl:1: found "input_length": -5, expected' --trace bad.jsonl
    expect_bad "found unknown option '--blok-size'" --blok-size 16
    expect_bad 'request 1: 1000 prompt + 8 output tokens need' --input-len 1000 --output-len 8 --num-blocks 3
    expect_bad 'staging of 10 bytes, expected at least' --staging-bytes 10
    expect_bad '--num-blocks: found 2147483647, expected at most' --num-blocks 2147483647
}

answers() {
    run 2 --help
    expect_code 0 --help
    [ "$(grep -c '^  --' out)" -ge 30 ] || fail "--help lists too little"
    [ "$(grep -c '^  --block-size' out)" = 1 ] || fail "--help is printed more than once"
    run 2 --version
    expect_code 0 --version
    grep -qE '^cp_attn [0-9]+\.[0-9]+\.[0-9]+$' out || fail "--version prints '$(cat out)'"
    [ "$(wc -l <out)" = 1 ] || fail "--version is printed more than once"
}

precedence() {
    printf 'block-size: 32\nmax-num-seqs: 32\nseed: 32\n' >settings.yaml
    CPATTN_MAX_NUM_SEQS=64 CPATTN_SEED=64 run 2 --config settings.yaml --seed 128 --print-config
    expect_code 0 --print-config
    grep -qE '^block-size: 32 +# settings.yaml:1$' out || fail "the file does not go over the default"
    grep -qE '^max-num-seqs: 64 +# environment CPATTN_MAX_NUM_SEQS$' out || fail "the environment, over the file"
    grep -qE '^seed: 128 +# command line$' out || fail "the command line does not go over the environment"
    grep -qE '^# verify: auto +# default$' out || fail "defaults are not shown"
    cp out again.yaml
    run 1 --config again.yaml --print-config
    [ "$(sed 's/ *# [^#]*$//' out)" = "$(sed 's/ *# [^#]*$//' again.yaml)" ] || fail "what was printed reads otherwise"
    # Of the texts in a settings file only paths are relative to it.
    mkdir folder
    printf 'cache-salt: pepper\ntrace: requests.jsonl\n' >folder/settings.yaml
    run 1 --config folder/settings.yaml --print-config
    grep -q '^cache-salt: "pepper" ' out || fail "--print-config: $(grep cache-salt out)"
    grep -q '^trace: "folder/requests.jsonl" ' out || fail "--print-config: $(grep trace out)"
}

# The same trace twice on 2 and once on 3 ranks: all served, checked, and the same digest again on the same ranks.
trace() {
    small_model
    mixed_trace >trace.jsonl
    local n
    for n in $(printf '%s\n' "$(few 2)" "$(few 3)" | uniq); do
        run $n --model model.yaml --trace trace.jsonl --verify 0.2 --result-json "r$n.json"
        expect_code 0 "a trace on $n ranks"
        expect_value completed 6 "r$n.json"
        expect_value failed 0 "r$n.json"
        expect_value total_input_tokens 1909 "r$n.json"
        expect_value total_output_tokens 25 "r$n.json"
        expect_value violations 0 "r$n.json"
        expect_value size $n "r$n.json"
        [ "$(value rows "r$n.json")" -ge 1000 ] || fail "only $(value rows "r$n.json") rows are checked"
        grep -q 'TTFT' out || fail "no report"
        [ -z "$(our_lines)" ] || fail "complaints of a good run: $(our_lines)"
    done
    run "$(few 2)" --model model.yaml --trace trace.jsonl --verify 0.2 --result-json again.json
    expect_value violations 0 again.json
    # The host alone promises bits whatever algorithm the measured rates lead to.
    [ "$device" != host ] || [ "$(value output_digest "r$(few 2).json")" = "$(value output_digest again.json)" ] ||
        fail "the digest is not reproduced"
    run 2 --model model.yaml --trace trace.jsonl --requests 3 --length-scale 0.1 --result-json part.json
    expect_value completed 3 part.json
    expect_value total_input_tokens 122 part.json
    expect_value total_output_tokens 3 part.json
    run 2 --model model.yaml --trace trace.jsonl --time-scale 20 --result-json timed.json
    expect_code 0 "trace times"
    awk -v d="$(value duration timed.json)" 'BEGIN { exit !(d >= 1) }' || fail "arrivals of 1 s take less than that"
}

# Shapes and types that no default has.
shapes() {
    printf '%s\n' "layers: 1" "q_heads: 6" "kv_heads: 2" "head_dim: 72" "v_head_dim: 40" "dtype: fp16" \
        "window: 50" "sinks: 3" >odd.yaml
    run 2 --model odd.yaml --requests 3 --input-len 200 --output-len 4 --verify 1 --result-json r.json
    expect_code 0 "an odd shape"
    expect_value violations 0 r.json
    small_model
    run 3 --model model.yaml --requests 3 --input-len 100 --output-len 4 --verify 1 --dtype bf16 \
        --kv-cache-dtype fp32 --block-size 32 --cp-kv-cache-interleave-size 64 --max-num-batched-tokens 40 \
        --max-num-seqs 2 --algorithm pass-q --seed 5 --no-bind --threads 2 --result-json r.json
    expect_code 0 "every setting at once"
    expect_value violations 0 r.json
    run 2 --config "$CONFIGS/service.yaml" --requests 2 --input-len 64 --output-len 2 --result-json r.json
    expect_code 0 "the example settings file"
    expect_value completed 2 r.json
}

# A quantised cache of every kind, in both layouts, under both algorithms.
quant() {
    small_model
    local cache algorithm
    for cache in fp8_e4m3 "fp8_e4m3 --k-scale 0.03 --v-scale 0.03" "int8 --kv-layout head-major"; do
        for algorithm in pass-kv pass-q; do
            # shellcheck disable=SC2086
            run 2 --model model.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --seed 3 \
                --kv-cache-dtype $cache --algorithm $algorithm --result-json "$algorithm.json"
            expect_code 0 "a cache of $cache, $algorithm"
            expect_value violations 0 "$algorithm.json"
            grep -q "\"dtype\": \"${cache%% *}\"" "$algorithm.json" || fail "the cache is not $cache"
        done
        expect_digest_of pass-kv.json pass-q.json
    done
    expect_bad 'expected both or none' --kv-cache-dtype fp8_e4m3 --k-scale 1
    expect_bad 'expected fp8_e4m3' --kv-cache-dtype int8 --k-scale 1 --v-scale 1
}

# Layers with windows of their own, from the model file; --window goes over them.
window() {
    small_model
    cp model.yaml mixed.yaml
    echo 'sinks: 2
layer_windows: 40 0' >>mixed.yaml
    run 3 --model mixed.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --result-json mixed.json
    expect_code 0 "layers with windows of their own"
    expect_value violations 0 mixed.json
    grep -q 'windows in [0-9]* layers, 2 sinks' out || fail "the report does not tell of the windows"
    run 3 --model mixed.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --window 0 --result-json full.json
    expect_code 0 "a window for all layers"
    run 3 --model model.yaml --requests 3 --input-len 150 --output-len 4 --verify 0.5 --result-json plain.json
    expect_digest_of full.json plain.json
    [ "$(value output_digest mixed.json)" != "$(value output_digest plain.json)" ] || fail "the windows have no effect"
}

# --local-context: what stays on one rank is not sent, and has the digest of a run on one rank.
local_context() {
    small_model
    run 1 --model model.yaml --requests 5 --input-len 90 --output-len 6 --result-json alone.json
    run 3 --model model.yaml --requests 5 --input-len 90 --output-len 6 --verify 0.5 --local-context 95 \
        --result-json whole.json
    expect_code 0 "requests that stay on one rank"
    expect_value violations 0 whole.json
    expect_value bytes_sent 0 whole.json
    expect_value whole 5 whole.json
    expect_digest_of alone.json whole.json
    run 3 --model model.yaml --requests 5 --input-len 90 --output-len 6 --local-context 94 --result-json dealt.json
    expect_value whole 0 dealt.json
    expect_bad 'local-context' --local-context -1
}

# --timeline: a file of valid JSON with spans of every rank that nest in each row, whose attention adds up; no file
# after a run that was refused because of it.
timeline() {
    small_model
    mixed_trace >trace.jsonl
    run 3 --model model.yaml --trace trace.jsonl --verify 0.01 --timeline timeline.json
    expect_code 0 "a run with a timeline"
    [ -z "$(our_lines)" ] || fail "complaints of a good run: $(our_lines)"
    python3 - <<'END' || fail "the timeline is wrong"
import collections, json
events = json.load(open("timeline.json"))
spans = [e for e in events if e["ph"] == "X"]
rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
names = {e["name"] for e in spans}
assert {e["pid"] for e in spans} == {0, 1, 2}
for name in ("fill", "kv_write", "attend own", "attend received", "merge", "pack 1", "exchange 1", "exchange 2", "wait",
             "queries", "states", "check", "plan", "schedule"):
    assert name in names, name
assert {rows[e["pid"], e["tid"]] for e in spans if e["name"] == "fill"} == {"compute"}
assert all("layer" in e["args"] and "step" in e["args"] for e in spans if e["name"] == "merge")
row_spans = collections.defaultdict(list)
for e in spans:
    row_spans[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["name"]))
for row in row_spans.values():
    open_ends = []
    for begin, minus, name in sorted(row):
        while open_ends and open_ends[-1] <= begin + 1e-3:
            open_ends.pop()
        assert not open_ends or begin - minus <= open_ends[-1] + 1e-3, (begin, minus, name)
        open_ends.append(begin - minus)
END
    run 1 --model model.yaml --requests 1 --input-len 8 --output-len 1 --timeline none/timeline.json
    expect_code 2 "a timeline in no folder"
    expect_line "--timeline: found 'none/timeline.json'"
}

preemption() {
    small_model
    for i in 1 2 3 4 5 6 7 8 9 10 11 12; do trace_line 0 $((14 + i)) 120 "$i"; done >decode_heavy.jsonl
    run 4 --model model.yaml --trace decode_heavy.jsonl --block-size 16 --num-blocks 10 --verify 0.05 \
        --result-json r.json
    expect_code 0 "a cache that holds a third of the requests"
    expect_value completed 12 r.json
    expect_value violations 0 r.json
    expect_value blocks 10 r.json
    [ "$(value preemptions r.json)" -gt 0 ] || fail "no preemption"
}

# Requests that begin alike, samples of one prompt, and a tenant of its own.
shared_trace() {
    local i extra
    for i in 0 1 2 3 4 5 6 7 8 9 10 11; do
        extra=""
        [ $((i % 4)) = 0 ] && extra=', "n": 3'
        [ $((i % 5)) = 4 ] && extra="$extra"', "salt": "x"'
        trace_line 0 $((700 + i % 3 * 37)) 40 1 $((2 + i % 2)) | sed "s/}$/$extra}/"
    done
}

# expect_digest_of FILE FILE: both runs gave the same results, bit for bit, as the host alone promises.
expect_digest_of() {
    [ "$device" != host ] || [ "$(value output_digest "$1")" = "$(value output_digest "$2")" ] || fail "$1 and $2 differ in their results"
}

# Results are bit-equal with the cache and without it; with it most of the prompts is found.
prefix() {
    small_model
    shared_trace >trace.jsonl
    run 2 --model model.yaml --trace trace.jsonl --verify 0.02 --no-enable-prefix-caching --result-json off.json
    expect_code 0 "without the prefix cache"
    expect_value completed 18 off.json
    run 2 --model model.yaml --trace trace.jsonl --verify 0.02 --result-json on.json
    expect_code 0 "with the prefix cache"
    expect_value completed 18 on.json
    expect_value violations 0 on.json
    expect_digest_of on.json off.json
    [ "$(value prefix_hits on.json)" -gt 600 ] || fail "only $(value prefix_hits on.json) blocks are found"
    [ "$(value cow_copies on.json)" -gt 0 ] || fail "samples of a prompt copy no block"
    run 2 --model model.yaml --trace trace.jsonl --num-blocks 60 --verify 0.02 --result-json tight.json
    expect_code 0 "a cache that holds a few requests"
    expect_value violations 0 tight.json
    expect_digest_of tight.json off.json
    [ "$(value evictions tight.json)" -gt 0 ] || fail "nothing is evicted"
    [ "$(value preemptions tight.json)" -gt 0 ] || fail "nobody is preempted"
    run 2 --model model.yaml --trace trace.jsonl --window 100 --sinks 4 --verify 0.05 --result-json window.json
    expect_code 0 "a sliding window"
    expect_value violations 0 window.json
    run 2 --model model.yaml --trace trace.jsonl --window 100 --sinks 4 --no-enable-prefix-caching \
        --num-blocks $((60 / $(few 2))) \
        --preemption-mode swap --swap-space 0.1 --verify 0.05 --result-json narrow.json
    expect_code 0 "a sliding window in a small cache"
    expect_value violations 0 narrow.json
    expect_digest_of window.json narrow.json
}

# Results are bit-equal with swapping and without, also where swapped blocks come back damaged.
swap() {
    small_model
    shared_trace >trace.jsonl
    run 2 --model model.yaml --trace trace.jsonl --verify 0.02 --result-json ample.json
    expect_code 0 "an ample cache"
    run 2 --model model.yaml --trace trace.jsonl --num-blocks 60 --preemption-mode swap --swap-space 0.1 --verify 0.02 \
        --result-json swap.json
    expect_code 0 "a cache that swaps"
    expect_value violations 0 swap.json
    expect_value swap_failures 0 swap.json
    expect_digest_of swap.json ample.json
    [ "$(value swapped_in swap.json)" -gt 0 ] || fail "nothing comes back"
    CP_ATTN=$CP_ATTN_FAULTS
    CPATTN_FAULT=damaged-swap run 2 --model model.yaml --trace trace.jsonl --num-blocks 60 --preemption-mode swap \
        --swap-space 0.1 --verify 0.02 --result-json damaged.json
    expect_code 0 "damaged blocks"
    expect_value violations 0 damaged.json
    expect_digest_of damaged.json ample.json
    [ "$(value swap_failures damaged.json)" -gt 0 ] || fail "damage is not noticed"
    # Not through a pipe: it breaks where grep stops reading early.
    grep -q '^cp_attn: .*came back with checksum .* the request is computed again' err || fail "damage is not said"
}

# Plans without a device: what would be found of a trace whose prompts continue each other.
dry_run() {
    trace_line 0 1024 4 1 2 >trace.jsonl
    trace_line 0 1500 4 1 2 3 >>trace.jsonl
    trace_line 0 1024 4 1 2 >>trace.jsonl
    trace_line 0 2048 4 1 2 3 4 >>trace.jsonl
    local n
    for n in 1 2; do
        run $n --dry-run --trace trace.jsonl --block-size 512 --num-blocks 1000000 --result-json r.json
        expect_code 0 "a dry run on $n ranks"
        expect_value completed 4 r.json
        expect_value prefix_queries 10 r.json
        expect_value prefix_hits 6 r.json
    done
    expect_bad "--dry-run: found without requests" --dry-run
}

mixed() {
    small_model
    run 2 --model model.yaml --num-blocks 64 --result-json r.json
    expect_code 0 "the run without requests"
    grep -q 'a mixed run of about ten seconds: one context of [0-9]* tokens' out || fail "it does not say what it does"
    expect_value completed 13 r.json
    expect_value violations 0 r.json
}

# SIGTERM in the middle of a run that would take far longer: it reports what it did, and exits with 1.
signal() {
    small_model
    "$CP_ATTN" --model model.yaml --requests 2 --input-len 16 --output-len 1000000 --skip-self-test --verify 0 \
        --num-blocks 70000 --result-json r.json >out 2>err &
    local process=$!
    for ((i = 0; i < 200; i++)); do
        grep -q '^run ' out && break
        sleep 0.1
    done
    sleep 0.5
    kill -TERM $process
    wait $process
    code=$?
    expect_code 1 "a run that was stopped"
    expect_line 'stopped by signal 15: 2 of 2 requests were not finished'
    grep -q '^requests *0 of 2 completed' out || fail "no report of a run that was stopped"
    expect_value failed 2 r.json
}

# The dtype without a model and without --dtype is bf16 on a CUDA device, and fp32 on the host.
default_dtype() {
    local want="fp32 on the host" short=fp32
    [ "$device" = host ] || want="bf16 on a CUDA device" short=bf16
    run 1 --print-config
    grep -qE "^# dtype: auto +# default; auto: $want\$" out || fail "--print-config: $(grep dtype out)"
    run 1 --print-config --dtype fp16
    grep -qE '^dtype: fp16 +# command line$' out || fail "--print-config: $(grep dtype out)"
    small_model
    run 1 --print-config --model model.yaml
    grep -qE '^# dtype: auto +# default; auto: as the model says$' out || fail "--print-config: $(grep dtype out)"
    run 1 --requests 2 --input-len 20 --output-len 2 --result-json r.json
    expect_code 0 "a run without a model"
    grep -q "KV heads of 64, $short," out || fail "$(grep ^model out)"
    rm r.json
    run 1 --requests 2 --input-len 20 --output-len 2 --model model.yaml --result-json r.json
    grep -q "KV heads of 16, fp32," out || fail "$(grep ^model out)"
}

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
    our_lines | grep -q 'no memory for [0-9]* bytes; [0-9]* of [0-9]* are free' || fail "no numbers: $(our_lines)"
    [ ! -e result.json ] || fail "a result file of a run that did not begin"
    our_lines
}

# A rank that dies in the middle of a run ends the job, soon, and is named.
dead_rank() {
    small_model
    export CP_ATTN
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" $MPIRUN -np "$(few 3)" \
        bash -c 'echo $$ >"pid.$OMPI_COMM_WORLD_RANK"; exec "$CP_ATTN" "$@"' cp_attn --model model.yaml --requests 2 \
        --input-len 16 --output-len 1000000 --skip-self-test --verify 0 --num-blocks 70000 --result-json r.json \
        >out 2>err &
    local job=$!
    for ((i = 0; i < 300; i++)); do
        grep -q '^run ' out && break
        sleep 0.1
    done
    grep -q '^run ' out || fail "the run did not begin"
    sleep 0.5
    kill -9 "$(cat pid.1)"
    local begin=$SECONDS
    wait $job
    code=$?
    [ $code != 0 ] && [ $code != 124 ] || fail "exit code $code after a rank died"
    [ $((SECONDS - begin)) -lt 30 ] || fail "the others went on for $((SECONDS - begin)) s"
    grep -qE 'rank 1 .*(signal 9|Killed)' err || { fail "the rank that died is not named"; cat err; }
    [ ! -e r.json ] || fail "a result file of a run that broke off"
    grep -E 'rank 1 .*(signal 9|Killed)' err
}

# Without NCCL peer memory serves the ranks of one host, and the log says which library was looked for.
no_nccl() {
    small_model
    mixed_trace >trace.jsonl
    mkdir broken
    : >broken/libnccl.so.2 # the loader finds it first, and that it is none
    LD_LIBRARY_PATH=$PWD/broken:${LD_LIBRARY_PATH:-} run 2 --model model.yaml --trace trace.jsonl --verify 0.2 \
        --log-level info --result-json r.json
    expect_code 0 "a run without NCCL"
    expect_value violations 0 r.json
    our_lines | grep -q 'NCCL is not used: .*cannot load NCCL (.*libnccl.so.2.*LD_LIBRARY_PATH' ||
        { fail "the log does not say why NCCL is not used"; cat err; }
    our_lines | grep NCCL
}

# Each rank has cores of its own, near its device, unless --no-bind.
binding() {
    local report='cuda 0 at [0-9a-f:.]*: CPUs [0-9]'
    run "$most_ranks" --requests 2 --input-len 20 --output-len 2 --log-level info
    expect_code 0 "a run that binds"
    our_lines | grep 'cuda [0-9]* at' || fail "no line about the binding"
    # With a CPU quota there is nothing to bind to.
    our_lines | grep -qE "$report|not bound" || fail "the line names no CPUs: $(our_lines)"
    run "$most_ranks" --requests 2 --input-len 20 --output-len 2 --log-level info --no-bind
    our_lines | grep -q 'cuda 0 at [0-9a-f:.]*: not bound to cores' || fail "--no-bind binds: $(our_lines)"
}

# fault NAME: an armed fault point is found by the sampled check, and before the run by the self-test.
fault() {
    local cause
    case $1 in
        dropped-shard) cause='missing from it' ;;
        stale-block) cause='a stale block' ;;
        off-by-one-mask) cause='the causal mask is off by one' ;;
        base2-lse) cause='in base 2' ;;
        swapped-kv-head) cause='it reads KV head' ;;
        wrong-scale) cause='float64 reference' ;;
    esac
    [ "$1" != wrong-scale ] || export CPATTN_KV_CACHE_DTYPE=int8
    small_model
    mixed_trace >trace.jsonl
    local n
    CP_ATTN=$CP_ATTN_FAULTS
    for n in $(printf '%s\n' "$(few 2)" "$(few 3)" | uniq); do
        CPATTN_FAULT=$1 run $n --model model.yaml --trace trace.jsonl --verify 0.05 --result-json r.json
        expect_code 1 "$1 on $n ranks"
        expect_line 'token'
        our_lines | grep -q 'layer' || fail "the message names no layer: $(our_lines)"
        our_lines | grep -qF "$cause" || fail "the message does not say '$cause': $(our_lines)"
        [ "$(value violations r.json)" -gt 0 ] || fail "no violation in the result file"
        [ "$(value failed r.json)" -gt 0 ] || fail "no failed request in the result file"
        our_lines
    done
    CPATTN_FAULT=$1@start run 2 --model model.yaml --trace trace.jsonl
    expect_code 1 "$1 from the start"
    expect_line 'self-test'
    our_lines
    run 2 --model model.yaml --trace trace.jsonl --verify 0.05
    expect_code 0 "the twin without a fault"
}

[ "$1" = no_device ] || need_devices
"$@"
exit $failed
