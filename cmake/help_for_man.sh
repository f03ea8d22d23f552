#!/bin/sh
# What help2man makes a page of: --help of a command, with its first lines as help2man knows them, "Usage: ..." and
# "  or:  ...", and behind them, where there are several, what is said of each.
#     help_for_man.sh CP_ATTN [WORD...] --help
set -eu
"$@" | awk '
    !ended && (sub(/^usage: /, "") || (NR > 1 && sub(/^       /, ""))) {
        about = ""
        if (match($0, /    /)) { about = substr($0, RSTART + 4); $0 = substr($0, 1, RSTART - 1) }
        print (NR == 1 ? "Usage: " : "  or:  ") $0
        if (about != "") list = list "  " $0 "    " about "\n"
        next
    }
    !ended { ended = 1; print (NR > 2 ? "\n" list : "") }
    { print }'
