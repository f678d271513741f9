# Share of the cells evicted at the end by kind of token, one panel for the tokens of the pattern and one for all (sinks excepted); thin
# dashes: the base rate over all kinds. Extra variables: rows, a file of lines label,tokens,kind,n_token,evict_rate,base_rate of one
# budget; budget.
load home . '/style.gp'
stats rows using (remember(strcol(1))) nooutput
labels = seen
n = words(labels)
seen = ''
stats rows using (remember(strcol(3))) nooutput
kinds = seen
W = 1008 + legend(labels); H = 480; eval begin
array range[2] = ['last', 'all']
array heading[2] = ['the last 112 tokens before the window', 'all tokens before the window']
set multiplot layout 1, 2 margins 72.0 / W, 1008.0 / W, 0.1, 0.84 spacing 36.0 / W, 0 \
    title sprintf('Evicted at the end by kind of token, budget %s', budget)
set yrange [0 : 1.03]
set ytics 0.2
set xrange [0.4 : words(kinds) + 0.6]
set xtics scale 0 ()
do for [k = 1:words(kinds)] { set xtics add (word(kinds, k) k) }
set grid noxtics
set ylabel 'evicted (share of token, layer, KV head)'
slot = 0.7 / n
of(i, r) = strcol(1) eq word(labels, i) && strcol(2) eq range[r]
index_of(kind) = sum [k = 1:words(kinds)] (kind eq word(kinds, k) ? k : 0)
x(i) = index_of(strcol(3)) + (i - (n + 1) / 2.0) * slot
do for [r = 1:2] {
    set title heading[r]
    if (r == 2) { unset ylabel; set format y ''; set key at screen 1026.0 / W, 0.86 left top } else { unset key }
    plot for [i = 1:n] rows using (of(i, r) ? x(i) : NaN):5 with points lt i ps 1.2 title word(labels, i), \
         for [i = 1:n] rows using (of(i, r) ? 0.4 : NaN):6:(words(kinds) + 0.2):(0) with vectors nohead lt i lw 0.8 dt 2 notitle, \
         NaN with lines lc rgb '#606060' lw 0.8 dt 2 title 'base rate'
}
unset multiplot
