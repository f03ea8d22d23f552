# Cases of program_test.sh. The server: what it answers, how it ends, and what becomes of answers when a rank is lost.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# start_server RANKS ARGUMENT...: a server at a free port, in the background: job, pid.RANK, out and err, and url. Returns
# when it takes requests.
start_server() {
    local start="" ranks
    ranks=$(few "$1")
    [ "$ranks" = 1 ] || start="$MPIRUN -np $ranks"
    shift
    export CP_ATTN
    rm -f pid.* out err
    # shellcheck disable=SC2086,SC2016
    timeout "$limit" $start bash -c 'echo $$ >"pid.${OMPI_COMM_WORLD_RANK:-0}"; exec "$CP_ATTN" serve "$@"' cp_attn \
        --port 0 "$@" >out 2>err &
    job=$!
    for ((i = 0; i < 600; i++)); do
        url=$(sed -n 's/^serving .* on \(http:.*\)$/\1/p' out 2>/dev/null)
        [ -z "$url" ] || return 0
        kill -0 $job 2>/dev/null || break
        sleep 0.05
    done
    fail "the server did not begin"
    cat out err
    exit 1
}

# end_server CODE SIGNAL: ends it by that signal to its last rank.
end_server() {
    kill "-$2" "$(cat "$(printf '%s\n' pid.* | tail -1)")"
    expect_end_of_server "$1" "$2"
}

expect_end_of_server() {
    wait $job
    code=$?
    expect_code "$1" "a server, after $2"
}

# ask PATH JSON [CURL OPTION...]: the body goes to ./answer, the code to $http.
ask() {
    http=$(curl -s -m "$limit" -o answer -w '%{http_code}' "$url$1" -d "$2" "${@:3}")
}

expect_http() {
    [ "$http" = "$1" ] || fail "HTTP $http, expected $1, from $2: $(cat answer)"
}

# answered_ids FILE: token ids of all choices in it, in order, with spaces between.
answered_ids() {
    grep -o '"token_ids": *\[[0-9, ]*\]' "$1" | sed 's/.*\[\(.*\)\]/\1/' | tr '\n' ' ' | tr -s ', ' ' ' | sed 's/^ //; s/ $//'
}

# begin_answer MAX_TOKENS: a stream of so many, in the background, to ./stream: client. Returns when its first tokens are
# there.
begin_answer() {
    : >stream
    curl -s -N -m "$limit" "$url/v1/completions" -d \
        "{\"prompt\": [7, 8], \"max_tokens\": $1, \"stream\": true, \"return_token_ids\": true, \"ignore_eos\": true}" \
        >stream &
    client=$!
    for ((i = 0; i < 1000; i++)); do
        [ "$(grep -c '^data: ' stream)" -lt 3 ] || return 0
        sleep 0.02
    done
    fail "no tokens: $(cat stream err)"
}

# An agent of 20 turns with tools, each of which must call one: by plain HTTP, and by OpenAI's package where it is installed.
agent_loop() {
    local client
    start_server 1 --model-dir "$MODELS/tiny-llama" --chat-template "$cases/agent.jinja"
    for client in plain openai; do
        "${PYTHON:-python3}" "$cases/agent_loop.py" "$url" $client 20 >loop 2>&1
        code=$?
        cat loop
        [ $code = 0 ] || { [ $client = openai ] && [ $code = $skipped ]; } || fail "the loop by $client"
    done
    [ ! -s err ] || fail "complaints of good requests: $(cat err)"
    end_server 0 TERM
}

bad_serve() {
    local model=(--model-dir "$MODELS/tiny-llama")
    expect_bad 'cannot listen on 192.0.2.1 port 8' serve --host 192.0.2.1 --port 8
    expect_bad '--max-model-len: found 5000, expected at most the 4096 positions of tiny-llama' \
        serve --port 0 "${model[@]}" --max-model-len 5000
    expect_bad '--max-model-len: found 100, expected at most 64: the cache has 4 blocks' \
        serve --port 0 "${model[@]}" --num-blocks 4 --max-model-len 100
    expect_bad '--chat-template: found without a tokenizer' serve --chat-template chatml
    expect_bad "--chat-template: chat template: found 'nope', expected a file or one of" serve "${model[@]}" --chat-template nope
    expect_bad "--length-scale: found with 'serve'" serve --length-scale 2
    expect_bad 'none/config.json: No such file' serve --model-dir none
}

# The answers of a completion, in the input, are {"age": 0 to 150, "name": up to five characters}, whole.
is_person='
import json, sys
choices = json.load(sys.stdin)["choices"]
assert len(choices) == 8
for choice in choices:
    value = json.loads(choice["text"])
    assert choice["finish_reason"] == "stop" and list(value) == ["age", "name"], value
    assert type(value["age"]) is int and 0 <= value["age"] <= 150 and len(value["name"]) <= 5, value
'

# What is said of an answer as it is drawn, in the first file, is said of it as the end of a prompt, in the second.
is_told_alike='
import json, sys
drawn, echoed = (json.load(open(name))["choices"][0] for name in sys.argv[1:])
ids, told = drawn["token_ids"], echoed["logprobs"]
assert len(told["tokens"]) == 3 + len(ids) == len(echoed["prompt_logprobs"]), echoed
assert told["token_logprobs"][0] is None and echoed["finish_reason"] == "length", echoed
assert echoed["text"].endswith(drawn["text"]), (echoed["text"], drawn["text"])
for i, id in enumerate(ids):
    want = drawn["logprobs"]["token_logprobs"][i]
    entry = echoed["prompt_logprobs"][3 + i][str(id)]
    assert entry["rank"] == 1 and abs(entry["logprob"] - want) < 1e-3, (i, entry, want)
    assert abs(told["token_logprobs"][3 + i] - want) < 1e-3, (i, told, want)
    assert abs(max(told["top_logprobs"][3 + i].values()) - want) < 1e-3, (i, told, want)
'

# serve RANKS: answers are those of `generate`, at once and as a stream; what cannot be answered is refused; a drain hands
# over what is under way.
serve() {
    local prompt='"prompt": [1, 5, 9], "temperature": 0, "return_token_ids": true'
    local wanted limit=240 # seconds; on a busy machine 4000 tokens take long
    wanted=$(expected_ids tiny-llama 0)
    start_server "$1" --shutdown-timeout $limit --model-dir "$MODELS/tiny-llama" --dtype fp32 --served-model-name tiny --result-json r.json
    [ "$(curl -s -o /dev/null -w '%{http_code}' "$url/live")" = 200 ] || fail "/live"
    [ "$(curl -s -o /dev/null -w '%{http_code}' "$url/health")" = 200 ] || fail "/health"
    ask /v1/completions "{$prompt, \"max_tokens\": 16}"
    expect_http 200 "a completion"
    [ "$(answered_ids answer)" = "$wanted" ] || fail "other tokens: $(cat answer)"
    ask /v1/completions "{\"model\": \"tiny\", $prompt, \"max_tokens\": 16, \"stream\": true}" -N
    expect_http 200 "a stream"
    [ "$(answered_ids answer)" = "$wanted" ] || fail "other tokens in a stream: $(cat answer)"
    grep -q '^data: \[DONE\]' answer || fail "no end of a stream: $(cat answer)"
    ask /v1/completions "{$prompt, \"max_tokens\": 16, \"logprobs\": 0}"
    mv answer drawn
    ask /v1/completions "{\"prompt\": [1, 5, 9, ${wanted// /, }], \"max_tokens\": 0, \"temperature\": 0, \"echo\": true,
        \"logprobs\": 1, \"prompt_logprobs\": 1}"
    expect_http 200 "a prompt that is told"
    python3 -c "$is_told_alike" drawn answer || fail "told otherwise: $(cat answer)"
    ask /v1/completions "{$prompt, \"max_tokens\": 3, \"logit_bias\": {\"7\": 100}}"
    [ "$(answered_ids answer)" = "7 7 7" ] || fail "other tokens with a bias: $(cat answer)"
    ask /v1/completions '{"prompt": "Hello", "max_tokens": 4}'
    expect_http 200 "a prompt of text"
    ask /v1/chat/completions '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'
    expect_http 200 "a chat"
    grep -q '"content":"' answer || fail "no message: $(cat answer)"
    ask /v1/completions "{$prompt, \"max_tokens\": 5000}"
    expect_http 400 "a request that is too long"
    local schema='{"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150},
        "name": {"type": "string", "maxLength": 5}}, "required": ["age", "name"], "additionalProperties": false}'
    ask /v1/completions "{\"prompt\": \"Hello\", \"n\": 8, \"seed\": 1, \"temperature\": 1.5, \"max_tokens\": 500,
        \"guided_json\": $schema}"
    expect_http 200 "answers that are bound to a schema"
    python3 -c "$is_person" <answer || fail "an answer that is none of its schema: $(cat answer)"
    curl -s "$url/metrics" >metrics
    grep -q '^cpattn_request_success_total{.*finished_reason="length"} 7$' metrics || fail "$(grep success metrics)"
    "$CP_ATTN" serve --port "${url##*:}" 2>err.second
    [ $? = 2 ] && grep -q "^cp_attn: cannot listen on 127.0.0.1 port ${url##*:}: Address already in use" err.second ||
        fail "a port in use: $(cat err.second)"
    grep -q 'requests of up to 4096 tokens; text, token ids, and chat by the template' out || fail "$(cat out)"
    # A drain in the middle of an answer.
    begin_answer 4000
    kill -TERM "$(cat pid.0)"
    for ((i = 0; i < 100; i++)); do
        http=$(curl -s -o /dev/null -w '%{http_code}' "$url/health")
        [ "$http" = 200 ] || break
        sleep 0.01
    done
    expect_http 503 "/health during a drain"
    ask /v1/completions "{$prompt}"
    expect_http 503 "a request during a drain"
    wait $client || fail "the client was cut off"
    grep -q '^data: \[DONE\]' stream && [ "$(answered_ids stream | wc -w)" = 4000 ] ||
        fail "an answer was cut short by a drain: $(answered_ids stream | wc -w) tokens, $(tail -c 300 stream)"
    # A short answer may be there before its connection is awake; this one is not.
    [ "$(grep -c '^data: ' stream)" -gt 2 ] || fail "no stream: $(cat stream)"
    expect_end_of_server 0 SIGTERM
    grep -q '^requests *16 of 16 completed' out || fail "no report: $(cat out)"
    expect_value completed 16 r.json
    [ "$(our_lines | grep -vc 'refused\|40[0-9]\|503')" = 0 ] || fail "lines: $(our_lines)"
}

# The synthetic source, on two ranks; a second signal ends a drain, and answers end with an error.
serve_synthetic() {
    start_server 2 --skip-self-test --verify 0 --num-blocks 9000
    grep -q 'requests of up to 288000 tokens; token ids alone, of the synthetic model' out || fail "$(cat out)"
    curl -s "$url/metrics" >metrics
    /usr/bin/python3 "$cases/../deploy/check_deploy.py" metrics "$cases/../../deploy" metrics || [ $? = 77 ] ||
        fail "rules or the board of deploy/ ask for what is not there"
    ask /v1/completions '{"prompt": [3, 4, 5], "max_tokens": 5, "seed": 7, "return_token_ids": true}'
    expect_http 200 "the synthetic source"
    [ "$(answered_ids answer | wc -w)" = 5 ] || fail "not five tokens: $(cat answer)"
    ask /v1/completions '{"prompt": "Hello"}'
    expect_http 400 "text without a tokenizer"
    begin_answer 200000
    kill -INT "$(cat pid.0)"
    sleep 0.5
    kill -0 $client || fail "no time was given to the answer"
    local began=$SECONDS
    kill -INT "$(cat pid.0)"
    expect_end_of_server 130 "a second SIGINT"
    [ $((SECONDS - began)) -le 20 ] || fail "it took $((SECONDS - began)) s to end"
    wait $client
    grep -q '^data: .*"error"' stream || fail "no error in the answer: $(tail -c 300 stream)"
    said 'stopped by signal 2: 1 answers were not finished or not taken' || fail "$(our_lines)"
}

# A rank that dies, or is stopped: the stream ends with an error that tells it, and soon the server.
serve_lost() {
    start_server 3 --skip-self-test --verify 0 --num-blocks 9000
    begin_answer 200000
    kill -9 "$(cat pid.1)"
    wait $client
    grep -q '^data: .*"error"' stream || fail "no error in the answer: $(tail -c 300 stream)"
    wait $job
    start_server 2 --skip-self-test --verify 0 --num-blocks 9000 --rank-timeout 1 --result-json lost.json
    begin_answer 200000
    kill -STOP "$(cat pid.1)"
    wait $client
    grep -q '^data: .*"error".*rank 1 has not been heard of' stream ||
        fail "no error in the answer: $(tail -c 300 stream)"
    expect_end_of_server 3 "a rank was stopped"
    grep -q '^  "error": ".*rank 1 has not been heard of' lost.json || fail "no error in the results of the server"
}

# A check that fails while answers are under way: they end with what it found, and the server with exit code 1.
serve_wrong() {
    CPATTN_FAULT=off-by-one-mask CP_ATTN=$CP_ATTN_FAULTS start_server 1 --skip-self-test --verify 0.5
    ask /v1/completions "{\"prompt\": [$(seq -s, 100)], \"max_tokens\": 1000}"
    expect_http 503 "a server whose check fails"
    grep -q 'check failed: request 1, token' answer || fail "no reason in the answer: $(cat answer)"
    expect_end_of_server 1 "a failed check"
    grep -q '^requests *0 of 1 completed' out || fail "no report: $(cat out)"
}
