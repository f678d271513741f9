/* Tables that the pictures of plots/ are drawn from, taken from the summaries of one or several runs. Undefined values are empty.
 *
 *   curve.csv        label,policy,variant,budget,metric,value     one row per number (recall_mean, recall_chance, …)
 *   points.csv       label,policy,variant,budget,recall_mean,retrieval_hit,retained_mass,accuracy_recall
 *                                                                 one row per policy and budget
 *   correlation.csv  metric,rho,n     Spearman's rank correlation of each metric of points.csv with accuracy_recall over the n
 *                                     points that have both; empty below 4 points
 *   power.csv        label,power,budget,accuracy     accuracy_recall by the power of the target (maths.md 2.6, a number or max),
 *                                                    for policies with a parameter `power`; label is the policy
 *
 * Elsewhere label is policy or policy:variant (of `file` without its path, while that tells the files apart), with ; in the place of
 * what a plain field cannot hold. */
#ifndef KV_EXPERIMENTS_PLOT_DATA_H
#define KV_EXPERIMENTS_PLOT_DATA_H

#include <stddef.h>

#include "reference/core/status.h"

enum { KV_CORRELATION_POINTS = 4 };

/* Reads run[i]/summary.json of n_run runs and writes the tables into `folder`, which must exist. KV_E_NOINPUT, KV_E_DATA name the
 * summary and the field; KV_E_CANTCREATE, KV_E_IO the table. */
kv_status kv_plot_data(const char *const *run, size_t n_run, const char *folder);

#endif
