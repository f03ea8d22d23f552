# Cases of program_test.sh. What the server must bear: many clients, such as go, stall, or speak no HTTP; and the client that
# measures it. HTTP_CLIENT is the client that is not kind.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# ask_generate: what it answers to three prompts, into answers: "PROMPT=ANSWER" each, in ids.
ask_generate() {
    local prompt
    answers=()
    for prompt in 1,5,9 2,7,1,8,2,8 100,50,25; do
        "$CP_ATTN" generate --model-dir "$MODELS/tiny-llama" --prompt-ids $prompt --max-tokens 24 --ignore-eos >ids 2>err.ids ||
            fail "generate: $(cat err.ids)"
        answers+=("$prompt=$(sed -n '1s/ *$//; 1s/ /,/gp' ids)")
    done
}

# streams_of N: as many streams at once, of these prompts, get the same ids.
streams_of() {
    "$HTTP_CLIENT" "${url##*:}" streams "$1" "${answers[@]}" || fail "streams"
}

# bear N SECONDS: everything, on the server that runs: N streams at once, N clients that go, and one that stalls for so long.
bear() {
    ask_generate
    streams_of "$1"
    "$HTTP_CLIENT" "${url##*:}" cancels "$1" || fail "clients that go"
    "$HTTP_CLIENT" "${url##*:}" stall "$2" || fail "a client that stalls"
    [ -z "$(our_lines)" ] || fail "complaints of good requests: $(our_lines | head)"
    "$HTTP_CLIENT" "${url##*:}" corpus "$cases/http/malformed.txt" err || fail "malformed requests"
    streams_of 10
}

# serve_load N: the same on one rank.
serve_load() {
    start_server 1 --model-dir "$MODELS/tiny-llama"
    bear "$1" 0.3
    end_server 0 TERM
}

# On two ranks, and a client that reads nothing for a minute.
serve_load_long() {
    limit=280
    start_server 2 --model-dir "$MODELS/tiny-llama" --idle-timeout 120
    bear 1000 60
    end_server 0 TERM
}

# The client that measures: against this server it finds vocabulary and name by itself, a trace shares its prefixes, and what the
# server refuses is counted.
serve_bench() {
    start_server 1 --model-dir "$MODELS/tiny-llama"
    local client=("$CP_ATTN" bench serve --url "$url/")
    "${client[@]}" --requests 12 --input-len 40 --output-len 6 --request-rate 200 --max-concurrency 4 --percentiles 50,90 \
        --goodput ttft:60000 --result-json r.json >out.client 2>err.client || fail "bench serve: $(cat out.client err.client)"
    [ ! -s err.client ] || fail "complaints of good requests: $(cat err.client)"
    expect_value completed 12 r.json
    expect_value total_input_tokens 480 r.json
    expect_value total_output_tokens 72 r.json
    expect_value model_id tiny-llama r.json
    [ -n "$(value p90_itl_ms r.json)" ] || fail "no percentile"
    mixed_trace >trace.jsonl
    "${client[@]}" --trace trace.jsonl --length-scale 0.2 --time-scale 0.1 --result-json r.json >out.client 2>err.client ||
        fail "bench serve of a trace: $(cat out.client err.client)"
    expect_value completed 6 r.json
    expect_value total_input_tokens 382 r.json
    "${client[@]}" --requests 3 --input-len 5000 --output-len 6 --result-json r.json >out.client 2>err.client
    code=$?
    expect_code 1 "requests that are refused"
    grep -q '^cp_attn: 3 requests failed: HTTP 400: prompt: 5000 tokens' err.client || fail "no reason: $(cat err.client)"
    expect_value failed 3 r.json
    end_server 0 TERM
}
