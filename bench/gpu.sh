#!/usr/bin/env bash
# gpu.sh BUILD OUT: one visit to a machine with GPUs. BUILD is a build folder, or what was carried of one (see
# tests/run_device.sh); OUT takes every output. Runs the device tests, the sanitizer on small cases, every benchmark beside
# its peer in PyTorch, and scaling where there are several GPUs; prints one table last: work, ours, peer, ratio, goal, met
# or not. Exits 1 if anything failed or was wrong.
#     STEPS="tests sanitizer kernels peers exchange scaling" bench/gpu.sh BUILD OUT   # some of them, in this order
#     CONTEXT=131072 BATCH=64 DECODE_CONTEXT=131072 PYTHON=python3 bench/gpu.sh BUILD OUT
set -uo pipefail
build=${1:?usage: gpu.sh BUILD OUT}
out=${2:?usage: gpu.sh BUILD OUT}
here=$(dirname "$0")
python=${PYTHON:-python3}
steps=${STEPS:-tests sanitizer kernels peers exchange scaling}
context=${CONTEXT:-131072} batch=${BATCH:-64} decode_context=${DECODE_CONTEXT:-131072}
mpirun="mpirun --allow-run-as-root --oversubscribe --bind-to none"
failed=0
mkdir -p "$out"

# step NAME SECONDS COMMAND...: runs a command with a time limit, its output to OUT/NAME.txt.
step() {
  local name=$1 limit=$2 status begin=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  case $status in
    0) echo "$name: done in $((SECONDS - begin)) s" ;;
    77) echo "$name: skipped: $(head -n 1 "$out/$name.txt")" ;;
    *)
      echo "$name: FAILED with $status"
      tail -n 25 "$out/$name.txt"
      failed=1
      ;;
  esac
}

# bench NAME RANKS ARGUMENT...: a benchmark of ours; its table goes to the terminal as well.
bench() {
  local name=$1 ranks=$2 start=""
  shift 2
  [ "$ranks" = 1 ] || start="$mpirun -np $ranks"
  rm -f "$out/ours-$name.json"
  step "ours-$name" 150 $start "$build/launcher/cp_attn" bench "$@" --device cuda --result-json "$out/ours-$name.json"
  grep -v "^#" "$out/ours-$name.txt" || true
}

tests() {
  step tests-gpu 300 "$here/../tests/run_device.sh" "$build" gpu
  [ "$gpus" -lt 2 ] || step tests-multigpu 300 "$here/../tests/run_device.sh" "$build" multigpu
}

sanitizer() {
  step sanitizer 300 "$here/../tests/sanitizer_gpu.sh" "$build"
}

kernels() {
  for name in merge kv_write kv_pack attend; do bench $name 1 $name; done
}

peers() {
  rm -f "$out/peer-attend.json"
  step peer-attend 150 "$python" "$here/torch_attend.py" --device cuda --dtype bf16 --heads 32/8 \
    --result-json "$out/peer-attend.json" --shapes "$("$python" "$here/gpu_table.py" peer-shapes)"
  grep -v "^#" "$out/peer-attend.txt" || true
}

exchange() {
  [ "$gpus" -gt 1 ] || return
  bench exchange "$gpus" exchange
}

scaling() {
  [ "$gpus" -gt 1 ] || return
  bench scaling "$gpus" scaling --context "$context" --batch "$batch" --decode-context "$decode_context"
  rm -f "$out/peer-context_parallel.json"
  step peer-context_parallel 150 "$python" -m torch.distributed.run --nproc-per-node "$gpus" \
    "$here/torch_context_parallel.py" --context "$context" --result-json "$out/peer-context_parallel.json"
  grep -v "^#" "$out/peer-context_parallel.txt" || true
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
for name in $steps; do "$name"; done
"$python" "$here/gpu_table.py" "$out" | tee "$out/table.md" || failed=1
exit $failed
