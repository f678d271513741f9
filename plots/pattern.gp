# How many KV heads hold each of the last decidable tokens at the end, a panel per policy (layers down, tokens across), with the kind of
# each token below. Extra variables: rows, a file of lines label,layer,token,kind,kept_heads of one budget; kinds, every name of
# a kind in the order of the colours; n_head; budget.
load home . '/style.gp'
stats rows using (remember(strcol(1))) nooutput
labels = seen
n = words(labels)
seen = ''
stats rows using (remember(strcol(4))) nooutput # the kinds that occur
colour(k) = okabe_ito[(k - 1) % 8 + 1]
stats rows using 2 nooutput name 'layer'
stats rows using 3 nooutput name 'token'
n_layer = layer_max - layer_min + 1
panel = 14 * n_layer < 110 ? 110 : 14 * n_layer
strip = 12
W = 1150; top = 84; gap = 44; bottom = 96
H = top + n * (panel + strip + gap) - gap + bottom; eval begin
left = 60.0 / W; right = 1 - 190.0 / W
below(i) = 1 - (top + i * (panel + gap + strip) - gap - strip) / real(H) # lower edge of panel i
set multiplot title sprintf('Tokens in the cache at the end, budget %s', budget)
set xrange [token_min - 0.5 : token_max + 0.5]
set cbrange [0 : n_head]
set cbtics 1
if (n_head > 10) { set cbtics 4 }
unset grid
unset key
set border 0
set lmargin at screen left
set rmargin at screen right
set label "KV heads that\nhold the token" at screen right + 25.0 / W, 1 - 45.0 / H
shown = ''
do for [k = 1:words(kinds)] {
    if (!strstrt(seen, '"' . word(kinds, k) . '"')) { continue }
    shown = shown . ' ' . k
    place = words(shown)
    set object k rectangle center screen left + (115.0 * place - 109) / W, 20.0 / H size screen 12.0 / W, 12.0 / H \
        fc rgb colour(k) fs solid noborder
    set label word(kinds, k) at screen left + (115.0 * place - 97) / W, 20.0 / H
}
do for [i = 1:n] {
    set tmargin at screen below(i) + panel / real(H)
    set bmargin at screen below(i)
    set title word(labels, i) offset 0, -0.7
    set ylabel 'layer'
    set yrange [layer_max + 0.5 : layer_min - 0.5]
    set ytics scale 0 1
    if (n_layer > 12) { set ytics 4 }
    unset xtics
    unset xlabel
    if (i == 1) { set colorbox user origin right + 25.0 / W, below(1) size 15.0 / W, panel / real(H) } else { unset colorbox }
    plot rows using (strcol(1) eq word(labels, i) ? column(3) : NaN):2:(0.52):(0.52):5 with boxxyerror lc palette fs solid noborder
    unset title
    unset colorbox
    unset label
    unset object
    unset ylabel
    unset ytics
    set tmargin at screen below(i) - 3.0 / H
    set bmargin at screen below(i) - (3.0 + strip) / H
    set yrange [0 : 1]
    if (i == n) { set xtics nomirror out 16; set xlabel 'token (the last before the window)' } else { set xtics scale 0; set format x '' }
    plot for [k in shown] rows using \
         (strcol(1) eq word(labels, i) && strcol(4) eq word(kinds, int(k)) ? column(3) : NaN):(0.5):(0.52):(0.5) \
         with boxxyerror lc rgb colour(int(k)) fs solid noborder
    set format x '%g'
}
unset multiplot
