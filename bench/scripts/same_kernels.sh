#!/usr/bin/env bash
# Whether the CUDA objects of two builds have the same machine code, function by function, for the architectures that both
# were built for. Needs cuobjdump. Exits 1 and names the functions that differ.
#     bench/scripts/same_kernels.sh OLD_BUILD NEW_BUILD
set -euo pipefail
old=$1 new=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The functions of a build, a line each: object, architecture, name, and a sum of the instructions. Names in anonymous namespaces
# have a hash of the file in them, which goes by its path.
functions() {
    local object
    find "$1/kernels/cuda" -name '*.cu.o' | while read -r object; do
        cuobjdump -sass "$object" | sed -E 's/[0-9]+_GLOBAL__N__[0-9a-f]{8}_[0-9]+_[a-z0-9_]+_cu_[0-9a-f]{8}/_/g' |
            python3 -c '
import hashlib, sys
arch, sums = "", {}
for line in sys.stdin:
    if line.startswith("arch = "): arch, code = line.split()[2], None
    elif "Function : " in line: code = sums.setdefault((arch, line.split(" : ")[1].strip()), hashlib.sha256())
    elif "/*" in line and code: code.update(line.strip().encode())
for (arch, name), code in sums.items(): print(sys.argv[1], arch, name, code.hexdigest()[:16])
' "$(basename "$object")"
    done | sort
}

functions "$old" >"$work/old"
functions "$new" >"$work/new"
# Of the objects and architectures of both.
keys() { cut -d ' ' -f 1,2 "$1" | sort -u; }
join -t '|' <(keys "$work/old") <(keys "$work/new") >"$work/both"
for side in old new; do grep -F -f "$work/both" "$work/$side" >"$work/$side.both" || true; done
diff <(sed 's/^/  /' "$work/old.both") <(sed 's/^/  /' "$work/new.both") && status=0 || status=1
echo "$(comm -12 "$work/old.both" "$work/new.both" | wc -l) functions of $(wc -l <"$work/both") objects and architectures are the same"
exit $status
