# Retention recall against budget, one line per policy; thin dashes: what a random choice of as many keys would reach.
# Extra variables: depth, stretch, see style.gp.
load home . '/style.gp'
W = 900; H = 540; eval begin
file = folder . '/curve.csv'
stats file using (strcol(5) eq 'recall_mean' && valid(6) ? remember(strcol(4)) : 0) nooutput
budgets = seen
seen = ''
stats file using (strcol(5) eq 'recall_mean' && valid(6) ? remember(strcol(1)) : 0) nooutput
stats file using (strcol(5) eq 'recall_mean' && valid(6) ? column(4) : NaN) nooutput name 'budget'
set title 'Retention recall against budget'
set xlabel 'budget (tokens kept per KV head)'
set ylabel 'recall (share of the oracle''s long-range keys)'
set logscale x 2
set xrange [budget_min / 1.25 : budget_max * 1.25]
eval tick_budgets
set yrange [0 : 1.02]
at(label, metric) = strcol(1) eq label && strcol(5) eq metric ? column(6) : NaN
plot for [i = 1:words(seen)] file using 4:(at(word(seen, i), 'recall_mean')) \
         with linespoints lt i lw wide(i) ps large(i) title word(seen, i), \
     for [i = 1:words(seen)] file using 4:(at(word(seen, i), 'recall_chance')) \
         with linespoints lt i lw 0.8 dt 2 pt 2 ps 0.5 notitle, \
     NaN with linespoints lc rgb '#606060' lw 0.8 dt 2 pt 2 ps 0.5 title 'chance'
