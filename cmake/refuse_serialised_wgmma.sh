#!/bin/sh
# refuse_serialised_wgmma.sh COMMAND...: runs a compiler; fails if it reports that wgmma instructions were serialised,
# which ptxas only notes although it halves their speed.
log=$(mktemp)
"$@" >"$log" 2>&1
status=$?
cat "$log" >&2
if grep -q 'wgmma.mma_async instructions are serialized' "$log"; then status=1; fi
rm -f "$log"
exit $status
