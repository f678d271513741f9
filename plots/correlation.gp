# Metric against accuracy, one point per policy and budget, with Spearman's rank correlation over all points.
# Extra variables: depth, stretch, see style.gp.
load home . '/style.gp'
file = folder . '/points.csv'
both(c) = valid(c) && valid(8)
stats file using (valid(8) ? remember(strcol(1)) : 0) nooutput
W = 1008 + legend(seen); H = 460; eval begin
array name[3] = ['recall_mean', 'retrieval_hit', 'retained_mass']
array axis[3] = ['retention recall', 'retrieval hits', 'retained attention mass']
array title[3]
do for [m = 1:3] {
    rho = ''; n = 0
    stats folder . '/correlation.csv' using (strcol(1) eq name[m] ? (rho = strcol(2), n = int(column(3)), 0) : 0) nooutput
    title[m] = rho eq '' ? sprintf('too few points (%d)', n) : sprintf('Spearman ρ = %.2f, n = %d', real(rho), n)
}
set multiplot layout 1, 3 margins 72.0 / W, 1008.0 / W, 0.14, 0.84 spacing 42.0 / W, 0 title 'Which metric predicts accuracy?'
set yrange [0 : 1.05]
set xtics 0.2
set ylabel 'accuracy (share of recall tokens right)'
do for [m = 1:3] {
    set title title[m]
    set xlabel axis[m] . ' (share)'
    set xrange [0 : 1.05]
    if (m > 1) { unset ylabel; set format y '' }
    if (m == 3) { set key at screen 1026.0 / W, 0.86 left top } else { unset key }
    plot for [i = 1:words(seen)] file \
        using (both(4 + m) && strcol(1) eq word(seen, i) ? column(4 + m) : NaN):8 with points lt i ps large(i) title word(seen, i)
}
unset multiplot
