# Cases of program_test.sh. Runs that end well: traces, shapes and what is written about them.
# shellcheck shell=bash disable=SC2034,SC2154 # program_test.sh reads what is set here, and the other way round

# replace_bf16 FILE: its digests take the places of those of runs in bf16 in table.txt.
replace_bf16() {
    { grep -v -- '--dtype bf16 [0-9a-f]*$' table.txt; cat "$1"; } >replaced.txt
    mv replaced.txt table.txt
}

# Results are those of the recorded tables, bit for bit: a change that is meant to keep them has kept them. As FEW=1 only
# two runs; the slow test makes them all.
digests() {
    local set tables=$cases/digests
    "$CP_ATTN" --requests 1 --input-len 8 --output-len 1 >out 2>err || fail "exit $?"
    set=$(sed -n 's/^device .*: host, \([^,]*\),.*/\1/p' out)
    case $set in
        AVX-512*) cp "$tables/avx-512.txt" table.txt ;;
        AVX2) cp "$tables/avx2.txt" table.txt ;;
        *) echo "no table of digests for this instruction set" && exit "$skipped" ;;
    esac
    # Runs in bf16 are those of the instructions that multiply pairs.
    case $set in
        *" with VDPBF16PS") replace_bf16 "$tables/vdpbf16ps.txt" ;;
        *" with AMX") replace_bf16 "$tables/amx.txt" ;;
    esac
    MPIRUN="$MPIRUN" bash "$cases/../../bench/scripts/digests.sh" "$CP_ATTN" table.txt || fail "digests differ"
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
        [ "$(checked_rows "r$n.json")" -ge 1000 ] || fail "only $(checked_rows "r$n.json") rows are checked"
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
    run 2 --model model.yaml --requests 2 --input-len 1200 --output-len 4 --verify 1 --block-size 512 --result-json r.json
    expect_code 0 "the largest block"
    expect_value violations 0 r.json
    run 2 --config "$CONFIGS/service.yaml" --requests 2 --input-len 64 --output-len 2 --result-json r.json
    expect_code 0 "the example settings file"
    expect_value completed 2 r.json
}

# A cache of latents, and the first layers of a model.
latents() {
    latent_model
    run 2 --model model.yaml --layers 1 --requests 3 --input-len 60 --output-len 4 --verify 0.2 \
        --kv-cache-dtype fp8_t128 --result-json r.json
    expect_code 0 "a cache of latents"
    expect_value violations 0 r.json
    expect_value token_layer_bytes 656 r.json
    [ -n "$(value decode_kernels r.json)" ] && [ -n "$(value prefill_kernels r.json)" ] || fail "no kernel is named"
    grep -q '^kernels  *decode by .*; prefill by ' out || fail "the report names no kernel"
    grep -q '1 layers, 4 query and 1 KV heads of 576 (latents of 512; prompts 96)' out || fail "it does not say the shape"
    expect_bad '--layers: found 3, expected at most the 2 of' --model model.yaml --layers 3
    expect_bad 'expected 1: it is one of latents' --kv-cache-dtype fp8_t128
}

mixed() {
    small_model
    run 2 --model model.yaml --num-blocks 64 --result-json r.json
    expect_code 0 "the run without requests"
    grep -q 'a mixed run of about ten seconds: one context of [0-9]* tokens' out || fail "it does not say what it does"
    expect_value completed 13 r.json
    expect_value violations 0 r.json
}

# expect_metric SAMPLE VALUE: stands so in m.prom.
expect_metric() { grep -qxF "cpattn_$1 $2" m.prom || fail "not $2: $(grep -F "$1" m.prom)"; }

# --metrics-file, and --timeline: a file of valid JSON with spans of every rank that nest in each row; a place where none
# can be written is refused before the run.
timeline() {
    small_model
    mixed_trace >trace.jsonl
    run 3 --model model.yaml --trace trace.jsonl --local-context 0 --verify 0.01 --timeline timeline.json \
        --metrics-file m.prom --result-json r.json
    expect_code 0 "a run with a timeline and metrics"
    expect_metric 'request_success_total{model_name="model.yaml",finished_reason="length"}' 6
    expect_metric 'prompt_tokens_total{model_name="model.yaml"}' 1909
    expect_metric 'generation_tokens_total{model_name="model.yaml"}' 25
    expect_metric 'inter_token_latency_seconds_count{model_name="model.yaml"}' 19
    expect_metric 'kv_cache_usage_perc{model_name="model.yaml"}' 0
    [ -z "$(our_lines)" ] || fail "complaints of a good run: $(our_lines)"
    python3 - "$device" "$(few 3)" <<'END' || fail "the timeline is wrong"
import collections, json, sys
device, ranks = sys.argv[1], int(sys.argv[2])
events = json.load(open("timeline.json"))
spans = [e for e in events if e["ph"] == "X"]
# A row a request: it waits, computes its prompt, gives tokens, one after the other.
requests = collections.defaultdict(list)
for e in spans:
    assert (e["pid"] == ranks) == (e["cat"] == "requests"), e
    if e["pid"] == ranks:
        requests[e["args"]["request"], e["tid"]].append(e)
assert len(requests) == len({tid for _, tid in requests}) == 6, requests.keys()
for of in requests.values():
    of.sort(key=lambda e: e["ts"])
    assert [e["name"] for e in of] == ["waiting", "prefill", "decode"], of
    for e, after in zip(of, of[1:]):
        assert abs(e["ts"] + e["dur"] - after["ts"]) < 0.1, of
counters = collections.defaultdict(list)
for e in events:
    if e["ph"] == "C":
        counters[e["name"]].append(e["args"])
assert set(counters) == {"requests", "cache"}, counters.keys()
blocks = [c["blocks"] for c in counters["cache"]]
kv = json.load(open("r.json"))["kv"]
assert 0 < max(blocks) <= kv["peak"] <= kv["blocks"] and blocks[-1] == 0, (blocks, kv)
# What each rank has sent each other comes to what the run has sent.
sent = {e["pid"]: e["args"]["bytes"] for e in events if e["name"] == "bytes_to"}
assert set(sent) == set(range(ranks)) if ranks > 1 else not sent, sent
assert all(len(row) == ranks and row[rank] == 0 and sum(row) > 0 for rank, row in sent.items()), sent
assert sum(map(sum, sent.values())) == json.load(open("r.json"))["cp"]["bytes_sent"], sent
counts = counters["requests"]
assert counts[0]["waiting"] > 0 and counts[-1] == {"running": 0, "waiting": 0}, counts
assert all(c["running"] >= 0 and c["waiting"] >= 0 and sum(c.values()) <= 6 for c in counts), counts
assert max(c["running"] for c in counts) > 1, counts
spans = [e for e in spans if e["pid"] < ranks]
assert {e["cat"] for e in spans} >= {"compute", "host", "scheduler"}
rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
names = {e["name"] for e in spans}
assert {e["pid"] for e in spans} == set(range(ranks))
expected = ["layer in", "kv_write", "attend own", "check", "plan", "schedule"]
if ranks > 1:
    expected += ["attend received", "merge", "wait", "queries", "states"]
    # Keys and values come round by round on the host, on a device from all ranks at once.
    expected += ["pack 1", "exchange 1", "exchange 2"] if device == "host" else ["pack", "exchange"]
for name in expected:
    assert name in names, (name, names)
assert {rows[e["pid"], e["tid"]] for e in spans if e["name"] == "layer in"} == {"compute"}
assert all("layer" in e["args"] and "step" in e["args"] for e in spans if e["name"] in ("layer in", "merge"))
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
    "$CP_ATTN" plot r.json timeline.json >out 2>err || fail "it cannot be drawn: $(cat err)"
    [ "$(cat out)" = "plot.html: $((5 + ($(few 3) > 1))) pictures" ] || fail "not all is drawn: $(cat out)"
    run 1 --model model.yaml --requests 1 --input-len 8 --output-len 1 --timeline none/timeline.json
    expect_code 2 "a timeline in no folder"
    expect_line "--timeline: found 'none/timeline.json'"
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
    run 1 --dry-run
    expect_code 2 "a dry run of nothing"
    expect_line "--dry-run: found without requests"
}
