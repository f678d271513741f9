# Retention recall of every layer and KV head at one budget; a group of columns per policy. Extra variable: budget.
load home . '/style.gp'
W = 1000; H = 540; eval begin
file = folder . '/metrics.csv'
# Columns: trace,layer,kv_head,policy,variant,budget,seed,metric,value,n
wanted(dummy) = strcol(8) eq 'recall' && strcol(6) eq budget && strcol(3) ne 'all' && valid(9)
label(dummy) = label_of(strcol(4), strcol(5))
stats file using (wanted(0) ? remember(label(0)) : 0) nooutput
stats file using (wanted(0) ? column(3) : NaN):(wanted(0) ? column(2) : NaN) nooutput name 'at'
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
x(i) = wanted(0) && label(0) eq word(seen, i) ? (i - 1) * step + column(3) : NaN
numbers = words(seen) * n_head <= 24 && at_max_y - at_min_y < 16
plot for [i = 1:words(seen)] file using (x(i)):2:(0.5):(0.5):9 with boxxyerror lc palette fs solid noborder, \
     for [i = 1:(numbers ? words(seen) : 0)] file using (x(i)):2:(sprintf('%.2f', column(9))):(column(9) < 0.55 ? 0xFFFFFF : 0) \
         with labels tc rgb variable font font . ',8'
