/* Typed parameters: one const table per policy or group of options gives name, help, type, default and bounds; the command line,
 * `kvlab policies`, the results and the README read the same table. */
#ifndef KV_CORE_PARAM_H
#define KV_CORE_PARAM_H

#include <stddef.h>

#include "reference/core/status.h"

typedef enum kv_param_type {
    KV_PARAM_INT,  /* whole number within [min, max] */
    KV_PARAM_REAL, /* within [min, max]; the word "max" means infinity if `choices` is "max" */
    KV_PARAM_CHOICE, /* one of `choices`, '|'-separated; the first is the default; its index is the value */
    KV_PARAM_TEXT, /* free text, default `default_text` */
} kv_param_type;

typedef struct kv_param {
    const char *name, *help;
    kv_param_type type;
    double default_value, min, max;
    int min_open; /* min itself is excluded */
    const char *choices, *default_text;
} kv_param;

enum { KV_PARAM_MAX = 32 };

/* The values of one table. `spec` ends with a nameless entry (NULL table: no parameters). */
typedef struct kv_params {
    const kv_param *spec;
    size_t n;
    double value[KV_PARAM_MAX];
    char *text[KV_PARAM_MAX]; /* KV_PARAM_TEXT only, owned */
} kv_params;

kv_status kv_params_init(kv_params *p, const kv_param *spec);
void kv_params_free(kv_params *p);
kv_status kv_params_copy(kv_params *dst, const kv_params *src);

/* Sets one value from text. KV_E_USAGE names `owner` (for example "h2o"), the key, the value, and what is allowed. */
kv_status kv_params_set(kv_params *p, const char *owner, const char *key, const char *value);

double kv_params_real(const kv_params *p, const char *name); /* the name must exist */
int kv_params_int(const kv_params *p, const char *name);     /* also the index of a choice */
const char *kv_params_text(const kv_params *p, const char *name);

/* Text of value i as the results print it: shortest decimal form, choice word, "max" for infinity. */
void kv_params_format(const kv_params *p, size_t i, char *out, size_t size);

/* "key=value" of everything that differs from the built-in default, sorted by key, joined by ':' ("" if nothing does). */
void kv_params_variant(const kv_params *p, char *out, size_t size);

/* Strict number parsing: the whole text, no blanks, no overflow. */
kv_status kv_parse_int(const char *text, long long min, long long max, long long *out);
kv_status kv_parse_real(const char *text, double *out); /* finite */
void kv_format_real(double x, char *out,
                    size_t size); /* shortest decimal form that reads back equal */

#endif
