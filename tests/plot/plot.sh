#!/usr/bin/env bash
# Tests of `cp_attn plot`; CMakeLists.txt beside it calls it.
#     plot.sh says    PROGRAM    pictures of files made up have the numbers of these
#     plot.sh refuses PROGRAM    what is none of its files is named in one line, exit 2, and no page is left
#     plot.sh runs    PROGRAM    every picture is drawn of what a run and a benchmark write, as SVG and PNG
#     plot.sh served  PROGRAM    /status of a server tells what it has served
#     plot.sh status  PROGRAM    Chromium draws every chart of /status, light and dark, and keeps it up to date
#     plot.sh themes  PROGRAM    Chromium draws every chart of the page, light and dark
# The last two are skipped where there is no Chromium.
# The environment gives MPIRUN (with its options, -np excepted).
set -euo pipefail

fail() {
    echo "plot.sh: $*" >&2
    exit 1
}

scaling_file() { # FILE RANKS SPEEDUP
    printf '{"benchmark": "scaling", "rows": [{"work": "prefill", "shape": "1x8x8", "ranks": 1, "speedup": 1},
        {"work": "prefill", "shape": "1x8x8", "ranks": %d, "speedup": %s}]}' "$2" "$3" >"$1"
}

# A run of four requests, one of which failed, and its timeline: rank 0 attends half of the time, then replays a graph,
# rank 1 waits.
make_files() {
    scaling_file two.json 2 1.5
    scaling_file four.json 4 3
    cat >run.json <<'END'
{"ttfts": [0.1, 0.2, 0.4, 9], "itls": [[0.01, 0.02], [], [0.04], [9]], "errors": ["", "", "", "it & <failed>"]}
END
    cat >timeline.json <<'END'
[
{"name":"process_name","ph":"M","pid":0,"args":{"name":"rank 0"}},
{"name":"attend own","cat":"compute","ph":"X","pid":0,"tid":2,"ts":0.0,"dur":500000.0,"args":{"step":0}},
{"name":"replayed step","cat":"compute","ph":"X","pid":0,"tid":2,"ts":600000.0,"dur":300000.0,"args":{"step":1}},
{"name":"wait 1","cat":"compute","ph":"X","pid":1,"tid":2,"ts":0.0,"dur":1000000.0,"args":{"step":0}},
{"name":"waiting","cat":"requests","ph":"X","pid":2,"tid":0,"ts":0.0,"dur":1.0,"args":{"step":0,"request":1}},
{"name":"requests","cat":"requests","ph":"C","pid":2,"ts":0.0,"args":{"running":2,"waiting":1}},
{"name":"requests","cat":"requests","ph":"C","pid":2,"ts":900000.0,"args":{"running":0,"waiting":0}},
{"name":"cache","cat":"requests","ph":"C","pid":2,"ts":0.0,"args":{"blocks":7}},
{"name":"cache","cat":"requests","ph":"C","pid":2,"ts":900000.0,"args":{"blocks":0}},
{"name":"bytes_to","ph":"M","pid":0,"args":{"bytes":[0,3145728]}},
{"name":"bytes_to","ph":"M","pid":1,"args":{"bytes":[1048576,0]}}
]
END
}

plot() {
    code=0
    "$program" plot "$@" >out 2>err || code=$?
}

pictures_say_what_files_say() {
    make_files
    plot four.json two.json run.json timeline.json --title 'A & <B>' --png .
    [ "$code" = 0 ] || fail "exit $code: $(cat err)"
    python3 - <<'END' || fail "the page is wrong"
import re, struct, xml.dom.minidom
page = open("plot.html", encoding="utf-8").read()
assert "<h1>A &amp; &lt;B&gt;</h1>" in page and "http://" not in page.replace("http://www.w3.org/2000/svg", ""), "title, or a network"
pictures = {}
for title, svg in re.findall(r"<h2>(.*?)</h2>\s*(<svg.*?</svg>)", page, re.S):
    pictures[title] = xml.dom.minidom.parseString(svg)
def texts(title):
    return [t.firstChild.data for t in pictures[title].getElementsByTagName("text")]
def curve(title, ink):
    line = [l for l in pictures[title].getElementsByTagName("polyline") if l.getAttribute("class") == f"s{ink}"][0]
    return [tuple(map(float, p.split(","))) for p in line.getAttribute("points").split()]
def near(a, b): return abs(a - b) < 0.2
# Speedup: at 1, 2 and 4 ranks, in order; half the ideal's rise at 2, and two thirds of it at 4.
(x1, y1), (x2, y2), (x4, y4) = curve("Speedup by ranks", 2)
(_, low), (end, high) = curve("Speedup by ranks", 0)
assert x1 < x2 < x4 == end and near((y1 - y2) / (low - high), 0.5 / 3) and near((y1 - y4) / (low - high), 2 / 3), (y1, y2, y4)
assert "prefill 1x8x8" in texts("Speedup by ranks")
# Latencies: steps of a third, at the times of the three that did not fail, on a logarithmic axis.
ttft = curve("Time to the first token (TTFT)", 2)
assert len(ttft) == 4 and near(ttft[2][0] - ttft[1][0], ttft[3][0] - ttft[2][0]), ttft
assert near(ttft[1][1] - ttft[2][1], ttft[2][1] - ttft[3][1]), ttft
assert len(curve("Time between two tokens of a request (ITL)", 2)) == 4
ranks = texts("Ranks by time: timeline.json")
assert "50% attention, 0% waiting" in ranks and "0% attention, 100% waiting" in ranks, ranks
boxes = [b for b in pictures["Ranks by time: timeline.json"].getElementsByTagName("rect") if float(b.getAttribute("height")) == 12]
widths = {b.getAttribute("class"): float(b.getAttribute("width")) for b in boxes}
assert near(widths["f2"] * 2, widths["f3"]) and near(widths["f2"] * 0.6, widths["f4"]) and len(boxes) == 3, widths
assert {"attention", "waiting for messages", "a step as a graph"} <= set(ranks) and "exchange" not in ranks, ranks
assert {"running", "waiting"} <= set(texts("Requests: timeline.json"))
pairs = [t.firstChild.data for t in pictures["Bytes between ranks: timeline.json"].getElementsByTagName("title")]
assert "rank 0 to rank 1: 3145728 bytes" in pairs and "rank 1 to rank 0: 1048576 bytes" in pairs and len(pairs) == 4, pairs
assert len(pictures) == 7, pictures.keys()
for name in ("scaling", "ttft", "itl", "timeline", "requests", "cache", "pairs"):
    head = open(f"{name}.png", "rb").read(24)
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", head[16:24])) > 100, name
END
    plot run.json run.json --output two.html
    [ "$(grep -c '>run.json (2)<' two.html)" = 2 ] || fail "two files of one name are not told apart"
    local long
    long=$(printf 'ä%.0s' {1..70}) # of 140 bytes, cut within a letter behind "prefill "
    sed "s/1x8x8/x$long/g" two.json >long.json
    plot long.json --output long.html --png .
    [ "$code" = 0 ] || fail "a long label: exit $code: $(cat err)"
    iconv -f UTF-8 -t UTF-8 long.html >/dev/null || fail "a label is cut within a letter"
    grep -q ">prefill x$(printf 'ä%.0s' {1..59})<" long.html || fail "a label is not cut behind its last letter"
}

expect_refusal() { # TEXT ARGUMENT...
    local text=$1
    shift
    rm -f plot.html
    plot "$@"
    [ "$code" = 2 ] || fail "exit $code, expected 2: $*"
    { [ "$(wc -l <err)" = 1 ] && grep -qF -- "$text" err; } || fail "expected one line with '$text': $(cat err)"
    [ ! -e plot.html ] || fail "a page is left: $*"
}

other_files_are_refused() {
    make_files
    expect_refusal 'found no file, expected one at least'
    expect_refusal 'none.json' none.json
    expect_refusal '--png: found' run.json --png none
    expect_refusal '--output: found' run.json --output none/plot.html
    cp run.json same.json
    expect_refusal "--output: found 'same.json', which is drawn" run.json same.json --output ./same.json
    cmp run.json same.json || fail "measurements are replaced"
    expect_refusal "found '--pgn', expected an option" run.json --pgn .
    echo '{"a": 1}' >bad.json
    expect_refusal 'bad.json: found nothing that is drawn, expected' bad.json
    echo '{"ttfts": [], "itls": []}' >bad.json
    expect_refusal 'the files have nothing that is drawn' bad.json
    echo '{"ttfts": [1], "itls": [2]}' >bad.json
    expect_refusal 'bad.json: itls: found [2], expected' bad.json
    echo '{"ttfts": ["1"], "itls": [[]]}' >bad.json
    expect_refusal 'bad.json: ttfts: found' bad.json
    echo '{"benchmark": "scaling", "rows": [{"work": "decode", "shape": "x", "ranks": 0, "speedup": 1}]}' >bad.json
    expect_refusal 'bad.json: rows[0].ranks: found 0, expected an integer from 1' bad.json
    printf '[\n{"name":"x"}\n]\n' >bad.json
    expect_refusal 'bad.json:2: found no event' bad.json
    sed 's/"pid":1/"pid":64/' timeline.json >bad.json
    expect_refusal 'bad.json:5: pid: found 64, expected an integer from 0 to 63' bad.json
    sed 's/"dur":1000000.0/"dur":-1/' timeline.json >bad.json
    expect_refusal 'bad.json:5: dur: found -1' bad.json
    sed 's/\[0,3145728\]/[0,"x"]/' timeline.json >bad.json
    expect_refusal 'bad.json:11: args: found' bad.json
    head -n 5 timeline.json | head -c -20 >bad.json
    expect_refusal 'bad.json:' bad.json
}

draw_runs() {
    $MPIRUN -np 2 "$program" --requests 4 --input-len 300 --output-len 6 --local-context 0 --skip-self-test \
        --timeline timeline.json --result-json run.json >out 2>err || fail "the run: $(cat err)"
    $MPIRUN -np 2 "$program" bench scaling --device host --threads 1 --shapes 1x60x60,2x1x60 --iters 1 --min-time 0 \
        --result-json scaling.json >out 2>err || fail "the benchmark: $(cat err)"
    plot run.json scaling.json timeline.json --png .
    [ "$code" = 0 ] || fail "exit $code: $(cat err)"
    [ "$(cat out)" = "plot.html: 7 pictures" ] || fail "$(cat out)"
    for name in scaling ttft itl timeline requests cache pairs; do
        [ "$(stat -c %s $name.png)" -gt 5000 ] || fail "$name.png is blank"
    done
}

# run_chromium OPTION...: on a new profile, into ./browser.log and ./browser.out.
run_chromium() {
    rm -rf profile
    timeout 120 "$chromium" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
        --user-data-dir="$PWD/profile" "$@" >browser.out 2>browser.log || fail "Chromium: $(cat browser.log)"
}

find_chromium() {
    chromium=$(command -v chromium || command -v chromium-browser) || { echo "skipped: no chromium"; exit 77; }
}

# charts_are_drawn PAGE.html URL CHARTS: Chromium draws so many charts at URL, light and dark; the file has that page.
charts_are_drawn() {
    local themes=(dark light) theme
    local place='for (const svg of document.querySelectorAll("svg")) {
        const box = svg.getBoundingClientRect();
        svg.dataset.box = [box.x, box.y, box.width, box.height].join();
    }'
    sed -e 's/<p id="state">/&ready/' -e "s|</body>|<script>${place//$'\n'/}</script></body>|" "$1" >placed.html
    run_chromium --window-size="$window" --dump-dom "file://$PWD/placed.html"
    mv browser.out placed.html
    for theme in 0 1; do
        run_chromium --window-size="$window" --screenshot="$PWD/${themes[theme]}.png" --virtual-time-budget=3000 \
            --blink-settings=preferredColorScheme=$theme "$2"
        [ -s "${themes[theme]}.png" ] || fail "Chromium has drawn nothing: $(cat browser.log)"
    done
    python3 "$here/drawn.py" light.png dark.png placed.html >drawn || fail "not all is drawn: $(cat drawn)"
    [ "$(tail -n 1 drawn)" = "$3 charts are drawn, light and dark" ] || fail "expected $3 charts: $(cat drawn)"
}

page_has_both_themes() {
    find_chromium
    make_files
    plot four.json two.json run.json timeline.json
    charts_are_drawn plot.html "file://$PWD/plot.html" 7
}

# A server of two ranks, whose address is in $url, and four requests that it has answered, of 400 and 8 tokens each.
serve_requests() {
    local request prompt
    prompt=$(seq -s , 2 400)
    : >out
    $MPIRUN -np 2 "$program" serve --port 0 --skip-self-test --device host --threads 1 --num-blocks 100 \
        --local-context 0 >out 2>err &
    server=$!
    trap 'kill $server; wait $server || true; rm -rf "$work"' EXIT
    for ((i = 0; i < 200; i++)); do
        url=$(sed -n 's/^serving .* on \(http:.*\)$/\1/p' out)
        [ -z "$url" ] || break
        sleep 0.1
    done
    [ -n "$url" ] || fail "no server: $(cat err)"
    for request in 1 2 3 4; do
        [ "$(curl -s -o /dev/null -w '%{http_code}' "$url/v1/completions" \
            -d "{\"prompt\": [$request, $prompt], \"max_tokens\": 8}")" = 200 ] || fail "no answer"
    done
}

status_page_tells_what_was_served() {
    serve_requests
    curl -sf "$url/metrics" >metrics
    curl -sf "$url/status" >page.html
    python3 - <<'END' || fail "the page is wrong"
import re, xml.dom.minidom
page = open("page.html", encoding="utf-8").read()
metrics = dict(re.findall(r"^cpattn_(\w+)\{[^}]*\} (\S+)$", open("metrics").read(), re.M))
pictures = {title: xml.dom.minidom.parseString(svg)
            for title, svg in re.findall(r"<h2>(.*?)</h2>\s*(<svg.*?</svg>)", page, re.S)}
assert len(pictures) == 11, pictures.keys()
def texts(title, tag="text"):
    return [t.firstChild.data for t in pictures[title].getElementsByTagName(tag)]
assert {"running 0", "waiting 0"} <= set(texts("Requests")), texts("Requests")
assert "the last 4 requests" in texts("Time to the first token (TTFT)")
assert "the last 28 tokens" in texts("Time between two tokens of a request (ITL)")
assert f"checked {int(metrics['verify_rows_total'])}" in texts("Results checked, and wrong"), metrics
ranks = texts("Ranks by time: the last steps")
shares = [re.fullmatch(r"(\d+)% attention, (\d+)% waiting", t) for t in ranks if "waiting" in t and "%" in t]
assert len(shares) == 2 and all(0 <= int(s[1]) + int(s[2]) <= 101 and int(s[1]) + int(s[2]) > 0 for s in shares), ranks
sent = {}
for text in texts("Bytes between ranks since the start", "title"):
    one, other, count = re.fullmatch(r"rank (\d+) to rank (\d+): (\d+) bytes", text).groups()
    sent[one, other] = int(count)
assert len(sent) == 4 and sent["0", "0"] == sent["1", "1"] == 0 < min(sent["0", "1"], sent["1", "0"]), sent
assert sum(sent.values()) == int(metrics["exchange_bytes_total"]), (sent, metrics["exchange_bytes_total"])
END
}

status_page_is_live() {
    find_chromium
    serve_requests
    curl -sf "$url/status" >page.html
    charts_are_drawn page.html "$url/status" 11
    # The browser first gets the page from before one more request, through a server between.
    python3 - "$url" >between 2>between.log <<'END' &
import http.server, sys, urllib.request
def ask(path, body=None):
    return urllib.request.urlopen(sys.argv[1] + path, body).read()
class Between(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        if self.path == "/status":
            Between.asked += 1
            if Between.asked == 2: ask("/v1/completions", b'{"prompt": [3, 4], "max_tokens": 9}')
        body = open("page.html", "rb").read() if self.path == "/status" and Between.asked == 1 else ask(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)
between = http.server.ThreadingHTTPServer(("localhost", 0), Between)
print(between.server_address[1], flush=True)
between.serve_forever()
END
    between=$!
    trap 'kill $between $server; wait $server || true; rm -rf "$work"' EXIT
    for ((i = 0; i < 200 && $(wc -c <between) == 0; i++)); do sleep 0.1; done
    run_chromium --virtual-time-budget=9000 --dump-dom "http://localhost:$(cat between)/status"
    grep -q '<p id="state">ready</p>' browser.out || fail "not ready: $(head -c 3000 browser.out)"
    grep -q '>the last 4 requests<' page.html || fail "not the page from before"
    grep -q '>the last 5 requests<' browser.out || fail "the page has not been brought up to date"
}

program=$2
here=$(cd "$(dirname "$0")" && pwd)
window=960,3400 # of the browser: whole pages
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
case $1 in
    says) pictures_say_what_files_say ;;
    refuses) other_files_are_refused ;;
    runs) draw_runs ;;
    served) status_page_tells_what_was_served ;;
    status) status_page_is_live ;;
    themes) page_has_both_themes ;;
    *) fail "unknown command '$1'" ;;
esac
