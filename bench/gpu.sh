#!/bin/sh
# gpu.sh BIN_DIR [OUT_DIR]: one visit to a machine with a GPU. Runs the device tests of BIN_DIR (the tests folder of a
# build), the sanitizer on the small ones, then the timings; every output goes to OUT_DIR, a summary to the terminal.
set -u
bin=${1:?usage: gpu.sh BIN_DIR [OUT_DIR]}
out=${2:-.}
failed=0

# step NAME SECONDS COMMAND...: runs a command with a time limit, its output to OUT_DIR/NAME.txt.
step() {
  name=$1 limit=$2
  shift 2
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  case $status in
    0) echo "$name: passed" ;;
    77) echo "$name: skipped: $(head -n 1 "$out/$name.txt")" ;;
    *)
      echo "$name: FAILED with $status"
      tail -n 25 "$out/$name.txt"
      failed=1
      ;;
  esac
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
step test_cuda_ops 60 "$bin/test_cuda_ops"
for path in simple portable hopper; do
  step "test_attend-$path" 90 env CPATTN_TEST_DEVICE=cuda:$path "$bin/test_attend"
done

if command -v compute-sanitizer >/dev/null; then
  step memcheck-ops 60 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$bin/test_cuda_ops"
  step racecheck-ops 60 compute-sanitizer --tool racecheck --error-exitcode 9 "$bin/test_cuda_ops"
  for path in portable hopper; do
    for tool in memcheck racecheck synccheck; do # the first tests only: the sanitizer is slow
      step "$tool-$path" 60 env CPATTN_TEST_DEVICE=cuda:$path compute-sanitizer --tool $tool --error-exitcode 9 \
        "$bin/test_attend" 2
    done
  done
else
  echo "sanitizer: skipped: compute-sanitizer is not on the PATH"
fi

for part in merge kv decode prefill portable; do
  if timeout 100 "$bin/cuda_bench" copy $part >"$out/bench-$part.txt" 2>&1; then :; else failed=1; fi
  cat "$out/bench-$part.txt"
done
exit $failed
