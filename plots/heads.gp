# One number of every KV head, layer by layer: a point per head, a bar at the heads' mean. Extra variables: rows, a file of lines
# label,layer,kv_head,value of one budget; heading, axis.
load home . '/style.gp'
stats rows using (remember(strcol(1))) nooutput
stats rows using 2 nooutput name 'layer'
stats rows using 3 nooutput name 'head'
n = words(seen)
n_layer = layer_max - layer_min + 1
# Policies side by side within a layer, heads of one policy a little apart.
slot = 0.8 / n
x(i, layer) = layer + (i - (n + 1) / 2.0) * slot
apart(head) = head_max > 0 ? (head / head_max - 0.5) * slot * 0.5 : 0
of(i) = strcol(1) eq word(seen, i)
set table $mean # a block of lines "x mean flag" per policy
plot for [i = 1:n] rows using (of(i) ? x(i, column(2)) : NaN):4 smooth unique
unset table
wide = n_layer * n * 14
W = 200 + (wide < 700 ? 700 : wide > 1600 ? 1600 : wide); H = 540; eval begin
set title heading
set xlabel 'layer'
set ylabel axis
set xrange [layer_min - 0.55 : layer_max + 0.55]
set yrange [0 : 1.02]
set xtics scale 0
if (n_layer <= 24) { set xtics 1 } else { set xtics 4 }
set grid noxtics
do for [layer = layer_min + 1 : layer_max] {
    set arrow from layer - 0.5, graph 0 to layer - 0.5, graph 1 nohead lc rgb '#D0D0D0' back
}
plot for [i = 1:n] $mean using (real(word(strcol(1), 1))):(real(word(strcol(1), 2))):(slot * 0.4):(0.005) index i - 1 \
         with boxxyerror lc rgb okabe_ito[(i - 1) % 8 + 1] fs solid 0.45 noborder notitle, \
     for [i = 1:n] rows using (of(i) ? x(i, column(2)) + apart(column(3)) : NaN):4 with points lt i title word(seen, i), \
     NaN with lines lw 4 dt 1 lc rgb '#B8B8B8' title 'mean of the heads'
