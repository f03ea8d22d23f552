#!/usr/bin/env bash
# Makes the Python in which the back ends are tested in vLLM and SGLang, on a machine without a GPU, where it is not yet.
#     stacks.sh FOLDER [PYTHON]
# It gets what stacks.txt names. A PyTorch that PYTHON has is used, with what else lies beside it; otherwise PyTorch comes
# from TORCH_INDEX, by default that of builds for the CPU. Exits with 77, as a test that is skipped does, where pip cannot
# get them.
set -euo pipefail
folder=$1 base=${2:-python3}
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

cmp -s "$here/stacks.txt" "$folder/stacks.txt" && exit 0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
skip() {
    echo "skipped: no $1: $(tail -n 1 "$log")"
    exit 77
}
get() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >"$log" 2>&1 || skip "${*: -1}"
}

if [ -e "$folder" ] && [ ! -e "$folder/pyvenv.cfg" ] && [ -n "$(ls -A "$folder")" ]; then
    echo "stacks.sh: $folder holds something else; expected an empty folder or an environment" >&2
    exit 2
fi
rm -rf "$folder"
"$base" -m venv "$folder" >"$log" 2>&1 || skip "environment by $base"
if packages=$("$base" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null); then
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$packages" >"$site/base.pth"
else
    get --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch
fi
get pycparser pytest numpy "transformers>=5.16"
get --no-deps -r "$here/stacks.txt"
(cd "$folder" && bin/python -c 'import vllm, sglang')
cp "$here/stacks.txt" "$folder"
