/* Rank correlation, the tables behind the pictures, and the pictures themselves: drawn as SVG from a small synthetic run. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "experiments/plot_data.h"
#include "experiments/spearman.h"
#include "reference/core/rand.h"

static double rho_of(const double *x, const double *y, size_t n) {
    double rho = -7;
    cr_assert_eq(kv_spearman(x, y, n, &rho), KV_OK);
    return rho;
}

/* Rank of x[i] by counting: 1 + smaller ones + half of the equal others. */
static double counted_rank(const double *x, size_t n, size_t i) {
    double rank = .5;
    for (size_t j = 0; j < n; j++) rank += x[j] < x[i] ? 1 : x[j] == x[i] ? .5 : 0;
    return rank;
}

static double counted_rho(const double *x, const double *y, size_t n) {
    double mx = 0, my = 0, xy = 0, xx = 0, yy = 0;
    for (size_t i = 0; i < n; i++) {
        mx += counted_rank(x, n, i) / (double)n;
        my += counted_rank(y, n, i) / (double)n;
    }
    for (size_t i = 0; i < n; i++) {
        const double a = counted_rank(x, n, i) - mx, b = counted_rank(y, n, i) - my;
        xy += a * b;
        xx += a * a;
        yy += b * b;
    }
    return xx > 0 && yy > 0 ? xy / sqrt(xx * yy) : NAN;
}

Test(plots, spearman) {
    /* A textbook example without ties: 1 - 6 * 194 / (10 * 99). */
    const double iq[] = {106, 86, 100, 101, 99, 103, 97, 113, 112, 110},
                 hours[] = {7, 0, 27, 50, 28, 29, 20, 12, 6, 17};
    cr_assert_float_eq(rho_of(iq, hours, 10), 1 - 6.0 * 194 / 990, 1e-15);
    /* Ranks 1, 2.5, 2.5, 4 against 1..4. */
    const double tied[] = {1, 2, 2, 3}, plain[] = {1, 2, 3, 4}, flat[] = {5, 5, 5, 5};
    cr_assert_float_eq(rho_of(tied, plain, 4), 4.5 / sqrt(4.5 * 5), 1e-15);
    cr_assert(isnan(rho_of(tied, flat, 4)), "all values equal");
    cr_assert(isnan(rho_of(tied, plain, 1)), "one point");
    cr_assert(isnan(rho_of(tied, plain, 0)), "no point");
    for (uint32_t i = 0; i < 200; i++) {
        double x[30], y[30];
        const size_t n = 2 + i % 29;
        for (uint32_t j = 0; j < n; j++) {
            x[j] = floor(6 * kv_rand_uniform(i, j, 0, 0, 0));
            y[j] = floor(5 * kv_rand_uniform(i, j, 1, 0, 0)) + (i % 2 ? x[j] : -x[j]);
        }
        const double got = rho_of(x, y, n), want = counted_rho(x, y, n);
        cr_assert((isnan(got) && isnan(want)) || fabs(got - want) < 1e-13,
                  "case %u: %g, counted %g", i, got, want);
        cr_assert(isnan(want) || fabs(rho_of(y, x, n) - got) < 1e-15, "case %u: not symmetric", i);
    }
}

typedef struct row {
    const char *policy, *variant;
    int budget;
    double power;                       /* NAN: no such parameter */
    double recall, hit, mass, accuracy; /* NAN: null */
} row;

static const row rows[] = {
    {"h2o", "", 16, NAN, .3, .2, .6, .25},
    {"h2o", "", 32, NAN, .5, .4, .8, .5},
    {"oracle", "power=2", 16, 2, .4, .9, .7, .9},
    {"oracle", "power=max", 32, INFINITY, .6, 1, .85, .95},
    {"oracle_step", "", 16, NAN, NAN, NAN, .9, NAN},
    {"file", "path=a,b", 32, NAN, .45, .7, .75, NAN},
};
enum { ROWS = sizeof rows / sizeof *rows };

static json_t *number(double x) { return isnan(x) ? json_null() : json_real(x); }

/* A run folder under /tmp with summary.json of rows [first, first + n). */
static void write_run(char *folder, int first, int n) {
    char path[256];
    strcpy(folder, "/tmp/kvlab_plots_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    json_t *results = json_array();
    for (int i = first; i < first + n; i++)
        json_array_append_new(
            results, json_pack("{s:s, s:s, s:{s:o}, s:i, s:o, s:o, s:o, s:o, s:{s:o}}", "policy",
                               rows[i].policy, "variant", rows[i].variant, "params", "power",
                               isinf(rows[i].power) ? json_string("max") : number(rows[i].power),
                               "budget", rows[i].budget, "recall_mean", number(rows[i].recall),
                               "recall_chance", number(rows[i].recall / 2), "retrieval_hit",
                               number(rows[i].hit), "retained_mass", number(rows[i].mass),
                               "token_accuracy", "recall", number(rows[i].accuracy)));
    json_t *summary = json_pack("{s:i, s:o}", "schema", 1, "results", results);
    snprintf(path, sizeof path, "%s/summary.json", folder);
    cr_assert_eq(json_dump_file(summary, path, 0), 0);
    json_decref(summary);
}

static char *slurp(const char *folder, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    static char text[1 << 22];
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

static void write_text(const char *folder, const char *name, const char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f, "%s", path);
    fputs(text, f);
    fclose(f);
}

static int shell(const char *format, const char *a, const char *b) {
    char command[1024];
    snprintf(command, sizeof command, format, a, b);
    const int status = system(command);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void remove_run(const char *folder) { cr_assert_eq(shell("rm -r '%s'", folder, ""), 0); }

Test(plots, tables) {
    char a[64], b[64];
    write_run(a, 0, 3);
    write_run(b, 3, ROWS - 3);
    const char *const runs[] = {a, b};
    cr_assert_eq(kv_plot_data(runs, 2, a), KV_OK, "%s", kv_error_message());
    cr_assert_str_eq(slurp(a, "points.csv"),
                     "label,policy,variant,budget,recall_mean,retrieval_hit,retained_mass,"
                     "accuracy_recall\n"
                     "h2o,h2o,,16,0.3,0.2,0.6,0.25\n"
                     "h2o,h2o,,32,0.5,0.4,0.8,0.5\n"
                     "oracle:power=2,oracle,power=2,16,0.4,0.9,0.7,0.9\n"
                     "oracle:power=max,oracle,power=max,32,0.6,1,0.85,0.95\n"
                     "oracle_step,oracle_step,,16,,,0.9,\n"
                     "file,file,\"path=a,b\",32,0.45,0.7,0.75,\n");
    /* Four points have an accuracy; recall ranks 1 3 2 4, hits 1 2 3 4, mass 1 3 2 4 against 1 2 3 4. */
    cr_assert_str_eq(slurp(a, "correlation.csv"), "metric,rho,n\nrecall_mean,0.8,4\n"
                                                  "retrieval_hit,1,4\nretained_mass,0.8,4\n");
    cr_assert_str_eq(slurp(a, "power.csv"), "label,power,budget,accuracy\n"
                                            "oracle,2,16,0.9\noracle,max,32,0.95\n");
    const char *const curve = slurp(a, "curve.csv");
    cr_assert(strstr(curve, "label,policy,variant,budget,metric,value\n") == curve);
    cr_assert(strstr(curve, "\noracle:power=2,oracle,power=2,16,accuracy_recall,0.9\n"));
    cr_assert(strstr(curve, "\noracle_step,oracle_step,,16,recall_mean,\n"), "undefined is empty");
    write_text(
        a, "summary.json",
        "{\"results\": [{\"policy\": \"file\", \"variant\": \"item=x:path=a\", \"budget\": 1},"
        "{\"policy\": \"file\", \"variant\": \"item=x:path=b\", \"budget\": 1},"
        "{\"policy\": \"file\", \"variant\": \"item=y:path=b\", \"budget\": 1}]}");
    cr_assert_eq(kv_plot_data(runs, 1, a), KV_OK, "%s", kv_error_message());
    const char *const points = slurp(a, "points.csv");
    cr_assert(strstr(points, "\nfile:item=x:path=a,") && strstr(points, "\nfile:item=x:path=b,") &&
                  strstr(points, "\nfile:item=y,"),
              "two files that would be called alike keep their paths: %s", points);
    cr_assert_eq(kv_plot_data(&runs[1], 1, b), KV_OK);
    cr_assert_str_eq(slurp(b, "correlation.csv"),
                     "metric,rho,n\nrecall_mean,,1\nretrieval_hit,,1\nretained_mass,,1\n",
                     "below 4 points the correlation is left out");
    remove_run(a);
    remove_run(b);
}

Test(plots, bad_summaries_are_named) {
    static const struct {
        const char *text;
        kv_status status;
        const char *says;
    } cases[] = {
        {"{", KV_E_NOINPUT, "summary.json"},
        {"{\"results\": 3}", KV_E_DATA, "\"results\""},
        {"{\"results\": [{\"policy\": \"h2o\", \"variant\": \"\"}]}", KV_E_DATA, "results[0]"},
    };
    char folder[64], path[128];
    write_run(folder, 0, 0);
    const char *const runs[] = {folder};
    snprintf(path, sizeof path, "%s/summary.json", folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        FILE *f = fopen(path, "w");
        fputs(cases[i].text, f);
        fclose(f);
        cr_assert_eq(kv_plot_data(runs, 1, folder), cases[i].status, "%s: %s", cases[i].text,
                     kv_error_message());
        cr_assert(strstr(kv_error_message(), cases[i].says) && strstr(kv_error_message(), folder),
                  "%s", kv_error_message());
    }
    cr_assert_eq(kv_plot_data(runs, 1, "/nonexistent"), KV_E_CANTCREATE);
    remove_run(folder);
}

/* Tables of h2o and oracle:power=2 at 16, oracle:power=max and h2o at 32. */
static void write_heads(const char *folder) {
    static const char *const metric[] = {"recall", "retrieval_hit", "recall_own"};
    char path[128];
    snprintf(path, sizeof path, "%s/metrics.csv", folder);
    FILE *f = fopen(path, "w");
    fputs("trace,layer,kv_head,policy,variant,budget,seed,metric,value,n\n", f);
    for (int layer = 4; layer < 7; layer++)
        for (int head = 0; head < 2; head++)
            for (int i = 0; i < 4; i++)
                for (int m = 0; m < 3; m++)
                    fprintf(f, "t.h5,%d,%d,%s,%s,%d,1,%s,%g,%d\n", layer, head, rows[i].policy,
                            rows[i].variant, rows[i].budget, metric[m],
                            .1 * layer + .05 * head + .01 * i, layer == 5 && head == 1 ? 9 : 2);
    fclose(f);
    snprintf(path, sizeof path, "%s/timeline.csv", folder);
    f = fopen(path, "w");
    fputs("policy,variant,budget,layer,kv_head,query_bin,token_bin,kept_share\n", f);
    for (int i = 0; i < 4; i++)
        for (int layer = 4; layer < 7; layer++)
            for (int head = 0; head < 2; head++)
                for (int u = 0; u < 8; u++)
                    for (int t = 0; t <= u; t++)
                        fprintf(f, "%s,%s,%d,%d,%d,%d,%d,%g\n", rows[i].policy, rows[i].variant,
                                rows[i].budget, layer, head, u, t, u - t < 2 ? 1 : .25);
    fclose(f);
}

static FILE *table(const char *folder, const char *name, const char *columns) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f, "%s", path);
    fprintf(f, "policy,variant,budget,%s\n", columns);
    return f;
}

static void put_key(FILE *f, int i) {
    fprintf(f, "%s,%s,%d,", rows[i].policy, rows[i].variant, rows[i].budget);
}

static void write_learned(const char *folder) {
    static const char *const kinds[] = {"name", "value", "filler"}, *const measures[] = {
                                                                        "next_token", "agreement",
                                                                        "decision",
                                                                        "decision_balanced"};
    FILE *f = table(folder, "pattern.csv", "layer,token,kind,kept_heads");
    for (int i = 0; i < 4; i++)
        for (int layer = 4; layer < 7; layer++)
            for (int t = 30; t < 40; t++) {
                put_key(f, i);
                fprintf(f, "%d,%d,%s,%d\n", layer, t, kinds[t % 3], (t + layer + i) % 3);
            }
    fclose(f);
    f = table(folder, "evict_ratio.csv", "layer,kv_head,evict_ratio");
    for (int i = 0; i < 4; i++)
        for (int layer = 4; layer < 7; layer++)
            for (int head = 0; head < 2; head++) {
                put_key(f, i);
                fprintf(f, "%d,%d,%g\n", layer, head, i ? .5 : .1 * layer + .1 * head);
            }
    fclose(f);
    f = table(folder, "evict_kind.csv", "tokens,kind,n_token,evict_rate,base_rate");
    for (int i = 0; i < 4; i++)
        for (int range = 0; range < 2; range++)
            for (int kind = 0; kind < 3; kind++) {
                put_key(f, i);
                fprintf(f, "%s,%s,4,%g,.4\n", range ? "all" : "last", kinds[kind],
                        .2 + .1 * kind + .05 * i);
            }
    fclose(f);
    f = table(folder, "delay.csv", "delay,measure,value");
    for (int i = 0; i < 4; i++)
        for (int m = 0; m < 4; m++) {
            put_key(f, i);
            fprintf(f, "%d,%s,%g\n", i ? 256 : 0, measures[m], .6 + .1 * m + .01 * i);
        }
    fclose(f);
}

static int count(const char *text, const char *what) {
    int n = 0;
    for (; (text = strstr(text, what)); text += strlen(what)) n++;
    return n;
}

Test(plots, pictures) {
    static const struct {
        const char *name;
        int series;
        const char *texts[12];
    } pictures[] = {
        /* per policy a line and its chance, and the legend's entry for chance */
        {"recall.svg",
         9,
         {"Retention recall against budget", "budget (tokens kept per KV head)",
          "recall (share of the oracle's long-range keys)", "h2o", "oracle:power=2", "file",
          "chance"}},
        {"accuracy.svg",
         3,
         {"Token accuracy against budget", "budget (tokens kept per KV head)",
          "accuracy (share of recall tokens right)", "h2o", "oracle:power=2"}},
        /* 3 panels x 3 policies with an accuracy */
        {"correlation.svg",
         9,
         {"Which metric predicts accuracy?", "Spearman ρ = 0.80, n = 4", "Spearman ρ = 1.00, n = 4",
          "retention recall (share)", "retrieval hits (share)", "retained attention mass (share)",
          "accuracy (share of recall tokens right)", "h2o", "oracle:power=2"}},
        /* cells and numbers of both policies */
        {"heatmap.svg",
         4,
         {"Retention recall by layer and KV head, budget 16", "layer",
          "policy (one column per KV head, 0 to 1)",
          "recall (share of the oracle's long-range keys)", "h2o", "oracle:power=2", "0.40",
          "0.67"}},
        /* the head with most retrievals */
        {"timeline.svg",
         2,
         {"Tokens in the cache, budget 16, layer 5, KV head 1", "query (% of trace)",
          "token (% of trace)", "share of the tokens in the cache", "h2o", "oracle:power=2"}},
        /* per policy the heads and their means, and the legend's entry for means */
        {"recall_heads.svg",
         5,
         {"Recall of the policy's own target by layer and KV head, budget 16", "layer",
          "recall (share of the target's long-range keys)", "h2o", "oracle:power=2",
          "mean of the heads"}},
        {"evict_ratio.svg",
         5,
         {"Evicted at the end by layer and KV head, budget 16", "layer",
          "evicted (share of the tokens that may leave)", "h2o", "oracle:power=2"}},
        /* 2 panels of cells and 3 kinds */
        {"pattern.svg",
         8,
         {"Tokens in the cache at the end, budget 16", "layer", "token", "KV heads that",
          "hold the token", "h2o", "oracle:power=2", "name", "value", "filler"}},
        /* 2 panels of 2 policies, their base rates, and the legend's entry for these */
        {"evict_kind.svg",
         10,
         {"Evicted at the end by kind of token, budget 16", "the last 112 tokens before the window",
          "all tokens before the window", "evicted (share of token, layer, KV head)", "name",
          "value", "filler", "base rate", "h2o", "oracle:power=2"}},
        /* bars and numbers of 2 policies */
        {"delay.svg",
         4,
         {"Tokens and decisions right, by scorer and delay, budget 16",
          "share of tokens, or of decisions", "next token", "keep or drop", "h2o (no delay)",
          "oracle:power=2 (delay 256)", "0.600", "0.920"}},
        {"power.svg",
         2,
         {"Token accuracy by power of the target",
          "power of the attention probability in the target",
          "accuracy (share of recall tokens right)", "oracle, budget 16", "oracle, budget 32",
          "max"}},
    };
    char folder[64];
    write_run(folder, 0, ROWS);
    const char *const runs[] = {folder};
    cr_assert_eq(kv_plot_data(runs, 1, folder), KV_OK, "%s", kv_error_message());
    write_heads(folder);
    write_learned(folder);
    cr_assert_eq(shell("plots/draw.sh '%s' svg 2>'%s/log'", folder, folder), 0, "%s",
                 slurp(folder, "log"));
    cr_assert_eq(count(slurp(folder, "log"), "warning"), 0, "%s", slurp(folder, "log"));
    for (size_t i = 0; i < sizeof pictures / sizeof *pictures; i++) {
        char name[64];
        snprintf(name, sizeof name, "plots/%s", pictures[i].name);
        const char *const svg = slurp(folder, name);
        cr_assert(strstr(svg, "</svg>"), "%s is cut off", name);
        cr_assert_eq(count(svg, "<g id=\"gnuplot_plot_"), pictures[i].series, "%s has %d series",
                     name, count(svg, "<g id=\"gnuplot_plot_"));
        for (size_t j = 0; j < 12 && pictures[i].texts[j]; j++)
            cr_assert(strstr(svg, pictures[i].texts[j]), "%s lacks the text \"%s\"", name,
                      pictures[i].texts[j]);
    }
    /* One file serves all formats. */
    cr_assert_eq(shell("plots/draw.sh '%s' png pdf 2>'%s/log'", folder, folder), 0);
    cr_assert_eq(memcmp(slurp(folder, "plots/timeline.png"), "\x89PNG", 4), 0);
    cr_assert_eq(memcmp(slurp(folder, "plots/recall.pdf"), "%PDF", 4), 0);
    remove_run(folder);
}

Test(plots, drawing_fails_loudly) {
    char folder[64];
    write_run(folder, 0, 2);
    const char *const runs[] = {folder};
    cr_assert_eq(shell("plots/draw.sh '%s/nowhere' 2>'%s/log'", folder, folder), 64);
    cr_assert(strstr(slurp(folder, "log"), "not a folder"));
    cr_assert_eq(shell("plots/draw.sh '%s' bmp 2>'%s/log'", folder, folder), 64);
    cr_assert_eq(shell("plots/draw.sh '%s' 2>'%s/log'", folder, folder), 0);
    cr_assert(strstr(slurp(folder, "log"), "no defined values"), "%s", slurp(folder, "log"));
    cr_assert_eq(kv_plot_data(runs, 1, folder), KV_OK);
    /* A budget that was not run. */
    write_heads(folder);
    cr_assert_eq(shell("BUDGET=24 plots/draw.sh '%s' svg 2>'%s/log'", folder, folder), 65);
    cr_assert(strstr(slurp(folder, "log"), "has no budget 24; it has 16, 32\n"), "%s",
              slurp(folder, "log"));
    /* A gnuplot that fails. */
    cr_assert_eq(shell("printf '#!/bin/sh\\nexit 3\\n' >'%s/gnuplot'; chmod +x '%s/gnuplot'",
                       folder, folder),
                 0);
    cr_assert_eq(shell("PATH='%s':\"$PATH\" plots/draw.sh '%s' svg 2>/dev/null", folder, folder),
                 70);
    remove_run(folder);
}
