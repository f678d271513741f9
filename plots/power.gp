# Accuracy of the model under eviction by the power of the target, a line per policy and budget. Extra
# variables: depth, stretch, see style.gp.
load home . '/style.gp'
W = 900; H = 540; eval begin
# Columns: label,power,budget,accuracy
file = folder . '/power.csv'
label(dummy) = strcol(1) . ', budget ' . strcol(3)
stats file using (valid(4) && valid(2) ? remember(strcol(2)) : 0) nooutput
powers = seen
seen = ''
stats file using (valid(4) ? remember(label(0)) : 0) nooutput
stats file using 2 nooutput name 'power'
beyond = 2 * power_max # where max stands
set title 'Token accuracy by power of the target'
set xlabel 'power of the attention probability in the target'
set ylabel 'accuracy (share of recall tokens right)'
set logscale x 2
set xrange [power_min / 1.15 : beyond * 1.15]
set yrange [0 : 1.02]
set xtics ('max' beyond)
do for [i = 1:words(powers)] { set xtics add (word(powers, i) real(word(powers, i))) }
plot for [i = 1:words(seen)] file using (label(0) eq word(seen, i) ? (strcol(2) eq 'max' ? beyond : column(2)) : NaN):4 smooth unique \
     with linespoints lt i lw wide(i) ps large(i) title word(seen, i)
