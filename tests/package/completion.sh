#!/usr/bin/env bash
# What a shell completes for cp_attn: completion.sh bash|zsh|fish FOLDER PROGRAM
# FOLDER holds the scripts. Exits with 77 where there is no such shell.
# shellcheck disable=SC2317 # complete_SHELL is called by its name
set -euo pipefail
shell=$1 scripts=$2
PATH=$(dirname "$3"):$PATH
command -v "$shell" >/dev/null || { echo "skipped: no $shell"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # an empty folder: no file is completed
touch served.json

# A command line up to its cursor, and the words that may stand there, sorted.
cases='cp_attn se|serve
cp_attn --kv|--kv-cache-dtype --kv-cache-dtype-skip-layers --kv-layout
cp_attn --kv-layout |head-major token-major vllm-x
cp_attn --kv-layout=v|vllm-x
cp_attn serve --por|--port
cp_attn generate --prompt|--prompt --prompt-ids
cp_attn bench se|serve
cp_attn bench ex|exchange expert_linear
cp_attn bench sca|scaling
cp_attn bench exchange --transp|--transport
cp_attn bench serve --ur|--url
cp_attn plot run.json --p|--png
cp_attn check ser|served.json
cp_attn --config ser|served.json'

# complete_SHELL: of each line of the input, the words that may end it, one a line, and an empty line behind.

complete_bash() {
    # shellcheck disable=SC1091
    source "$scripts/cp_attn"
    local line last
    while IFS= read -r line; do
        read -ra COMP_WORDS <<<"${line/=/ = }"
        [ "${line% }" = "$line" ] || COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
        _cp_attn
        last=${COMP_WORDS[COMP_CWORD]}
        [ ${#COMPREPLY[@]} -gt 0 ] || mapfile -t COMPREPLY < <(compgen -f -- "$last") # complete -o default
        printf '%s\n' "${COMPREPLY[@]}" ""
    done
}

# A shell at a terminal of its own, in which the builtin that adds words also writes them to a file.
complete_zsh() {
    cat >session.zsh <<'END'
zmodload zsh/zpty
words=$PWD/words.out
wait_for() { until grep -q "^$1\$" $words 2>/dev/null; do sleep 0.02; zpty -r -t shell screen; done }
zpty shell zsh -f -i
zpty -w shell "fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; bindkey '^I' complete-word '^U' kill-whole-line
compadd() {
    local -a added
    [[ \" \${@[1,(i)(-|--)]}\" == *' '-[a-zA-Z]#[OAD]* ]] || { builtin compadd -A added \"\$@\"; print -rl -- \$added >>$words; }
    builtin compadd \"\$@\"
}
print ready >>$words"
wait_for ready
while IFS= read -r line; do
    : >$words
    zpty -w -n shell "$line"$'\t'$'\C-U'
    zpty -w shell "print ended >>$words"
    wait_for ended
    grep -vE '^(ended|)$' $words
    print
done
zpty -d shell
END
    zsh -f session.zsh "$scripts"
}

complete_fish() {
    cat >session.fish <<'END'
source $argv[1]/cp_attn.fish
while read --line line
    complete -C $line | string replace -r '\t.*' '' | string replace -r '^--[^=]+=' ''
    echo
end
END
    fish --no-config session.fish "$scripts"
}

failed=0 n=0
cut -d '|' -f 1 <<<"$cases" | "complete_$shell" >found
while IFS='|' read -r line wanted; do
    n=$((n + 1))
    words=$(awk -v n=$n '$0 == "" { n--; next } n == 1' found | LC_ALL=C sort | xargs)
    [ "$words" = "$wanted" ] || { echo "completion.sh: $shell: $line: found '$words', expected '$wanted'" >&2; failed=1; }
done <<<"$cases"
exit $failed
