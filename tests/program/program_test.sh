#!/usr/bin/env bash
# One case of the program, end to end: program_test.sh CASE [ARGUMENT...]. The cases are the functions of the files in
# this folder; here is what they share.
# CP_ATTN and CP_ATTN_FAULTS name the programs, MPIRUN starts ranks, CONFIGS is the folder of examples, MODELS that of
# tiny models, HTTP_CLIENT a client for tests of the server, FAIL_MALLOC_LIBRARY what fail_malloc.c makes. Runs are on the back end CPATTN_TEST_DEVICE, host or cuda, on
# at most RANKS ranks. Exits 77, with a line, where there are fewer devices.
# shellcheck disable=SC2317 # the files of cases call what is defined here
set -uo pipefail

device=${CPATTN_TEST_DEVICE:-host}
most_ranks=${RANKS:-8}
skipped=77

cases=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
unset "${!CPATTN_@}"
export CPATTN_DEVICE=$device
failed=0
limit=240 # seconds for one run, which takes a few, but on a busy machine; a hanging rank ends in exit code 124

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

# What the program itself says on stderr, without mpirun's words, and without what it says once of fp32 on devices.
no_tensor_cores='warn: attend runs without tensor cores.* queries that are neither bf16 nor fp16$'
our_lines() { grep '^cp_attn: ' err | grep -v "$no_tensor_cores"; }

# said GREP_ARGUMENT...: whether a line that the program has said matches. Not through a pipe, which breaks where grep
# stops reading early.
said() { grep -q "$@" <<<"$(our_lines)"; }

# expect_line TEXT: the program has said one line, with this text in it.
expect_line() {
    [ "$(our_lines | wc -l)" = 1 ] || { fail "expected one line"; cat err; }
    said -F -- "$1" || fail "expected '$1' in: $(our_lines)"
}

# expect_bad TEXT ARGUMENT...: exit code 2 on $ranks ranks, one line with the text, nothing on stdout, no file.
ranks=1
expect_bad() {
    local text=$1
    shift
    run "$ranks" "$@" --result-json result.json --timeline timeline.json --metrics-file metrics.prom
    expect_code 2 "$*"
    expect_line "$text"
    [ ! -s out ] || fail "output of a run that was refused: $*"
    [ -z "$(ls result.json* timeline.json* metrics.prom* 2>/dev/null)" ] || fail "a file of a run that was refused: $*"
}

# A run that is refused for want of memory, or of devices, whichever comes first: ends the test in the second case.
need_devices() {
    [ "$device" = cuda ] || return 0
    run "$most_ranks" --num-blocks 2147483647
    grep -q 'found [0-9]* CUDA devices for' err || return 0
    echo "skipped: $(our_lines)"
    exit $skipped
}

# value KEY FILE: a number or string of a result file (its keys are unique, but for those of groups of layers).
value() { sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}$/\1/p" "$2"; }

# How many rows of a run were compared with float64.
checked_rows() { sed -n '/"verify": {/,/}/s/^ *"rows": \([0-9]*\),*$/\1/p' "$1"; }

expect_value() {
    [ "$(value "$1" "$3")" = "$2" ] || fail "$1 is '$(value "$1" "$3")' in $3, expected $2"
}

small_model() {
    printf '%s\n' "layers: 2" "q_heads: 4" "kv_heads: 2" "head_dim: 16" "dtype: fp32" >model.yaml
}

# A cache of latents, of four tiles where they have any, which prompts expand.
latent_model() {
    printf '%s\n' "layers: 2" "q_heads: 4" "kv_heads: 1" "head_dim: 96" "v_head_dim: 32" "latent_dim: 512" \
        "rope_dim: 64" "dtype: bf16" >model.yaml
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

# expect_digest_of FILE FILE: both runs gave the same results, bit for bit, as the host alone promises.
expect_digest_of() {
    [ "$device" != host ] || [ "$(value output_digest "$1")" = "$(value output_digest "$2")" ] ||
        fail "$1 and $2 differ in their results"
}

for subject in usage results cache failures memory ranks models serve serve_load; do
    # shellcheck disable=SC1090
    . "$cases/$subject.sh" || exit 1
done
declare -F "$1" >/dev/null || { echo "no case $1"; exit 2; }
[ "$1" = no_device ] || need_devices
"$@"
exit $failed
