# The token accuracies of maths.md 10.2, a group of bars per measure, a bar per policy. Extra variable: rows, a file of lines
# label,measure,value of one budget; budget.
load home . '/style.gp'
stats rows using (remember(strcol(1))) nooutput
n = words(seen)
W = 320 + (n * 4 * 46 < 600 ? 600 : n * 4 * 46); H = 540; eval begin
array measure[4] = ['next_token', 'agreement', 'decision', 'decision_balanced']
set title 'Tokens and decisions right, by scorer and delay, budget ' . budget
set ylabel 'share of tokens, or of decisions'
set bmargin 4
set yrange [0 : 1.06]
set ytics 0.2
set xrange [0.45 : 4.55]
set xtics scale 0 ("next token\nas in the text" 1, "next token\nas full cache" 2, "keep or drop\nas the target" 3, "the same, both\nclasses equal" 4)
set grid noxtics
slot = 0.8 / n
place(m) = m eq measure[1] ? 1 : m eq measure[2] ? 2 : m eq measure[3] ? 3 : m eq measure[4] ? 4 : NaN
x(i) = strcol(1) eq word(seen, i) ? place(strcol(2)) + (i - (n + 1) / 2.0) * slot : NaN
plot for [i = 1:n] rows using (x(i)):3:(slot * 0.9) with boxes lt i fs solid 0.85 noborder title word(seen, i), \
     for [i = 1:n] rows using (x(i)):3:(sprintf('%.3f', column(3))) with labels offset 0, 0.6 font font . ',8' notitle
