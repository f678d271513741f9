/* delay.csv: the token accuracies of maths.md 10.2 for the learned policies of a run, policy,variant,budget,delay,measure,value. `delay`:
 * tokens between a token's arrival and its score, from the weights. Undefined values are empty. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "experiments/csv.h"
#include "experiments/results.h"

/* Over the counted tokens that carry a score; NAN where no model ran. */
static double next_token(const kv_accuracy *a) {
    const double share[] = {a->recall, a->result, a->deterministic};
    const int64_t n[] = {a->n_recall, a->n_result, a->n_deterministic};
    double right = 0;
    int64_t all = 0;
    for (int i = 0; i < 3; i++) {
        if (n[i] == 0) continue;
        right += share[i] * (double)n[i];
        all += n[i];
    }
    return all ? right / (double)all : NAN;
}

static void put_row(FILE *f, const kv_report *r, size_t i) {
    const kv_row *row = &r->plan->row[i];
    const kv_accuracy *a = r->accuracy ? &r->accuracy[i] : NULL;
    const kv_decisions *d = &r->result[i].decisions;
    const char *delay = kv_tensors_meta(&row->weights->tensors, "delay");
    const struct {
        const char *name;
        double value;
    } measures[] = {
        {"next_token", a ? next_token(a) : NAN},
        {"agreement", a ? a->agreement : NAN},
        {"decision", kv_decisions_plain(d)},
        {"decision_balanced", kv_decisions_balanced(d)},
    };
    for (size_t m = 0; m < sizeof measures / sizeof *measures; m++) {
        fprintf(f, "%s,", row->policy->name);
        kv_csv_put(f, row->variant);
        fprintf(f, ",%d,%s,%s,", row->run.budget, delay ? delay : "", measures[m].name);
        if (isfinite(measures[m].value)) fprintf(f, "%.17g", measures[m].value);
        fputc('\n', f);
    }
}

kv_status kv_delay_csv_write(const kv_report *report, const char *folder) {
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/delay.csv", folder);
    FILE *f = fopen(path, "w");
    if (!f) return KV_FAIL(KV_E_CANTCREATE, "cannot create %s: %s", path, strerror(errno));
    fputs("policy,variant,budget,delay,measure,value\n", f);
    for (size_t i = 0; i < report->plan->n_row; i++)
        if (report->plan->row[i].policy->own_target && report->plan->row[i].weights)
            put_row(f, report, i);
    bool bad = ferror(f) != 0;
    if (fclose(f) != 0) bad = true;
    return bad ? KV_FAIL(KV_E_IO, "writing %s failed: %s", path, strerror(errno)) : KV_OK;
}
