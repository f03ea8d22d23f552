#!/usr/bin/env bash
# The Python package on the libraries of a build, without an installation, in an empty folder: FOLDER/cpattn.
#     lay_out.sh BUILD PYTHON FOLDER
set -euo pipefail
build=$(realpath "$1") package=$3/cpattn
source=$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")
rm -rf "$package"
mkdir -p "$package"
cp -rs "$source"/cpattn/. "$package"
"$2" "$source/declarations.py" "${CC:-cc}" "$source/../include" "$package/_declarations.py"
ln -s "$build/src/libcpattn.so" "$package/libcpattn.so"
ln -s "$build/src/llm/libcpattn_llm.so" "$package/libcpattn_llm.so"
