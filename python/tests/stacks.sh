#!/usr/bin/env bash
# Makes the Python in which the back ends are tested in vLLM and SGLang, on a machine without a GPU.
#     stacks.sh FOLDER [PYTHON]
# It gets what stacks.txt names. A PyTorch that PYTHON has is used, with what else lies beside it; otherwise PyTorch comes
# from TORCH_INDEX, by default that of builds for the CPU.
set -euo pipefail
folder=$1 base=${2:-python3}
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

"$base" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
if packages=$("$base" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null); then
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$packages" >"$site/base.pth"
else
    "${pip[@]}" --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" torch
fi
"${pip[@]}" numpy "transformers>=5.16" pycparser pytest
"${pip[@]}" --no-deps -r "$here/stacks.txt"
