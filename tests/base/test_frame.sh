#!/usr/bin/env bash
# What the frame of test programs (tests/fixtures/unit.h) does with its arguments and says of what fails.
#     test_frame.sh PROGRAM    PROGRAM: frame_sample
set -uo pipefail
program=$1

fail() {
    echo "test_frame.sh: $*" >&2
    exit 1
}

# Runs the program with the arguments; the exit code has to be the first.
expect() { # CODE ARGUMENT...
    local code=0
    output=$("$program" "${@:2}" 2>&1) || code=$?
    [ "$code" = "$1" ] || fail "'${*:2}' ended with $code, expected $1: $output"
}

says() { # TEXT
    grep -qF -- "$1" <<<"$output" || fail "no '$1' in: $output"
}

expect 0 --list
[ "$output" = $'counts to three\nmiscounts' ] || fail "--list: $output"
expect 0 three
says "Test: counts to three ...passed"
! grep -q "Test: miscounts" <<<"$output" || fail "a test ran that was not asked for"
expect 0 --but miscounts
says "Test: counts to three ...passed"
! grep -q "Test: miscounts" <<<"$output" || fail "a test ran that --but names"
expect 2 --but three miscounts
expect 1
expect 1 miscounts
says "wrong == 0: found 7, expected 0"
says "error <= 1e-5: found 0.25, expected <= 1e-05"
says '"one" == "two": found one, expected two'
says "-1 == most: found -1, expected 18446744073709551615"
says "found nan, expected 1"
says "wrong == 8: found 7, expected 8"
! grep -q "expected 9" <<<"$output" || fail "a test went on behind a fatal assertion"
for wrong in none --none; do
    expect 2 $wrong
    [ "$(wc -l <<<"$output")" = 1 ] || fail "more than a line: $output"
    says "$wrong"
done
expect 2 three counts
