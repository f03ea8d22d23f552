#!/bin/sh
# gpu.sh BIN_DIR [OUT_DIR]: one visit to a machine with a GPU. Runs the device tests in BIN_DIR, the sanitizer on the
# small cases, then the timings; the whole output goes to OUT_DIR, a summary to the terminal.
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
    *) echo "$name: FAILED with $status"; tail -n 25 "$out/$name.txt"; failed=1 ;;
  esac
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
step test_cuda_ops 60 "$bin/test_cuda_ops"
for path in simple portable hopper; do step "test_cuda_attend-$path" 90 "$bin/test_cuda_attend" $path; done
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck synccheck; do
    step "sanitizer-$tool" 120 compute-sanitizer --tool $tool --error-exitcode 1 "$bin/test_cuda_ops"
  done
fi
for part in merge kv decode prefill; do
  timeout 100 "$bin/cuda_bench" copy $part >"$out/bench-$part.txt" 2>&1 || failed=1
  cat "$out/bench-$part.txt"
done
exit $failed
