# Accuracy of the model under eviction against budget, one line per policy. Extra variables: depth, stretch, see style.gp.
load home . '/style.gp'
W = 900; H = 540; eval begin
file = folder . '/curve.csv'
stats file using (strcol(5) eq 'accuracy_recall' && valid(6) ? remember(strcol(4)) : 0) nooutput
budgets = seen
seen = ''
stats file using (strcol(5) eq 'accuracy_recall' && valid(6) ? remember(strcol(1)) : 0) nooutput
stats file using (strcol(5) eq 'accuracy_recall' && valid(6) ? column(4) : NaN) nooutput name 'budget'
set title 'Token accuracy against budget'
set xlabel 'budget (tokens kept per KV head)'
set ylabel 'accuracy (share of recall tokens right)'
set logscale x 2
set xrange [budget_min / 1.25 : budget_max * 1.25]
eval tick_budgets
set yrange [0 : 1.02]
at(label) = strcol(1) eq label && strcol(5) eq 'accuracy_recall' ? column(6) : NaN
plot for [i = 1:words(seen)] file using 4:(at(word(seen, i))) with linespoints lt i lw wide(i) ps large(i) title word(seen, i)
