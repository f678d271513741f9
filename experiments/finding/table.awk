# runs.txt -> the tables of the finding (see table.sh). Variables: out, the folder; seeds, the held-out seeds.
BEGIN {
    FS = " "
    n_seed = split(seeds, seed, " ")
    n_shown = split("recall_own recall_mean retrieval_hit token_accuracy_recall token_accuracy_deterministic decision_balanced", shown, " ")
    split("recall_own|recall of power 1|retrieval hits|recall tokens right|deterministic tokens right|keep/drop right (classes equal)", heading, "|")
    split("", is_shown)
    for (m = 1; m <= n_shown; m++) is_shown[shown[m]] = 1
    results = out "/results.csv"; table = out "/table.csv"; page = out "/table.md"
    power = out "/power.csv"; delay = out "/delay.csv"
    print "run,policy,settings,seed,metric,value" > results
    print "run,policy,settings,metric,mean,sd,n" > table
    print "label,power,budget,accuracy" > power
    print "policy,variant,budget,delay,measure,value" > delay
    line = "| run | settings |"; rule = "|---|---|"
    for (m = 1; m <= n_shown; m++) { line = line " " heading[m] " |"; rule = rule "---|" }
    print line "\n" rule > page
    print_references()
}

# Values of a run's metrics: value[run, metric, seed]. FILE is metrics.csv or delay.csv; fields are counted from the end.
function take(run, policy, settings, s, metric, x) {
    value[run, metric, s] = x
    if (x != "") print run "," policy "," settings "," seed[s] "," metric "," x > results
}
function read_metrics(run, policy, settings, s, label, folder,   file, text, f, n, name, i) {
    file = folder "/metrics.csv"
    while ((getline text < file) > 0) {
        n = split(text, f, ",")
        name = f[4]; for (i = 5; i <= n - 5; i++) if (f[i] != "") name = name ":" f[i]
        if (name == label && f[3] == "all" && f[2] == "all" && f[n - 2] in is_shown) {
            take(run, policy, settings, s, f[n - 2], f[n - 1])
            budget = f[n - 4]
        }
    }
    close(file)
}
function read_delay(run, policy, settings, s, folder,   file, text, f, n) {
    file = folder "/delay.csv"
    while ((getline text < file) > 0) {
        n = split(text, f, ",")
        if (f[1] != policy) continue
        take(run, policy, settings, s, f[n - 1], f[n])
        tokens[run] = f[n - 2]
    }
    close(file)
}

# mean, sd and count of a metric over the seeds
function measure(run, metric,   s, x, sum, square) {
    count = 0; sum = 0; square = 0; mean = ""; sd = ""
    for (s = 1; s <= n_seed; s++) {
        x = value[run, metric, s]
        if (x == "") continue
        count++
        sum += x
    }
    if (count == 0) return
    mean = sum / count
    for (s = 1; s <= n_seed; s++) if (value[run, metric, s] != "") square += (value[run, metric, s] - mean) ^ 2
    if (count > 1) sd = sqrt(square / (count - 1))
}
function put(run, policy, settings,   m, row) {
    row = "| " run " | " (policy == run ? "" : settings == "" ? "defaults" : settings) " |"
    for (m = 1; m <= n_shown; m++) {
        measure(run, shown[m])
        if (count) printf "%s,%s,%s,%s,%.6f,%s,%d\n", run, policy, settings, shown[m], mean, sd == "" ? "" : sprintf("%.6f", sd), count > table
        row = row " " (count ? sprintf("%.3f", mean) (sd == "" ? "" : sprintf(" ± %.3f", sd)) : "–") " |"
    }
    print row > page
}
function put_power(run, label, of_power) {
    measure(run, "token_accuracy_recall")
    if (count) printf "%s,%s,%d,%.6f\n", label, of_power, budget, mean > power
}

function head(text,   m, row) {
    row = "| **" text "** | |"
    for (m = 1; m <= n_shown; m++) row = row " |"
    print row > page
}
function print_references(   n, label, i, s) {
    n = split("streaming keydiff oracle oracle:power=1.5 oracle:power=2 oracle:power=4 oracle:power=max", label, " ")
    head("Not learned")
    for (i = 1; i <= n; i++) {
        for (s = 1; s <= n_seed; s++) read_metrics(label[i], label[i], "", s, label[i], out "/evaluations/reference-s" seed[s])
        put(label[i], label[i], "")
        if (label[i] ~ /^oracle/) put_power(label[i], "oracle", label[i] ~ /=/ ? substr(label[i], 14) : 1)
    }
}

/^#/ || NF == 0 { next }
/^=/ { head(substr($0, 3)); next }
{
    run = $1; policy = $2
    settings = ""
    for (i = 3; i <= NF; i++) settings = settings (i > 3 ? " " : "") $i
    for (s = 1; s <= n_seed; s++) {
        folder = out "/evaluations/" run "-s" seed[s]
        read_metrics(run, policy, settings, s, policy, folder)
        read_delay(run, policy, settings, s, folder)
    }
    put(run, policy, settings)
    if (settings == "" || settings ~ /^power=[^ ]*$/) put_power(run, policy, settings == "" ? 2 : substr(settings, 7))
    if (policy == "kvpop" && settings ~ /^(power=[^ ]*)? ?(delay=off)?$/) {
        n = split("next_token agreement decision decision_balanced", name, " ")
        variant = settings
        sub(/ ?delay=off/, "", variant)
        for (m = 1; m <= n; m++) {
            measure(run, name[m])
            if (count) printf "%s,%s,%d,%s,%s,%.6f\n", policy, variant, budget, tokens[run], name[m], mean > delay
        }
    }
}
