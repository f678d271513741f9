#!/usr/bin/env bash
# Runs a sanitizer build of the tests. A leak inside a Criterion test does not fail it, so any report file fails the run.
# Usage: run_sanitized.sh KVTESTS [criterion options]
set -uo pipefail
log=$(dirname "$1")/sanitizer
rm -f "$log".* "$log-run"
export ASAN_OPTIONS=log_path=$log:detect_leaks=1:abort_on_error=0 UBSAN_OPTIONS=log_path=$log:print_stacktrace=1
"$@" --timeout 1800 2>&1 | tee "$log-run"
status=${PIPESTATUS[0]}
if ! grep -q 'Tested: .*[1-9].* | Passing' "$log-run"; then
    echo "no test ran: the filter matches none" >&2
    exit 1
fi
reports=("$log".*)
if [ -e "${reports[0]}" ]; then
    echo "sanitizer reports:" "${reports[@]}" >&2
    head -60 "${reports[0]}" >&2
    exit 1
fi
exit $status
