# Retention recall of every layer and KV head at one budget; a group of columns per policy. Extra variables:
# rows, a file of lines label,layer,kv_head,value of one budget; budget.
load home . '/style.gp'
W = 1000; H = 540; eval begin
stats rows using (remember(strcol(1))) nooutput
stats rows using 3:2 nooutput name 'at'
n_head = int(at_max_x) + 1
step = n_head + 0.5
set title 'Retention recall by layer and KV head, budget ' . budget
set xlabel sprintf('policy (one column per KV head, 0 to %d)', n_head - 1)
set ylabel 'layer'
set cblabel 'recall (share of the oracle''s long-range keys)'
set cbrange [0 : 1]
set xrange [-0.75 : (words(seen) - 1) * step + n_head - 0.25]
set yrange [at_max_y + 0.5 : at_min_y - 0.5]
set ytics 1
if (at_max_y - at_min_y > 20) { set ytics 4 }
unset xtics
set xtics scale 0 ()
do for [i = 1:words(seen)] {
    set xtics add (word(seen, i) ((i - 1) * step + (n_head - 1) / 2.0))
}
if (words(seen) > 5) { set xtics rotate by -25 }
unset grid
unset key
set border 0
x(i) = strcol(1) eq word(seen, i) ? (i - 1) * step + column(3) : NaN
numbers = words(seen) * n_head <= 24 && at_max_y - at_min_y < 16
plot for [i = 1:words(seen)] rows using (x(i)):2:(0.5):(0.5):4 with boxxyerror lc palette fs solid noborder, \
     for [i = 1:(numbers ? words(seen) : 0)] rows using (x(i)):2:(sprintf('%.2f', column(4))):(column(4) < 0.55 ? 0xFFFFFF : 0) \
         with labels tc rgb variable font font . ',8'
