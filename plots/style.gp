# Common style and helpers, loaded first. A script then sets W and H (pixels) and says `eval begin`. plots/draw.sh sets the rest on
# the command line:
#   home    folder of the scripts
#   folder  where the CSV files lie
#   format  svg, png or pdf
#   out     file to write
# Colours: Okabe and Ito, Color Universal Design (2008), safe for colour-blind readers; their yellow, too pale for lines on white,
# is darkened to olive. Beyond eight curves the colours come again with another point and dash.
set encoding utf8
font = 'DejaVu Sans'
begin = format eq 'svg' ? "set terminal svg size W, H font font . ',13' noenhanced background 'white' dynamic" \
      : format eq 'png' ? "set terminal pngcairo size W, H font font . ',10' noenhanced background 'white'" \
      : "set terminal pdfcairo size W / 96.0, H / 96.0 font font . ',10' noenhanced background 'white'"
begin = begin . '; set output out'
set datafile separator ','
set datafile missing NaN # a row of another curve is skipped without a gap in the line

array okabe_ito[8] = ['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000', '#8C8C00']
array shapes[16] = [7, 5, 9, 13, 11, 15, 4, 6, 8, 12, 6, 10, 14, 4, 7, 5]
array dashes[4] = ['solid', '(4, 4)', '(10, 4)', '(9, 3, 2, 3)']
do for [i = 1:32] {
    eval sprintf("set linetype %d lc rgb okabe_ito[%d] pt %d ps 0.9 lw 2 dt %s", i, (i - 1) % 8 + 1, shapes[(i - 1) % 16 + 1], \
        dashes[(i - 1) / 8 + 1])
}
set border 3 lc rgb '#404040'
set tics nomirror out textcolor rgb '#202020'
set grid lc rgb '#D0D0D0' lw 1 dt 1
set key outside right top Left reverse samplen 4 spacing 1.15 width 1

# Shares from 0 to 1: cividis, which also reads the same for colour-blind readers and in grey.
set palette defined (0 '#00224E', 0.25 '#434E6C', 0.5 '#7D7C78', 0.75 '#BCAF6F', 1 '#FEE838')

# Distinct values of a text column in the order of the file: `stats FILE using (remember(strcol(1)))` fills the list `seen`, to be
# used with word() and words(). Entries are quoted, so they may hold blanks.
seen = ''
remember(x) = strstrt(seen, '"' . x . '"') ? 0 : strlen(seen = seen . ' "' . x . '"')

# Curves that meet (draw.sh: how many lie above the i-th, at a point and along a stretch): those below have larger marks and wider lines.
level(list, i) = words(list) >= i ? (int(word(list, i)) < 3 ? int(word(list, i)) : 3) : 0
wide(i) = 2 + 3 * level(stretch, i)
large(i) = 0.9 + 0.5 * level(depth, i)

# `budgets = seen; eval tick_budgets`: ticks at the budgets of a logarithmic axis, labelled while there is room.
tick_budgets = "set xtics (); labelled = ''; room = (log(budget_max / budget_min) + 2 * log(1.25)) / (words(budgets) > 8 ? 8.0 : 15.0);" \
    . " do for [b in budgets] { free = 1;" \
    . " do for [other in labelled] { if (abs(log(real(b) / other)) < room) { free = 0 } };" \
    . " if (free) { labelled = labelled . ' ' . b; set xtics add (b real(b)) } else { set xtics add ('' real(b) 1) } }"

# Room for a legend right of the panels, in pixels: the longest entry of the list `names`.
legend(names) = 75 + 8 * longest(names)
longest(names) = (most = 9, sum [n = 1:words(names)] (strlen(word(names, n)) > most ? (most = strlen(word(names, n)), 0) : 0), most)
