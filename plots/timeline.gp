# Retained set over time, one panel per policy: which share of the tokens (across) is in the cache when a query (up) attends. Extra
# variables: rows_of_head, a file of lines label,layer,kv_head,query_bin,token_bin,kept_share of one budget, layer and KV head; budget, layer, kv_head.
load home . '/style.gp'
file = rows_of_head
stats file using (remember(strcol(1))) nooutput
stats file using 4 nooutput name 'bin'
n_bin = bin_max + 1
columns = words(seen) < 4 ? words(seen) : 4
rows = (words(seen) + columns - 1) / columns
W = 225 * columns + 200; H = 220 * rows + 120; eval begin
set title
unset key
unset colorbox
set xrange [0 : 100]
set yrange [0 : 100]
set xtics 25
set ytics 25
set cbrange [0 : 1]
set cblabel 'share of the tokens in the cache'
left = 70.0 / W; right = 1 - 130.0 / W; bottom = 60.0 / H; top = 1 - 70.0 / H
set multiplot layout rows, columns margins left, right, bottom, top spacing 40.0 / W, 45.0 / H \
    title sprintf('Tokens in the cache, budget %s, layer %s, KV head %s', budget, layer, kv_head)
percent(bin) = 100.0 * (bin + 0.5) / n_bin
half = 62.0 / n_bin # a little overlap: no seams between the cells
do for [i = 1:words(seen)] {
    set title word(seen, i) offset 0, -0.6
    if ((i - 1) % columns == 0) { set ylabel 'query (% of trace)'; set format y '%g' } else { unset ylabel; set format y '' }
    if (i + columns > words(seen)) { set xlabel 'token (% of trace)'; set format x '%g' } else { unset xlabel; set format x '' }
    if (i == words(seen)) { set colorbox user origin right + 25.0 / W, bottom size 15.0 / W, top - bottom }
    plot file using (strcol(1) eq word(seen, i) ? percent(column(5)) : NaN):(percent(column(4))):(half):(half):6 \
        with boxxyerror lc palette fs solid noborder
}
unset multiplot
