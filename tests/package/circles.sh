#!/usr/bin/env bash
# No circles between files. A module is FOLDER/NAME: NAME.h with NAME.c or NAME.cu. It depends on the modules that define
# a function it names, and on those of other folders whose headers it includes; files of one folder may share types.
#     circles.sh SOURCE
# Fails with the modules of each circle, and with each function that a header of src/ or server/ declares and another
# module defines: who includes such a header does not see whom it depends on.
set -euo pipefail
cd "$1"

# Lines "includes MODULE MODULE", "defines MODULE FUNCTION", "declares MODULE FUNCTION" and "names MODULE FUNCTION".
# What begins in the first column is a definition in a source and a declaration in a header.
facts() {
    find base kernels comm src server program launcher bench plot main \( -name '*.[ch]' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0 | xargs -0 awk '
        FNR == 1 {
            module = FILENAME
            sub(/\.[a-z]+$/, "", module)
            is_header = FILENAME ~ /h$/
            in_comment = 0
        }
        /^ *# *include "/ {
            split($0, quoted, "\"")
            sub(/\.[a-z]+$/, "", quoted[2])
            print "includes", module, quoted[2]
            next
        }
        {
            line = $0
            gsub(/"([^"\\]|\\.)*"/, "", line)
            if (in_comment && !sub(/^.*\*\//, "", line)) next
            in_comment = 0
            gsub(/\/\*([^*]|\*[^\/])*\*\//, "", line)
            if (sub(/\/\*.*$/, "", line)) in_comment = 1
            at_top = line ~ /^[a-zC]/ && line !~ /^(static|typedef|CPA_(TRY|HOST_DEVICE|INLINE))/
            while (match(line, /cpa_[a-z0-9_]+/)) {
                name = substr(line, RSTART, RLENGTH)
                line = substr(line, RSTART + RLENGTH)
                is_function = at_top && line ~ /^\(/
                print is_function ? (is_header ? "declares" : "defines") : "names", module, name
                if (is_function) at_top = 0
            }
        }' | sort -u
}

# "MODULE MODULE": the first depends on the second.
edges() {
    awk '
        function folder(module) {
            sub(/\/[^\/]*$/, "", module)
            return module
        }
        $1 == "includes" && folder($2) != folder($3) { print $2, $3 }
        $1 == "defines" { defined_in[$3] = $2 }
        $1 == "names" { names[$2, $3] }
        END {
            for (pair in names) {
                split(pair, part, SUBSEP)
                if (part[2] in defined_in && defined_in[part[2]] != part[1]) print part[1], defined_in[part[2]]
            }
        }' <<<"$1"
}

# What is left of the edges when modules that need nobody, or that nobody needs, are taken away again and again.
circles() {
    sort -u | awk '
        { from[NR] = $1; to[NR] = $2 }
        END {
            do {
                split("", needs)
                split("", needed)
                for (e in from) needs[from[e]] = needed[to[e]] = 1
                removed = 0
                for (e in from)
                    if (!(to[e] in needs) || !(from[e] in needed)) {
                        delete from[e]
                        removed = 1
                    }
            } while (removed)
            for (e in from) print "in a circle: " from[e] " needs " to[e]
        }' | sort
}

# Functions that a header of src/ or server/ declares for another module. NAME_internal.h belongs to NAME.
strays() {
    awk '
        $1 == "defines" { defined_in[$3] = $2 }
        $1 == "declares" && $2 ~ /^(src|server)\// {
            sub(/_internal$/, "", $2)
            declared[$3] = $2
        }
        END {
            for (name in declared)
                if (name in defined_in && defined_in[name] != declared[name])
                    print "a header of " declared[name] " declares " name ", which " defined_in[name] " defines"
        }' <<<"$1" | sort
}

found=$(facts)
stray=$(strays "$found")
circle=$(edges "$found" | circles)
[ "$(wc -l <<<"$found")" -gt 1000 ] || stray="only $(wc -l <<<"$found") facts found"
if [ -n "$circle$stray" ]; then
    printf 'circles.sh: %s\n' ${circle:+"$circle"} ${stray:+"$stray"} >&2
    exit 1
fi
echo "no circles between $(cut -d' ' -f2 <<<"$found" | sort -u | wc -l) modules"
