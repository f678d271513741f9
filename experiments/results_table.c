/* The tables on the screen, printed from summary.json, so that a reused run looks like a fresh one. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "experiments/results.h"
#include "policies/registry.h"

static double number(const json_t *row, const char *key) {
    const json_t *v = json_object_get(row, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static const char *text(const json_t *row, const char *key) {
    const char *s = json_string_value(json_object_get(row, key));
    return s ? s : "";
}

static double accuracy(const json_t *row, const char *key) {
    return number(json_object_get(row, "token_accuracy"), key);
}

/* keydiff is causal except in its anchor=all form. */
static bool sees_future(const json_t *row) {
    const kv_policy *p = kv_policy_find(text(row, "policy"));
    const char *anchor = text(json_object_get(row, "params"), "anchor");
    return (p && p->non_causal) || strcmp(anchor, "all") == 0;
}

/* policy:variant; its length in bytes (all ASCII). */
static int plain_label(const json_t *results, const json_t *row, char *out, size_t size) {
    const char *const policy = text(row, "policy"), *const variant = text(row, "variant");
    const int n = kv_label_length(results, policy, variant);
    return snprintf(out, size, "%s%s%.*s", policy, n > 0 ? ":" : "", n < 60 ? n : 60, variant);
}

/* The same, with '*' when the row sees the future. */
static int label(const json_t *results, const json_t *row, char *out, size_t size) {
    const int n = plain_label(results, row, out, size);
    return n + snprintf(out + n, size - (size_t)n, "%s", sees_future(row) ? " *" : "");
}

static void share(double x, int width) { /* a number in [0,1] or so */
    if (isfinite(x))
        printf("  %*.4f", width, x);
    else
        printf("  %*s", width, "-");
}

static void bytes(double x, int width) {
    if (!isfinite(x))
        printf("  %*s", width, "-");
    else
        printf("  %*.2f", width, x / (1 << 20));
}

static int label_width(const json_t *results) {
    int width = 6;
    size_t i;
    json_t *row;
    char name[256];
    json_array_foreach(results, i, row) {
        int n = label(results, row, name, sizeof name);
        if (n > width) width = n;
    }
    return width;
}

static void print_metrics(const json_t *results, int width) {
    size_t i;
    json_t *row;
    char name[256];
    printf("%-*s  %6s %7s  %6s  %8s  %8s  %8s  %8s  %8s  %9s  %9s  %7s\n", width, "policy",
           "budget", "", "recall", "(chance)", "hit", "mass", "out.err", "accuracy", "kept",
           "cache MiB", "seconds");
    json_array_foreach(results, i, row) {
        label(results, row, name, sizeof name);
        printf("%-*s  %6.0f %6.2f%%", width, name, number(row, "budget"),
               100 * number(row, "budget_fraction"));
        share(number(row, "recall_mean"), 6);
        if (isfinite(number(row, "recall_chance")))
            printf("  (%.4f)", number(row, "recall_chance"));
        else
            printf("  %8s", "-");
        share(number(row, "retrieval_hit"), 8);
        share(number(row, "retained_mass"), 8);
        share(number(row, "output_error"), 8);
        share(accuracy(row, "recall"), 8);
        if (isfinite(number(row, "kept_mean")))
            printf("  %9.1f", number(row, "kept_mean"));
        else
            printf("  %9s", "-");
        bytes(number(row, "cache_bytes"), 9);
        printf("  %7.2f\n", number(row, "seconds"));
    }
}

static void print_accuracy(const json_t *results, int width) {
    size_t i;
    json_t *row;
    char name[256];
    printf("%-*s  %6s %7s  %8s  %8s  %8s  %8s  %8s  %10s\n", width, "policy", "budget", "",
           "recall", "result", "determ.", "problem", "agree", "KL (nats)");
    json_array_foreach(results, i, row) {
        label(results, row, name, sizeof name);
        printf("%-*s  %6.0f %6.2f%%", width, name, number(row, "budget"),
               100 * number(row, "budget_fraction"));
        share(accuracy(row, "recall"), 8);
        share(accuracy(row, "result"), 8);
        share(accuracy(row, "deterministic"), 8);
        share(number(row, "problem_accuracy"), 8);
        share(number(row, "agreement"), 8);
        if (isfinite(number(row, "kl")))
            printf("  %10.6f\n", number(row, "kl"));
        else
            printf("  %10s\n", "-");
    }
}

static bool any(const json_t *results, double (*get)(const json_t *)) {
    size_t i;
    json_t *row;
    json_array_foreach(results, i, row) if (isfinite(get(row))) return true;
    return false;
}
static double of_mass(const json_t *row) { return number(row, "retained_mass"); }
static double of_agreement(const json_t *row) { return number(row, "agreement"); }
static double of_future(const json_t *row) { return sees_future(row) ? 1 : NAN; }

static void explain_metrics(void) {
    fputs("\n"
          "recall     share of the best long-range tokens (by the oracle of future attention) "
          "still in the cache\n"
          "(chance)   recall that a blind choice of as many tokens would have\n"
          "hit        retrievals (one far token draws at least half of a query's attention) whose "
          "token is there\n"
          "mass       share of the full cache's attention that falls on kept tokens\n"
          "out.err    error of the attention output, relative to the full cache's (root mean "
          "square)\n"
          "accuracy   digits that the model must recall from far back and gets right ('-': no "
          "model was run)\n"
          "kept       tokens in the cache per KV head, averaged over the counted queries (position "
          ">= budget)\n"
          "cache MiB  memory of the keys and values at each head's fullest moment\n"
          "seconds    time of this row alone\n",
          stdout);
}

static void explain_accuracy(void) {
    fputs("\n"
          "recall     digits after `recall x y =`: they must be fetched from far back\n"
          "result     digits of results and answers: local arithmetic on what was recalled\n"
          "determ.    all other tokens that the text before them determines\n"
          "problem    problems whose answer is right in every digit\n"
          "agree      same most likely next token as with the full cache\n"
          "KL (nats)  mean divergence of the next-token distribution from the full cache's\n",
          stdout);
}

/* Once per budget that is not below the longest document. */
static void explain_nothing_evicted(const json_t *results) {
    size_t i, j;
    json_t *row, *other;
    json_array_foreach(results, i, row) {
        bool told = number(row, "budget_fraction") < 1;
        json_array_foreach(results, j, other) told |=
            j < i && number(other, "budget") == number(row, "budget");
        if (!told)
            printf("budget %.0f is not below the longest document: nothing has to be evicted, so "
                   "there "
                   "is nothing to measure\n",
                   number(row, "budget"));
    }
}

/* Attend-then-evict shows budget + 1; `full` has no budget. */
static void remark_overfull(const json_t *results) {
    size_t i;
    json_t *row;
    char name[256];
    json_array_foreach(results, i, row) {
        const kv_policy *p = kv_policy_find(text(row, "policy"));
        const double most = number(row, "kept_max"), budget = number(row, "budget");
        if (!(most > budget + 1) || !p || strcmp(p->name, "full") == 0) continue;
        plain_label(results, row, name, sizeof name);
        if (p->kind == KV_GATE)
            printf("%s: heads hold up to %.0f entries at budget %.0f: the gate decides, not the "
                   "budget\n",
                   name, most, budget);
        else
            printf("%s: holds up to %.0f entries, the budget is %.0f\n", name, most, budget);
    }
}

/* Shipped weights are named by their budget. */
static void remark_weights(const json_t *results) {
    size_t i;
    json_t *row;
    char name[256];
    json_array_foreach(results, i, row) {
        const char *weights = text(json_object_get(row, "params"), "weights");
        const char *at =
            strncmp(weights, "policies/weights/", 17) == 0 ? strstr(weights, "-b") : NULL;
        int trained = 0;
        if (!at || sscanf(at, "-b%d.", &trained) != 1 || trained == number(row, "budget")) continue;
        plain_label(results, row, name, sizeof name);
        printf("%s: weights trained for %d serve %.0f\n", name, trained, number(row, "budget"));
    }
}

void kv_decode_print(const json_t *summary) {
    const json_t *results = json_object_get(summary, "results");
    size_t i, n = 0;
    json_t *row;
    bool rerotates = false;
    json_array_foreach(results, i, row) {
        if (!isfinite(number(row, "cache_bytes_allocated"))) continue;
        n++;
        rerotates |= strcmp(text(json_object_get(row, "params"), "pos"), "cache") == 0;
    }
    if (n == 0) {
        puts("decode: no row could be decoded: they see the future, have no cache, or read scores "
             "from the trace");
        return;
    }
    printf("decode: %zu of %zu rows decoded, every decision and output as replayed%s; "
           "cache_bytes_allocated in summary.json\n",
           n, json_array_size(results), rerotates ? " (pos=cache: decisions only)" : "");
}

void kv_table_print(const json_t *summary, const char *folder, bool explain) {
    const json_t *results = json_object_get(summary, "results");
    int width = label_width(results);
    bool metrics = any(results, of_mass), model = any(results, of_agreement);
    if (metrics || !model) {
        print_metrics(results, width);
        if (explain) explain_metrics();
    }
    if (model) {
        printf("%s", metrics ? "\n" : "");
        print_accuracy(results, width);
        if (explain) explain_accuracy();
    }
    if (any(results, of_future))
        puts("*          sees the future: a yardstick, not a policy that could run");
    explain_nothing_evicted(results);
    remark_overfull(results);
    if (explain) remark_weights(results);
    printf("\nresults: %s/summary.json, metrics.csv, manifest.json\n", folder);
}
