#!/usr/bin/env bash
# Draws every picture whose data lie in FOLDER into FOLDER/plots, as SVG, PNG and PDF. Fails when gnuplot fails.
#   plots/draw.sh FOLDER [FORMAT…]
# Pictures of one budget take the first of metrics.csv, or BUDGET=; the retained set is drawn for the layer and KV head with most
# retrievals, or LAYER= and KV_HEAD=. Evict ratios are drawn when they differ between heads.
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
trap 'rm -f "$temporary" "$temporary.2"' EXIT
count=0

# A text in gnuplot's single quotes.
quote() { printf "'%s'" "${1//\'/\'\'}"; }

# draw NAME FORMAT… : settings in $extra; the script is $script.gp where it is not NAME.gp
script=""
draw() {
    local name=$1 format
    shift
    mkdir -p "$pictures"
    for format in "$@"; do
        if ! gnuplot -e "home=$(quote "$home"); folder=$(quote "$folder"); format='$format'; out=$(quote "$pictures/$name.$format"); $extra" \
            "$home/${script:-$name}.gp"; then
            rm -f "$pictures/$name.$format"
            echo "draw.sh: gnuplot failed on $home/${script:-$name}.gp with the data of $folder" >&2
            exit 70
        fi
    done
    count=$((count + 1))
}

# A defined number of metric $2 in file $1; fields are counted from the end ($3), where no quoted text can be.
has() { [ -f "$folder/$1" ] && awk -F, -v m="$2" -v f="$3" '$(NF - f - 1) == m && $(NF - f) != "" { found = 1; exit } END { exit !found }' "$folder/$1"; }

# Lines of one budget as label,last fields, for gnuplot: rows FILE BUDGET N [FIRST [METRIC]]. N fields follow the budget; the policy is
# field FIRST. With METRIC: the lines of metrics.csv for this metric and single heads, as label,layer,kv_head,value. The label is
# policy:variant; of the policy file without its path, unless two files would then be called alike (plot_data.c does the same).
rows() {
    [ -f "$folder/$1" ] || return 1
    awk -F, -v b="$2" -v n="$3" -v first="${4:-1}" -v metric="${5:-}" '
        function variant(   v, i) {
            for (i = first + 1; i < NF - n; i++) v = v (i > first + 1 ? ";" : "") $i
            gsub(/"/, "", v)
            return v
        }
        function short(v) { return v ~ /^path=/ ? "" : substr(v, 1, index(v ":path=", ":path=") - 1) }
        FNR == 1 { next }
        NR == FNR {
            if ($first == "file" && !((v = variant()) in seen)) { seen[v] = 1; named[short(v)]++ }
            next
        }
        $(NF - n) == b && (metric == "" || ($(NF - 2) == metric && $3 != "all" && $(NF - 1) != "")) {
            v = variant()
            if ($first == "file" && named[short(v)] == 1) v = short(v)
            line = $first (v == "" ? "" : ":" v)
            if (metric != "") line = line "," $2 "," $3 "," $(NF - 1)
            else for (i = NF - n + 1; i <= NF; i++) line = line "," $i
            print line
        }' "$folder/$1" "$folder/$1" >"$temporary"
    [ -s "$temporary" ]
}

# How many others lie above each curve or point where it meets them, in the order of the first lines "label,panel,x,y" on stdin: what
# lies below is drawn larger, so that it shows. Those later in the order lie above; to meet is to differ by less than dx and dy, in
# `least` places: depths DX DY LEAST.
depths() {
    awk -F, -v dx="$1" -v dy="$2" -v least="$3" '
        function near(a, b, d) { return a - b < d && b - a < d }
        !($1 in at) { at[$1] = ++n_label }
        { label[NR] = at[$1]; panel[NR] = $2; x[NR] = $3; y[NR] = $4 }
        END {
            for (i = 1; i <= NR; i++)
                for (j = 1; j <= NR; j++)
                    if (label[i] < label[j] && panel[i] == panel[j] && near(x[i], x[j], dx) && near(y[i], y[j], dy))
                        above[label[i], label[j]]++
            for (i = n_label; i > 0; i--)
                for (j = i + 1; j <= n_label; j++)
                    if (above[i, j] >= least && depth[j] + 1 > depth[i]) depth[i] = depth[j] + 1
            for (i = 1; i <= n_label; i++) printf "%s%d", (i > 1 ? " " : ""), depth[i]
        }'
}
# Settings for gnuplot from the same lines: one place calls for larger marks, a stretch (two places) for a wider line too.
both_depths() {
    local lines
    lines=$(cat)
    printf "depth='%s'; stretch='%s'" "$(depths "$1" "$2" 1 <<<"$lines")" "$(depths "$1" "$2" 2 <<<"$lines")"
}
curve_depths() { awk -F, -v m="$1" '$(NF - 1) == m && $NF != "" { print $1 ",," log($(NF - 2)) "," $NF }' "$folder/curve.csv" | both_depths 0.02 0.008; }

first_budget() { awk -F, -v n="$2" 'NR == 2 { print $(NF - n) }' "$folder/$1" 2>/dev/null || true; }

if [ -n "${BUDGET:-}" ] && [ -f "$folder/metrics.csv" ]; then
    run=$(awk -F, 'NR > 1 && !seen[$(NF - 4)]++ { print $(NF - 4) }' "$folder/metrics.csv" | sort -n)
    if ! grep -qxF -- "$BUDGET" <<<"$run"; then
        echo "draw.sh: $folder has no budget $BUDGET; it has ${run//$'\n'/, }" >&2
        exit 65
    fi
fi

extra=""
if has curve.csv recall_mean 0; then
    extra=$(curve_depths recall_mean)
    draw recall "$@"
fi
if has curve.csv accuracy_recall 0; then
    extra=$(curve_depths accuracy_recall)
    draw accuracy "$@"
    if has curve.csv retained_mass 0; then
        extra=$(awk -F, 'NR > 1 && $NF != "" { for (i = 1; i < 4; i++) if ($(NF - i) != "") print $1 "," i "," $(NF - i) "," $NF }' \
            "$folder/points.csv" | both_depths 0.015 0.015)
        draw correlation "$@"
    fi
fi
if [ -f "$folder/power.csv" ] && [ "$(awk -F, 'NR > 1 && $4 != "" { print $2 }' "$folder/power.csv" | sort -u | wc -l)" -gt 1 ]; then
    extra=$(awk -F, 'NR > 1 && $4 != "" { print $1 " " $3 ",," ($2 == "max" ? 99 : log($2)) "," $4 }' "$folder/power.csv" | both_depths 0.02 0.008)
    draw power "$@"
fi

if has metrics.csv recall 1; then
    budget=${BUDGET:-$(awk -F, '$(NF-2) == "recall" && $(NF-1) != "" { print $(NF-4); exit }' "$folder/metrics.csv")}
    if rows metrics.csv "$budget" 4 4 recall; then
        extra="rows='$temporary'; budget=$(quote "$budget")"
        draw heatmap "$@"
    fi
fi

if [ -f "$folder/timeline.csv" ] && [ "$(head -n 2 "$folder/timeline.csv" | wc -l)" = 2 ]; then
    budget=${BUDGET:-${budget:-$(awk -F, 'NR == 2 { print $(NF-5) }' "$folder/timeline.csv")}}
    # trace,layer,kv_head,…,metric,value,n: a trace's name may hold a comma, so the layer is looked for only where it is plain
    read -r layer kv_head < <(
        { [ ! -f "$folder/metrics.csv" ] || awk -F, '$(NF-2) == "retrieval_hit" && $3 != "all" && $NF > most { most = $NF; at = $2 " " $3 } END { if (at) print at }' "$folder/metrics.csv"
          awk -F, 'NR == 2 { print $(NF-4), $(NF-3) }' "$folder/timeline.csv"; } | head -n 1)
    layer=${LAYER:-$layer}
    kv_head=${KV_HEAD:-$kv_head}
    rows timeline.csv "$budget" 5 || true
    awk -F, -v l="$layer" -v h="$kv_head" '$2 == l && $3 == h' "$temporary" >"$temporary.2"
    mv "$temporary.2" "$temporary"
    if [ ! -s "$temporary" ]; then
        echo "draw.sh: $folder/timeline.csv has no budget $budget, layer $layer, KV head $kv_head" >&2
        exit 65
    fi
    extra="rows_of_head='$temporary'; budget=$(quote "$budget"); layer=$(quote "$layer"); kv_head=$(quote "$kv_head")"
    draw timeline "$@"
fi

budget=${BUDGET:-${budget:-$(first_budget delay.csv 3)}}
common="rows='$temporary'; budget=$(quote "$budget")"
if rows metrics.csv "$budget" 4 4 recall_own; then
    script=heads extra="$common; heading='Recall of the policy''s own target by layer and KV head, budget '.budget; axis='recall (share of the target''s long-range keys)'"
    draw recall_heads "$@"
fi
if rows evict_ratio.csv "$budget" 3 && awk -F, '$1 in seen && $4 != seen[$1] { ragged = 1; exit } { seen[$1] = $4 } END { exit !ragged }' "$temporary"; then
    script=heads extra="$common; heading='Evicted at the end by layer and KV head, budget '.budget; axis='evicted (share of the tokens that may leave)'"
    draw evict_ratio "$@"
fi
script=""
if rows pattern.csv "$budget" 4; then
    n_head=$(awk -F, 'NR > 1 && $(NF - 1) + 1 > n { n = $(NF - 1) + 1 } END { print n + 0 }' "$folder/evict_ratio.csv")
    # Kinds in a fixed order, so that a colour means the same in every picture: those of contract.md 4, then others by name.
    kinds=$(awk -F, 'BEGIN { n = split("special value scratch name structure filler equation", known, " ")
                             for (i = 1; i <= n; i++) { at[known[i]] = i; print i "," known[i] } }
                     !($4 in at) { at[$4] = ++n; print "9," $4 }' "$temporary" | sort -t, -k1,1n -k2 | cut -d, -f2 | awk '{ printf " \"%s\"", $0 }')
    extra="$common; n_head=$n_head; kinds=$(quote "$kinds")"
    draw pattern "$@"
fi
extra=$common
if rows evict_kind.csv "$budget" 5; then draw evict_kind "$@"; fi
if rows delay.csv "$budget" 3; then
    # label,delay,measure,value -> label with its delay,measure,value
    awk -F, '$4 != "" { print $1 ($2 > 0 ? " (delay " $2 ")" : " (no delay)") "," $3 "," $4 }' OFS=, "$temporary" >"$temporary.2"
    mv "$temporary.2" "$temporary"
    if [ -s "$temporary" ]; then draw delay "$@"; fi
fi
if [ "$count" = 0 ]; then
    echo "draw.sh: $folder holds no defined values to draw (metrics are empty when nothing was evicted)" >&2
else
    echo "$count pictures in $pictures" >&2
fi
