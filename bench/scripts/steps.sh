# What gpu.sh and llama.sh run their commands with, and source: $program is run, and $out takes every output. Sets failed to 1
# once a step fails.
# shellcheck shell=bash disable=SC2034,SC2154 # the script that reads this sets program and out, and reads failed
failed=0
mkdir -p "$out"

# step NAME SECONDS COMMAND...: runs a command with a time limit, its output to OUT/NAME.txt.
step() {
  local name=$1 limit=$2 status begin=$SECONDS
  shift 2
  rm -f "$out/$name.json"
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  case $status in
    0) echo "$name: done in $((SECONDS - begin)) s" ;;
    77) echo "$name: skipped: $(head -n 1 "$out/$name.txt")" ;;
    *)
      echo "$name: FAILED with $status after $((SECONDS - begin)) s"
      tail -n 25 "$out/$name.txt"
      failed=1
      ;;
  esac
}

# program_step NAME SECONDS RANKS ARGUMENT...: a step of the program, under mpirun if it has several ranks.
program_step() {
  local name=$1 limit=$2 ranks=$3 start=()
  shift 3
  [ "$ranks" = 1 ] || start=(mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$ranks")
  step "$name" "$limit" "${start[@]}" "$program" "$@" --result-json "$out/$name.json"
}
