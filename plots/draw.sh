#!/usr/bin/env bash
# Draws every picture whose data lie in FOLDER into FOLDER/plots, as SVG, PNG and PDF. Fails when gnuplot fails.
#   plots/draw.sh FOLDER [FORMAT…]
# Pictures of one budget take the first of metrics.csv, or BUDGET=; the retained set is drawn for the layer and KV head with most
# retrievals, or LAYER= and KV_HEAD=.
set -euo pipefail
home=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 1 ] || [ ! -d "$1" ]; then
    echo "draw.sh: ${1:-FOLDER} is not a folder of results; usage: plots/draw.sh FOLDER [svg|png|pdf…]" >&2
    exit 64
fi
folder=$1
shift
[ $# -gt 0 ] || set -- svg png pdf
for format in "$@"; do
    case $format in svg | png | pdf) ;; *)
        echo "draw.sh: '$format' is none of svg, png, pdf" >&2
        exit 64
        ;;
    esac
done
pictures=$folder/plots
temporary=$(mktemp)
trap 'rm -f "$temporary"' EXIT
count=0

# A text in gnuplot's single quotes.
quote() { printf "'%s'" "${1//\'/\'\'}"; }

# draw NAME FORMAT… : settings in $extra
draw() {
    local name=$1 format
    shift
    mkdir -p "$pictures"
    for format in "$@"; do
        if ! gnuplot -e "home=$(quote "$home"); folder=$(quote "$folder"); format='$format'; out=$(quote "$pictures/$name.$format"); $extra" \
            "$home/$name.gp"; then
            rm -f "$pictures/$name.$format"
            echo "draw.sh: gnuplot failed on $home/$name.gp with the data of $folder" >&2
            exit 70
        fi
    done
    count=$((count + 1))
}

# A defined number of metric $2 in file $1; fields are counted from the end ($3), where no quoted text can be.
has() { [ -f "$folder/$1" ] && awk -F, -v m="$2" -v f="$3" '$(NF - f - 1) == m && $(NF - f) != "" { found = 1; exit } END { exit !found }' "$folder/$1"; }

extra=""
if has curve.csv recall_mean 0; then draw recall "$@"; fi
if has curve.csv accuracy_recall 0; then
    draw accuracy "$@"
    if has curve.csv retained_mass 0; then draw correlation "$@"; fi
fi

if has metrics.csv recall 1; then
    budget=${BUDGET:-$(awk -F, '$(NF-2) == "recall" && $(NF-1) != "" { print $(NF-4); exit }' "$folder/metrics.csv")}
    extra="budget=$(quote "$budget")"
    draw heatmap "$@"
fi

if [ -f "$folder/timeline.csv" ] && [ "$(head -n 2 "$folder/timeline.csv" | wc -l)" = 2 ]; then
    budget=${BUDGET:-${budget:-$(awk -F, 'NR == 2 { print $(NF-5) }' "$folder/timeline.csv")}}
    # trace,layer,kv_head,…,metric,value,n: a trace's name may hold a comma, so the layer is looked for only where it is plain
    read -r layer kv_head < <(
        { [ ! -f "$folder/metrics.csv" ] || awk -F, '$(NF-2) == "retrieval_hit" && $3 != "all" && $NF > most { most = $NF; at = $2 " " $3 } END { if (at) print at }' "$folder/metrics.csv"
          awk -F, 'NR == 2 { print $(NF-4), $(NF-3) }' "$folder/timeline.csv"; } | head -n 1)
    layer=${LAYER:-$layer}
    kv_head=${KV_HEAD:-$kv_head}
    awk -F, -v b="$budget" -v l="$layer" -v h="$kv_head" '$(NF-5) == b && $(NF-4) == l && $(NF-3) == h' "$folder/timeline.csv" >"$temporary"
    if [ ! -s "$temporary" ]; then
        echo "draw.sh: $folder/timeline.csv has no budget $budget, layer $layer, KV head $kv_head" >&2
        exit 65
    fi
    extra="rows_of_head='$temporary'; budget=$(quote "$budget"); layer=$(quote "$layer"); kv_head=$(quote "$kv_head")"
    draw timeline "$@"
fi
if [ "$count" = 0 ]; then
    echo "draw.sh: $folder holds no defined values to draw (metrics are empty when nothing was evicted)" >&2
else
    echo "$count pictures in $pictures" >&2
fi
