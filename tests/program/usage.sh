# Cases of program_test.sh. What the program answers and refuses, and what its settings mean.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

bad_input() {
    trace_line 0 -5 1 >bad.jsonl
    expect_bad 'bad.jsonl:1: found "input_length": -5, expected' --trace bad.jsonl
    { trace_line 0 5 1 7 && echo '{"timestamp": 1,'; } >bad.jsonl
    expect_bad 'bad.jsonl:2: found malformed JSON' --trace bad.jsonl
    : >bad.jsonl
    expect_bad 'bad.jsonl:1: found no request' --trace bad.jsonl
    expect_bad 'none.jsonl: found no readable file (No such file' --trace none.jsonl
    expect_bad "found unknown option '--blok-size', expected '--block-size'" --blok-size 16
    expect_bad "found 'sirve', expected an option (--help lists them), 'serve', 'generate', 'bench', 'plot' or 'check'" sirve
    expect_bad "--block-size: found '24', expected a power of two between 1 and 512" --block-size 24
    expect_bad '--cp-kv-cache-interleave-size: found 24' --cp-kv-cache-interleave-size 24
    expect_bad '--staging-bytes: ' --staging-bytes 10
    said 'staging_bytes: found 10, expected at least' || fail "no reason: $(our_lines)"
    expect_bad '--preemption-mode: found swap without --swap-space' --preemption-mode swap
    expect_bad '--keep-evicted: found without --swap-space, expected host memory for blocks' --keep-evicted
    expect_bad '--swap-folder: found without --swap-space, expected host memory for blocks' --swap-folder .
    expect_bad '--keep-evicted: found with --no-enable-prefix-caching, expected blocks to be found' --keep-evicted \
        --swap-space 1 --no-enable-prefix-caching
    expect_bad '--swap-folder: found '"'nowhere'"', expected a folder' --swap-space 1 --swap-folder nowhere
    CPATTN_BLOK_SIZE=16 expect_bad 'CPATTN_BLOK_SIZE: found an unknown variable, expected CPATTN_BLOCK_SIZE?'
    CPATTN_HELP=1 expect_bad 'CPATTN_HELP: found an unknown variable'
    expect_bad "--k-scale: found '1e-50', expected a number from" --k-scale 1e-50 --v-scale 1
    trace_line 0 1099511627776 1 >bad.jsonl
    expect_bad 'request 1: found 1099511627776 tokens, which need' --trace bad.jsonl
    expect_bad '--num-blocks: request 1: 100 prompt + 8 output tokens need 7 blocks' --input-len 100 --output-len 8 --num-blocks 3
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
    run 1 --metrics-file none/m.prom
    expect_code 2 "metrics in no folder"
    expect_line "--metrics-file: found 'none/m.prom'"
}

bad_input_on_many_ranks() {
    ranks=3
    trace_line 0 -5 1 >bad.jsonl
    expect_bad 'bad.jsonl:1: found "input_length": -5, expected' --trace bad.jsonl
    expect_bad "found unknown option '--blok-size'" --blok-size 16
    expect_bad 'request 1: 1000 prompt + 8 output tokens need' --input-len 1000 --output-len 8 --num-blocks 3
    expect_bad 'staging_bytes: found 10, expected at least' --staging-bytes 10
    expect_bad '--num-blocks: found 2147483647, expected at most' --num-blocks 2147483647
}

answers() {
    run 2 --help
    expect_code 0 --help
    [ "$(grep -c '^  --' out)" -ge 30 ] || fail "--help lists too little"
    [ "$(grep -c '^  --block-size' out)" = 1 ] || fail "--help is printed more than once"
    [ -z "$(awk 'length > 100' out)" ] || fail "--help is wider than 100 columns"
    run 1 bench --help
    [ -z "$(awk 'length > 100' out)" ] || fail "bench --help is wider than 100 columns"
    run 1 plot --help
    [ -z "$(awk 'length > 100' out)" ] || fail "plot --help is wider than 100 columns"
    run 2 --version
    expect_code 0 --version
    grep -qE '^cp_attn [0-9]+\.[0-9]+\.[0-9]+$' out || fail "--version prints '$(cat out)'"
    [ "$(wc -l <out)" = 1 ] || fail "--version is printed more than once"
}

# The commands of README, under Use, as they stand there.
readme() {
    local commands
    commands=$(awk '/^## Use/ { use = 1 } use && /^```/ { if (block++) exit; next } block' "$CONFIGS/../README.md" |
        sed "s/^mpirun --oversubscribe/\$MPIRUN/")
    [ "$(grep -c cp_attn <<<"$commands")" = 3 ] || fail "no commands: $commands"
    ln -s "$CP_ATTN" cp_attn
    ln -s "$CONFIGS" configs
    (set -e && eval "$commands") >out 2>err
    code=$?
    expect_code 0 "the commands of README"
    expect_value completed 2 result.json
    [ "$(value prefix_hits result.json)" -ge 40 ] || fail "only $(value prefix_hits result.json) blocks are found"
    [ "$(grep -c '^requests .* completed' out)" = 2 ] || fail "not two runs"
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
    grep -q '^# cache-salt: "(not shown)" ' out || fail "--print-config: $(grep cache-salt out)"
    grep -q "^trace: \"$PWD/folder/requests.jsonl\" " out || fail "--print-config: $(grep trace out)"
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
    grep -qE '^algorithm +none [0-9]+ \(one rank\)$' out || fail "one rank exchanges: $(grep ^algorithm out)"
    rm r.json
    run 1 --requests 2 --input-len 20 --output-len 2 --model model.yaml --result-json r.json
    grep -q "KV heads of 16, fp32," out || fail "$(grep ^model out)"
}

# A program that was started on one CPU stays there, bound or not.
affinity() {
    local cpus last pid options
    command -v taskset >/dev/null || { echo "skipped: no taskset"; exit $skipped; }
    cpus=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)
    last=${cpus##*[,-]}
    for options in "" "--threads 1" "--no-bind"; do
        : >out # which the run before has filled
        # shellcheck disable=SC2086
        taskset -c "$last" "$CP_ATTN" --requests 8 --input-len 4000 $options >out 2>err &
        pid=$!
        for ((i = 0; i < 200; i++)); do ! grep -q '^run' out || break; sleep 0.1; done
        [ "$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$pid/status")" = "$last" ] ||
            fail "started on CPU $last of $cpus, it runs elsewhere $options"
        kill -KILL "$pid"
        wait "$pid" 2>/dev/null
    done
}

# Each rank has cores of its own, near its device, unless --no-bind.
binding() {
    local report='cuda 0 at [0-9a-f:.]*: CPUs [0-9]'
    run "$most_ranks" --requests 2 --input-len 20 --output-len 2 --log-level info
    expect_code 0 "a run that binds"
    our_lines | grep 'cuda [0-9]* at' || fail "no line about the binding"
    # With a CPU quota there is nothing to bind to.
    said -E "$report|not bound" || fail "the line names no CPUs: $(our_lines)"
    run "$most_ranks" --requests 2 --input-len 20 --output-len 2 --log-level info --no-bind
    said 'cuda 0 at [0-9a-f:.]*: not bound to cores' || fail "--no-bind binds: $(our_lines)"
}
