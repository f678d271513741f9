#!/usr/bin/env bash
# Runs the Criterion tests and compares how many ran with tests/census: Criterion can drop tests silently. Usage: run.sh KVTESTS
# The runner's own summary line is the last output of a good run.
set -uo pipefail
here=$(dirname "$0")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$1" --timeout 600 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
ran=$(sed -n 's/.*Tested: .*\b\([0-9][0-9]*\).*Passing.*/\1/p' "$log" | tail -1)
wanted=$(cat "$here/census")
if [ "${ran:-none}" != "$wanted" ]; then
    echo "test census: ${ran:-none} tests ran, tests/census says $wanted; a test was lost, or correct the number" >&2
    exit 1
fi
exit "$status"
