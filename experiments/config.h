/* Settings of `kvlab experiment` and `kvlab evaluate`: built-in defaults < INI file < command line.
 *
 * Every setting is one (section, key, value) triple, whatever its origin, so file and command line cannot drift apart. Sections:
 *   [trace]        path
 *   [sweep]        policies, budgets (comma lists, expanded to the product)
 *   [policy.NAME]  the policy's parameters, and `weights` for a learned one
 *   [run]          name, sinks, window, seed, eps, oracle_delta, target_reduce, device, model, output, save_evict, decode, force */
#ifndef KV_EXPERIMENTS_CONFIG_H
#define KV_EXPERIMENTS_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "policies/policy.h"

typedef struct kv_setting { /* policy.key=value, in the order given; later ones win */
    char *policy, *key, *value;
} kv_setting;

typedef struct kv_config {
    kv_params run; /* single-valued settings, table kv_config_spec */
    kv_setting *setting;
    size_t n_setting;
} kv_config;

extern const kv_param kv_config_spec[];

kv_status kv_config_init(kv_config *c);
void kv_config_free(kv_config *c);

/* KV_E_USAGE on an unknown section, key or policy, or a value out of bounds. */
kv_status kv_config_set(kv_config *c, const char *section, const char *key, const char *value);

/* --set policy.key=value or run.key=value */
kv_status kv_config_set_text(kv_config *c, const char *text);

/* Reads an INI file; errors carry file:line. KV_E_NOINPUT when it cannot be read, KV_E_USAGE for its contents. */
kv_status kv_config_file(kv_config *c, const char *path);

const char *kv_config_text(const kv_config *c, const char *key);
bool kv_config_flag(const kv_config *c, const char *key);

/* Sinks, window, seed, eps, oracle_delta, target reduction; budget 0. KV_E_USAGE on a bad seed. */
kv_status kv_config_run(const kv_config *c, kv_run *run);

#endif
