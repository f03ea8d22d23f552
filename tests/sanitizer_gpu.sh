#!/bin/bash
# The device code under compute-sanitizer: memcheck, racecheck and synccheck of every path of attend, of merge, kv_write
# and kv_pack, and of the tests of the other operations and of quantised caches; memcheck of the transports between two
# ranks and of the program. Prints a line for each; exits 1 if one finds something, 77 without a device or the tool.
#
#     tests/sanitizer_gpu.sh BUILD_FOLDER [TOOL...]
set -u
PATH=$PATH:/usr/local/cuda/bin
build=${1:?the folder of the build}
shift
tools=${*:-memcheck racecheck synccheck}
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
limit=${SANITIZER_TIMEOUT:-300} # seconds for each line

skip() {
    echo "skipped: $1"
    exit 77
}
command -v "$sanitizer" >/dev/null || skip "no $sanitizer"
CPATTN_TEST_DEVICE=cuda timeout 60 "$build/tests/test_self_test_kernels" --small >/dev/null 2>&1
[ $? -ne 77 ] || skip "no CUDA device"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
failures=0

# check TOOL NAME COMMAND...: one line with the outcome; what the tool found goes below it.
check() {
    local tool=$1 name=$2 begin=$SECONDS code
    shift 2
    timeout "$limit" "$@" >"$log" 2>&1
    code=$?
    if [ $code -eq 0 ] && ! grep -qE 'ERROR SUMMARY: [1-9]|RACECHECK SUMMARY: [1-9]' "$log"; then
        printf '%-10s %-24s clean, %d s\n' "$tool" "$name" $((SECONDS - begin))
    else
        printf '%-10s %-24s FAILED, exit code %d\n' "$tool" "$name" $code
        tail -n 30 "$log"
        failures=$((failures + 1))
    fi
}

mpirun=(mpirun --allow-run-as-root --oversubscribe --bind-to none)
for tool in $tools; do
    run=("$sanitizer" --tool "$tool" --error-exitcode 99)
    check "$tool" "kernels" env CPATTN_TEST_DEVICE=cuda "${run[@]}" "$build/tests/test_self_test_kernels" --small
    check "$tool" "test_varlen" env CPATTN_TEST_DEVICE=cuda "${run[@]}" "$build/tests/test_varlen" short
    for name in test_kv test_merge test_synthesize test_quant; do
        check "$tool" "$name" env CPATTN_TEST_DEVICE=cuda "${run[@]}" "$build/tests/$name"
    done
    [ "$tool" = memcheck ] || continue
    # The transports ask CUDA for what may be refused and go on: errors of calls are not reported there.
    check "$tool" "peer memory, 2 ranks" env CPATTN_TEST_DEVICE=cuda "${mpirun[@]}" -np 2 "${run[@]}" \
        --report-api-errors no "$build/tests/test_device_transport"
    check "$tool" "the program" "${run[@]}" --target-processes all "$build/main/cp_attn" --device cuda \
        --requests 2 --input-len 200 --output-len 4 --verify 0.05
done
[ $failures -eq 0 ]
