/* key=value texts against a parameter table: refused, or a value within bounds that prints and reads back. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/param.h"
#include "tests/fuzz/bytes.h"

static const kv_param table[] = {
    {.name = "count", .type = KV_PARAM_INT, .default_value = 4, .min = 0, .max = 100},
    {.name = "share", .type = KV_PARAM_REAL, .default_value = 0.5, .min = 0, .max = 1},
    {.name = "power",
     .type = KV_PARAM_REAL,
     .default_value = 1,
     .min = 0,
     .min_open = 1,
     .max = 16,
     .choices = "max"},
    {.name = "reduce", .type = KV_PARAM_CHOICE, .choices = "layer|head"},
    {.name = "path", .type = KV_PARAM_TEXT, .default_text = ""},
    {0},
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char text[256] = "", shown[256], variant[1024];
    kv_params p, again;
    double x;
    memcpy(text, data, size < 255 ? size : 255);
    char *value = strchr(text, '=');
    if (kv_parse_real(text, &x) == KV_OK) {
        double back;
        kv_format_real(x, shown, sizeof shown);
        if (kv_parse_real(shown, &back) != KV_OK || back != x) abort();
    }
    if (!value) return 0;
    *value++ = '\0';
    if (kv_params_init(&p, table) != KV_OK || kv_params_init(&again, table) != KV_OK) abort();
    if (kv_params_set(&p, "fuzz", text, value) == KV_OK) {
        size_t i = 0;
        while (strcmp(table[i].name, text) != 0) i++;
        bool unbounded = table[i].choices && isinf(p.value[i]);
        if (table[i].type <= KV_PARAM_REAL && !unbounded &&
            !(p.value[i] >= table[i].min && p.value[i] <= table[i].max))
            abort();
        kv_params_variant(&p, variant, sizeof variant);
        kv_params_format(&p, i, shown, sizeof shown);
        if (kv_params_set(&again, "fuzz", text, shown) != KV_OK) abort();
        if (p.value[i] != again.value[i]) abort();
    }
    kv_params_free(&p);
    kv_params_free(&again);
    return 0;
}
