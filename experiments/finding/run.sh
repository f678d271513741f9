#!/usr/bin/env bash
# The finding: which target, which queries and which scorer make a learned cache lossless? Trains every line of runs.txt on the same
# traces, evaluates it on held-out traces, and writes OUT/table.md, OUT/table.csv, OUT/results.csv and pictures (README.md says how to
# read them).
#   experiments/finding/run.sh [OUT]          OUT defaults to results/finding
# Whatever exists is kept and an interrupted training continues, so the same command goes on after any stop. Settings, from the
# environment; those of the first four lines may not change within one OUT:
LENGTH=${LENGTH:-16384} BUDGET=${BUDGET:-2048}     # tokens of a trace; cache entries per KV head
TRAIN_TRACES=${TRAIN_TRACES:-10} STEPS=${STEPS:-300} # training traces, seeds from 2^31; one trace a step
HELD_OUT=${HELD_OUT:-1 2 3}                        # seeds of the traces that are evaluated (below 2^31)
DEVICE=${DEVICE:-cpu}                              # cpu or gpu
JOBS=${JOBS:-1}                                    # runs at the same time
THREADS_PER_RUN=${THREADS_PER_RUN:-$((($(nproc) + JOBS - 1) / JOBS))}
RUNS=${RUNS:-experiments/finding/runs.txt} KVLAB=${KVLAB:-./kvlab}
REFERENCES=streaming,keydiff,oracle,oracle:power=1.5,oracle:power=2,oracle:power=4,oracle:power=max
set -euo pipefail
start=$PWD
cd "$(dirname "$0")/../.."
OUT=${1:-results/finding}
[ $# -eq 0 ] || OUT=$(cd "$start" && realpath -m "$1")
case $OUT in *[[:blank:]]*)
    echo "run.sh: '$OUT' holds a blank, which the list of runs cannot carry; name another folder" >&2
    exit 64
    ;;
esac
mkdir -p "$OUT"/{weights,evaluations,targets,log} traces/data
export LENGTH BUDGET TRAIN_TRACES STEPS DEVICE THREADS_PER_RUN KVLAB OUT REFERENCES

settings="length=$LENGTH budget=$BUDGET train_traces=$TRAIN_TRACES steps=$STEPS held_out=$HELD_OUT device=$DEVICE"
if [ -f "$OUT/settings" ] && [ "$(cat "$OUT/settings")" != "$settings" ]; then
    echo "run.sh: $OUT was begun with: $(cat "$OUT/settings")" >&2
    echo "run.sh: now the settings are: $settings; restore them or name another folder" >&2
    exit 64
fi
echo "$settings" >"$OUT/settings"

trace() { echo "traces/data/reasoning-$LENGTH-s$1.h5"; }
training_traces() { for i in $(seq 0 $((TRAIN_TRACES - 1))); do trace $((2147483648 + i)); done; }

# step NAME FILE COMMAND…: runs the command unless FILE exists; its words go to log/NAME.
step() {
    local name=$1 file=$2 log="$OUT/log/$1"
    shift 2
    [ ! -e "$file" ] || return 0
    SECONDS=0
    if "$@" >"$log" 2>&1; then
        echo "$name: $SECONDS s" >&2
    else
        echo "run.sh: $name failed (whole output in $log):" >&2
        tail -n 3 "$log" >&2
        return 255 # xargs starts nothing more
    fi
}
record() {
    step "record-$1" "$(trace "$1")" "$KVLAB" record -q --threads "$THREADS_PER_RUN" --device "$DEVICE" --model traces/model \
        --corpus reasoning --length "$LENGTH" --seed "$1" --output "$(trace "$1")"
}
# train FILE POLICY SETTINGS…
train() {
    local file=$1 policy=$2 set=() s
    shift 2
    for s in steps="$STEPS" "$@"; do set+=(--set "$policy.$s"); done
    mapfile -t traces < <(training_traces)
    step "train-$(basename "$file" .safetensors)" "$file" "$KVLAB" train -q --threads "$THREADS_PER_RUN" --device "$DEVICE" \
        --policy "$policy" --budget "$BUDGET" "${set[@]}" --output "$file" --trace "${traces[@]}"
}
# evaluate NAME SEED POLICIES [OPTIONS…]
evaluate() {
    local name=$1 seed=$2 policies=$3
    shift 3
    step "evaluate-$name-s$seed" "$OUT/evaluations/$name-s$seed" "$KVLAB" experiment -q --threads "$THREADS_PER_RUN" \
        --device "$DEVICE" --model traces/model --trace "$(trace "$seed")" --policy "$policies" --budget "$BUDGET" "$@" \
        --output "$OUT/evaluations/$name-s$seed"
}
# One line of what to do: a function and its words.
task() { read -ra words <<<"$1" && "${words[@]}"; }
export -f trace training_traces step record train evaluate task
# shellcheck disable=SC2016
pool() { xargs -d '\n' -n 1 -P "$JOBS" bash -c 'task "$1"' task || exit 1; }

runs() { grep -Ev '^(#|=|$)' "$RUNS"; }
{ seq 2147483648 $((2147483647 + TRAIN_TRACES)); tr ' ' '\n' <<<"$HELD_OUT"; } | sed 's/^/record /' | pool

# Trainings that run side by side would all compute the same targets: one step with each power leaves them in the cache.
if [ "$JOBS" -gt 1 ]; then
    { echo 2; runs | sed -n 's/.*power=\([^ ]*\).*/\1/p; s/.*paper=1.*/1/p'; } | sort -u |
        sed "s|.*|train $OUT/targets/power&.safetensors kvpop_mlp power=& steps=1|" | pool
fi
# The longest first, so that the last hour is not one run's.
{ runs | awk '$2 == "kvpop"'; runs | awk '$2 != "kvpop"'; } |
    awk -v out="$OUT" '{ file = out "/weights/" $1 ".safetensors"; $1 = "train " file; print }' | pool
{
    for seed in $HELD_OUT; do
        echo "evaluate reference $seed $REFERENCES"
        runs | awk -v out="$OUT" -v seed="$seed" '{ print "evaluate", $1, seed, $2, "--weights", $2 "=" out "/weights/" $1 ".safetensors" }'
    done
} | pool
HELD_OUT=$HELD_OUT RUNS=$RUNS experiments/finding/table.sh "$OUT"
plots/draw.sh "$OUT"
echo "$OUT/table.md"
