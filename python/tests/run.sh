#!/usr/bin/env bash
# Runs the tests of the Python package on the library of a build, without an installation.
#     run.sh BUILD PYTHON [ARGUMENT OF pytest...]
# Exits with 77, as a test that is skipped does, where PYTHON lacks what they need.
set -euo pipefail
build=$(realpath "$1") python=$2
shift 2
tests=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

if ! missing=$("$python" -c 'import numpy, pycparser, pytest' 2>&1); then
    echo "skipped: $python has no numpy, pycparser or pytest: ${missing##*$'\n'}"
    exit 77
fi
bash "$tests/lay_out.sh" "$build" "$python" "$build/python"
"$python" "$tests/entry_points.py" "$tests/../pyproject.toml" "$build/python"
export CPATTN_TEST_MODEL=$tests/../../tests/data/tiny-llama
cd "$build/python" # not where cpattn is without its library
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$build/python exec "$python" -m pytest -q -p no:cacheprovider "$@" "$tests"
