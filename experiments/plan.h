/* What an experiment runs: every policy item at every budget, resolved and checked before the first number is computed. */
#ifndef KV_EXPERIMENTS_PLAN_H
#define KV_EXPERIMENTS_PLAN_H

#include "experiments/config.h"
#include "reference/tensors.h"
#include "traces/trace.h"

enum { KV_VARIANT_MAX = 512 };

typedef struct kv_weights { /* one open weights file, shared by the rows that use it */
    char *name;             /* as the results print it */
    kv_tensors tensors;
} kv_weights;

typedef struct kv_row { /* one policy at one budget */
    const kv_policy *policy;
    kv_params params;
    char variant[KV_VARIANT_MAX];
    kv_run run; /* budget included */
    /* learned policies; NULL otherwise, or when the trace itself holds the gate */
    const kv_weights *weights;
} kv_row;

typedef struct kv_plan {
    kv_row *row; /* policies outermost, budgets as given */
    size_t n_row;
    kv_weights **weights;
    size_t n_weights;
} kv_plan;

/* Names, parameters and spelling of the lists, before a trace is at hand: the same errors as kv_plan_make. */
kv_status kv_plan_check(const kv_config *config);

/* Parses the lists of `config` for documents of at most `longest` tokens. Equal rows are kept once. KV_E_USAGE: unknown policy (the
 * message lists them all), bad parameter, bad budget. Weights are not opened. */
kv_status kv_plan_make(const kv_config *config, int32_t longest, kv_plan *out);

/* True when the scores recorded in the trace are used in place of weights (kvpop:scores=trace). */
bool kv_row_reads_scores(const kv_row *row);

/* Opens the weights of the learned rows: --weights, else the gate that the trace holds (dms), else the shipped file whose budget is
 * nearest. KV_E_NOINPUT when there is none, KV_E_DATA when window, layers, KV heads or head size differ from the trace's. */
kv_status kv_plan_open_weights(kv_plan *plan, const kv_config *config, const kv_trace_info *trace);

/* Decision files that rows of the policy `file` read belong to this trace: same layers, KV heads and tokens. KV_E_DATA names both. */
kv_status kv_plan_check_decisions(const kv_plan *plan, const kv_trace_info *trace);

void kv_plan_free(kv_plan *plan);

/* Budget text of contract.md 4: digits are a count, a decimal with '.' or exponent a fraction of `longest`. */
kv_status kv_budget_parse(const char *text, int32_t longest, int32_t *out);

#endif
