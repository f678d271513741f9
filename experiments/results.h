/* What a run leaves behind: summary.json, metrics.csv, manifest.json, and the table on the screen (contract.md 4). */
#ifndef KV_EXPERIMENTS_RESULTS_H
#define KV_EXPERIMENTS_RESULTS_H

#include <jansson.h>

#include "experiments/accuracy.h"
#include "experiments/experiment.h"

/* Everything the writers read. */
typedef struct kv_report {
    const kv_config *config;
    const kv_trace_info *trace;
    const kv_plan *plan;
    const kv_row_result *result; /* [plan->n_row] */
    bool has_metrics;            /* false: accuracy only (kvlab evaluate) */
    const kv_accuracy *accuracy; /* [plan->n_row], NULL where no model ran */
} kv_report;

/* summary.json as a value: fixed key order, undefined is null. NULL when memory is short. */
json_t *kv_summary_make(const kv_report *report);

/* metrics.csv: one row per number; undefined values are empty. */
kv_status kv_metrics_csv_write(const kv_report *report, const char *folder);

/* delay.csv: next-token accuracy, agreement and decision accuracy of the learned policies. */
kv_status kv_delay_csv_write(const kv_report *report, const char *folder);

/* The table of a summary on stdout, what each column means, and where the files are. */
void kv_table_print(const json_t *summary, const char *folder, bool explain);

/* Below the table, when `kvlab experiment --decode` has passed: how many rows it decoded. */
void kv_decode_print(const json_t *summary);

/* How many bytes of the variant stand in the label policy:variant. The policy `file` is named without its path, unless two files of
 * `results` would then be called alike (plots/draw.sh does the same). */
int kv_label_length(const json_t *results, const char *policy, const char *variant);

/* JSON is UTF-8, file names and attributes need not be: then every byte beyond ASCII becomes '?'. */
json_t *kv_json_text(const char *text);

/* Reals with 17 digits, one line per key. */
kv_status kv_json_write(const json_t *value, const char *folder, const char *name);
kv_status kv_json_read(const char *folder, const char *name, json_t **out);

#endif
