# Completion of fish for cp_attn. What there is comes from the program's own --help, each time.

# --help of the command that is being written.
function __cp_attn_help
    set -l words (commandline -opc)
    set -l command
    if contains -- "$words[2]" serve generate bench plot
        set command $words[2]
        test "$words[2..3]" = "bench serve"; and set -a command serve
    end
    $words[1] $command --help 2>/dev/null
end

# Options, and what is said of each, over one line or several.
function __cp_attn_options
    __cp_attn_help | awk '
        function tell() { if (name != "") print name "\t" text; name = "" }
        /^  --/ { tell(); name = $1; text = match($0, /^  --[^ ]+( [^ ]+)?  +/) ? substr($0, RLENGTH + 1) : ""; next }
        /^          / && name != "" { sub(/^ +/, ""); text = text (text == "" ? "" : " ") $0; next }
        { tell() }
        END { tell() }'
end

# What the option before may be, if it is one of several ("--name VALUE|VALUE"), given as "--name value" or "--name=value".
function __cp_attn_choices
    set -l option (commandline -opc)[-1]
    set -l begun (string match -r -- '^(--[^=]+)=' (commandline -ct))
    set -q begun[2]; and set option $begun[2]
    __cp_attn_help | awk -v option="$option" -v begun="$begun[1]" '/^  --/ && $1 == option && $2 ~ /\|/ {
        n = split($2, choices, "|")
        for (i = 1; i <= n; i++) print begun choices[i]
    }'
end

function __cp_attn_benchmarks
    echo serve
    __cp_attn_help | awk '
        /^$/ { on = 0 }
        on { gsub(",", ""); for (i = 1; i <= NF; i++) print $i }
        /^NAME is one of/ { on = 1 }'
end

function __cp_attn_words_before # N [LAST]: so many words stand before the one that is being written
    set -l words (commandline -opc)
    test (count $words) = $argv[1]; and test "$words[-1]" = "$argv[2]" -o (count $argv) = 1
end

complete -c cp_attn -n '__cp_attn_words_before 1' -f -a serve -d 'requests over HTTP'
complete -c cp_attn -n '__cp_attn_words_before 1' -f -a generate -d 'answer a prompt'
complete -c cp_attn -n '__cp_attn_words_before 1' -f -a bench -d 'measure one operation, or a server'
complete -c cp_attn -n '__cp_attn_words_before 1' -f -a check -d 'compute rows of --violation-dump again'
complete -c cp_attn -n '__cp_attn_words_before 1' -f -a plot -d 'draw results and timelines'
complete -c cp_attn -n '__cp_attn_words_before 2 bench' -f -a '(__cp_attn_benchmarks)'
complete -c cp_attn -n 'string length -q -- (__cp_attn_choices)' -f -a '(__cp_attn_choices)'
complete -c cp_attn -n 'string match -q -- "-*" (commandline -ct)' -a '(__cp_attn_options)'
