#!/usr/bin/env bash
# What bash completes for cp_attn: completion.sh SCRIPT PROGRAM
set -euo pipefail
# shellcheck disable=SC1090
source "$1"
program=$2 failed=0

# expect "WORDS" WORD...: so a command line of these words, of which the last one is begun, may go on.
expect() {
    local wanted=$1
    shift
    COMP_WORDS=("$program" "$@") COMP_CWORD=$# COMPREPLY=()
    _cp_attn
    [ "${COMPREPLY[*]}" = "$wanted" ] || { echo "completion.sh: $*: found '${COMPREPLY[*]}', expected '$wanted'" >&2; failed=1; }
}

expect "serve" se
expect "--kv-cache-dtype --kv-layout" --kv
expect "token-major head-major vllm-x" --kv-layout ""
expect "vllm-x" --kv-layout = v
expect "--port" serve --por
expect "--prompt --prompt-ids" generate --prompt
expect "serve" bench se
expect "expert_linear exchange" bench ex
expect "--transport" bench exchange --transp
expect "--url" bench serve --ur
expect "--png" plot run.json --p
expect "" check ser # files
expect "" --config ser
exit $failed
