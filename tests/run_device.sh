#!/usr/bin/env bash
# Runs the device tests of a build that was made elsewhere, on a machine without a build tree of its own:
#     run_device.sh BUILD_DIR [gpu|multigpu] [CTEST_OPTION...]
# BUILD_DIR needs CTestTestfile.cmake, tests/ (its CTestTestfile.cmake files and the programs) and main/ (the programs)
# of the build; the sources are those beside this script. Exits 1 if a test failed or was skipped: skipped is not passed.
set -euo pipefail

build=$(cd "${1:?usage: run_device.sh BUILD_DIR [gpu|multigpu] [CTEST_OPTION...]}" && pwd)
label=${2:-gpu}
shift $(($# > 1 ? 2 : 1))
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The lists of tests hold the paths of the machine that built; the copies hold those of this one.
built_in=$(sed -n 's/^# Build directory: //p' "$build/CTestTestfile.cmake")
built_from=$(sed -n 's/^# Source directory: //p' "$build/CTestTestfile.cmake")
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
for list in CTestTestfile.cmake $(cd "$build" && echo tests/CTestTestfile.cmake tests/*/CTestTestfile.cmake); do
  mkdir -p "$lists/$(dirname "$list")"
  # Through a mark, as the new build folder may lie in the old source folder and the other way round.
  sed -e "s|$built_in|@BUILD@|g" -e "s|$built_from|$source|g" -e "s|@BUILD@|$build|g" "$build/$list" >"$lists/$list"
done
sed -i -e '/^subdirs/{/"tests"/!d}' "$lists/CTestTestfile.cmake" # the other folders have no tests

log=$lists/log
code=0
ctest --test-dir "$lists" -L "^$label\$" --output-on-failure --no-tests=error "$@" | tee "$log" || code=$?
skipped=$(grep -c '\*\*\*Skipped' "$log" || true)
[ "$skipped" = 0 ] || { echo "run_device.sh: $skipped tests were skipped" && code=1; }
exit $((code != 0))
