#!/usr/bin/env bash
# Takes the worked example "Adding a policy" out of README.md, puts it into a copy of the tree, builds it there and runs it.
# Usage: tests/readme_example.sh TRACE [BUILD]   (TRACE: any small trace; BUILD: a finished build folder to start from)
set -euo pipefail
top=$(cd "$(dirname "$0")/.." && pwd)
trace=$(realpath "$1")
build=$(realpath "${2:-$top/build}")
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$top" && tar cf - --exclude=./build* --exclude=./results --exclude=./traces/data --exclude=./.git .) | tar xf - -C "$copy"
mkdir "$copy/build"
cp -a "$build"/. "$copy/build"
awk '/^`policies\/fading.c`:/ {want = 1} want && /^```c$/ {inside = 1; next} inside && /^```$/ {exit} inside' \
    "$top/README.md" >"$copy/policies/fading.c"
line=$(awk '/^and in `policies\/policies.def`:/ {want = 1} want && /^```text$/ {inside = 1; next}
            inside && /^```$/ {exit} inside' "$top/README.md")
[ -s "$copy/policies/fading.c" ] && [ -n "$line" ] || { echo "README.md holds no worked example" >&2; exit 1; }
echo "$line" >>"$copy/policies/policies.def"
cd "$copy"
make -s kvlab
./kvlab policies | grep -q '^ *fading' || { echo "kvlab policies does not list the example" >&2; exit 1; }
./kvlab experiment --trace "$trace" --policy fading:decay=0.9 --budget 300 --output "$copy/run" -q >"$copy/table"
grep -q fading "$copy/table" && grep -q '"variant": *"decay=0.9"' "$copy/run/summary.json"
echo "README example: built and run"
