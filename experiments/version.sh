#!/usr/bin/env bash
# Prints kv_build.h: commit and checksums of the sources that a build is made from. Usage: version.sh FLAGS
set -eu
commit=$(git rev-parse HEAD 2>/dev/null || echo unknown)
dirty=false
[ -z "$(git status --porcelain --untracked-files=no 2>/dev/null)" ] || dirty=true
sum() { cat "$@" 2>/dev/null | sha256sum | cut -c1-16; }
shopt -s nullglob
sources=$(sum reference/core/*.[ch] reference/*.[ch] policies/*.[ch] policies/*.def traces/*.[ch] experiments/*.[ch] kernels/*.[ch] kernels/*.cu*)
attention=$(sum reference/core/*.[ch] reference/*.[ch] kernels/*.[ch] kernels/*.cu*)
cat <<END
#define KV_BUILD_COMMIT "$commit"
#define KV_BUILD_DIRTY $dirty
#define KV_BUILD_FLAGS "$1"
#define KV_BUILD_SOURCES "$sources"
#define KV_BUILD_ATTENTION_SOURCES "$attention"
END
