#!/usr/bin/env bash
# The tables of the finding from the evaluations in OUT; what is missing shows as –.
#   experiments/finding/table.sh OUT
#   results.csv  run,policy,settings,seed,metric,value      every number that goes into the table
#   table.csv    run,policy,settings,metric,mean,sd,n       over the held-out seeds (sd with n - 1)
#   table.md     the same for reading
#   power.csv    label,power,budget,accuracy                for plots/power.gp: trainings that differ in nothing but the power
#   delay.csv    policy,variant,budget,delay,measure,value  for plots/delay.gp: kvpop trainings that differ in power and delay alone
set -euo pipefail
home=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: table.sh OUT}
runs=${RUNS:-$home/runs.txt}
awk -v out="$out" -v seeds="${HELD_OUT:-1 2 3}" -f "$home/table.awk" "$runs"
