#!/usr/bin/env bash
# Makes the weights that the repository ships: policies/weights/<policy>-b<budget>.safetensors. Everything that is already there is kept, an
# interrupted training continues, so the script can be run again at any time.
#   KVLAB=./kvlab TRACES=12 POLICIES="kvpop_mlp kvpop dms" BUDGETS="512 1024 2048 4096" experiments/train_shipped.sh
set -eu
cd "$(dirname "$0")/.."
kvlab=${KVLAB:-./kvlab}
traces=${TRACES:-10}
folder=${FOLDER:-traces/data}
files=()
mkdir -p "$folder"
for seed in $(seq 2147483648 $((2147483647 + traces))); do
    file=$folder/reasoning-16384-s$seed.h5
    [ -f "$file" ] || "$kvlab" record --model traces/model --corpus reasoning --length 16384 --seed "$seed" --output "$file"
    files+=("$file")
done
for policy in ${POLICIES:-kvpop_mlp kvpop dms}; do
    for budget in ${BUDGETS:-512 1024 2048 4096}; do
        "$kvlab" train --policy "$policy" --budget "$budget" "${files[@]}"
    done
done
