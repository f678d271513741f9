/* manifest.json: what produced a results folder, and the identity by which a finished run is found again. */
#ifndef KV_EXPERIMENTS_MANIFEST_H
#define KV_EXPERIMENTS_MANIFEST_H

#include <jansson.h>

#include "experiments/plan.h"
#include "reference/ops.h"

/* What decides the numbers: trace, rows with parameters and weights, run settings, device, model. NULL when memory is short. */
json_t *kv_identity_make(const char *command, const kv_config *config, const kv_trace_info *trace,
                         const kv_plan *plan, const kv_ops *ops, const char *model_hash);

void kv_identity_hash(const json_t *identity,
                      char hex[33]); /* XXH3-128 of the sorted compact text */

/* The manifest of a complete run: identity, command line, build, libraries, machine, times. */
json_t *kv_manifest_make(const json_t *identity, const kv_trace_info *trace, double start,
                         double dense_seconds);

/* True when `folder` holds a complete run of this identity, of this very file, made by this build's sources. */
bool kv_manifest_matches(const char *folder, const json_t *identity, const kv_trace_info *trace);

#endif
