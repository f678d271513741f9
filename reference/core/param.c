/* Typed parameter tables. */
#include "reference/core/param.h"

#include <ctype.h>
#include <stdint.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"

kv_status kv_parse_int(const char *text, long long min, long long max, long long *out) {
    char *end;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    if (text[0] == '\0' || isspace((unsigned char)text[0]) || text[0] == '+' || *end != '\0')
        return KV_FAIL(KV_E_USAGE, "'%s' is not a whole number", text);
    if (errno == ERANGE || x < min || x > max)
        return KV_FAIL(KV_E_USAGE, "%s is outside [%lld, %lld]", text, min, max);
    *out = x;
    return KV_OK;
}

kv_status kv_parse_real(const char *text, double *out) {
    char *end;
    double x = strtod(text, &end);
    int plain =
        text[0] != '\0' && strspn(text, "0123456789+-.eE") == strlen(text) && text[0] != '+';
    if (!plain || *end != '\0' || !isfinite(x))
        return KV_FAIL(KV_E_USAGE, "'%s' is not a decimal number", text);
    *out = x;
    return KV_OK;
}

void kv_format_real(double x, char *out, size_t size) {
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(out, size, "%.*g", digits, x);
        if (strtod(out, NULL) == x) break;
    }
    if (fabs(x) < 1e15 && x == floor(x)) snprintf(out, size, "%.0f", x); /* 400, not 4e+02 */
}

static size_t choice_count(const char *choices) {
    size_t n = 1;
    for (const char *c = choices; *c; c++) n += *c == '|';
    return n;
}

static void choice_word(const char *choices, size_t index, char *out, size_t size) {
    const char *start = choices;
    while (index--) start = strchr(start, '|') + 1;
    snprintf(out, size, "%.*s", (int)strcspn(start, "|"), start);
}

kv_status kv_params_init(kv_params *p, const kv_param *spec) {
    kv_status st = KV_OK;
    memset(p, 0, sizeof *p);
    p->spec = spec;
    for (size_t i = 0; spec && spec[i].name; i++, p->n++) {
        if (i == KV_PARAM_MAX)
            KV_RAISE(KV_E_INTERNAL, "more than %d parameters in one table", KV_PARAM_MAX);
        p->value[i] = spec[i].type == KV_PARAM_CHOICE ? 0 : spec[i].default_value;
        if (spec[i].type != KV_PARAM_TEXT) continue;
        p->text[i] = kv_strdup(spec[i].default_text ? spec[i].default_text : "");
        if (!p->text[i]) return KV_E_INTERNAL;
    }
out:
    return st;
}

void kv_params_free(kv_params *p) {
    for (size_t i = 0; i < p->n; i++) free(p->text[i]);
    memset(p, 0, sizeof *p);
}

kv_status kv_params_copy(kv_params *dst, const kv_params *src) {
    *dst = *src;
    memset(dst->text, 0, sizeof dst->text);
    for (size_t i = 0; i < src->n; i++)
        if (src->text[i] && !(dst->text[i] = kv_strdup(src->text[i]))) return KV_E_INTERNAL;
    return KV_OK;
}

static kv_status unknown_key(const kv_params *p, const char *owner, const char *key) {
    char known[512] = "";
    for (size_t i = 0; i < p->n; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", p->spec[i].name);
    }
    return KV_FAIL(KV_E_USAGE, "%s has no parameter '%s'; it knows: %s", owner, key,
                   p->n ? known : "none");
}

static kv_status set_choice(kv_params *p, size_t i, const char *owner, const char *value) {
    const kv_param *s = &p->spec[i];
    char word[64];
    for (size_t c = 0; c < choice_count(s->choices); c++) {
        choice_word(s->choices, c, word, sizeof word);
        if (strcmp(word, value) != 0) continue;
        p->value[i] = (double)c;
        return KV_OK;
    }
    return KV_FAIL(KV_E_USAGE, "%s.%s: '%s' is not one of %s", owner, s->name, value, s->choices);
}

static kv_status set_number(kv_params *p, size_t i, const char *owner, const char *value) {
    const kv_param *s = &p->spec[i];
    double x = INFINITY;
    long long whole = 0;
    if (s->type == KV_PARAM_REAL && s->choices && strcmp(value, s->choices) == 0) {
        p->value[i] = INFINITY;
        return KV_OK;
    }
    kv_status st = s->type == KV_PARAM_INT
                       ? kv_parse_int(value, (long long)s->min, (long long)s->max, &whole)
                       : kv_parse_real(value, &x);
    if (st != KV_OK) return kv_error_context(st, "%s.%s", owner, s->name);
    if (s->type == KV_PARAM_INT) x = (double)whole;
    if (x < s->min || x > s->max || (s->min_open && x == s->min))
        return KV_FAIL(KV_E_USAGE, "%s.%s: %s is outside %c%g, %g]%s%s", owner, s->name, value,
                       s->min_open ? '(' : '[', s->min, s->max,
                       s->choices ? " and is not the word " : "", s->choices ? s->choices : "");
    p->value[i] = x == 0 ? 0 : x;
    return KV_OK;
}

kv_status kv_params_set(kv_params *p, const char *owner, const char *key, const char *value) {
    for (size_t i = 0; i < p->n; i++) {
        if (strcmp(p->spec[i].name, key) != 0) continue;
        if (p->spec[i].type == KV_PARAM_CHOICE) return set_choice(p, i, owner, value);
        if (p->spec[i].type != KV_PARAM_TEXT) return set_number(p, i, owner, value);
        char *copy = kv_strdup(value);
        if (!copy) return KV_E_INTERNAL;
        free(p->text[i]);
        p->text[i] = copy;
        return KV_OK;
    }
    return unknown_key(p, owner, key);
}

static size_t find(const kv_params *p, const char *name) {
    size_t i = 0;
    while (i < p->n && strcmp(p->spec[i].name, name) != 0) i++;
    return i;
}

double kv_params_real(const kv_params *p, const char *name) {
    size_t i = find(p, name);
    return i < p->n ? p->value[i] : NAN;
}

int kv_params_int(const kv_params *p, const char *name) {
    size_t i = find(p, name);
    return i < p->n ? (int)p->value[i] : 0;
}

const char *kv_params_text(const kv_params *p, const char *name) {
    size_t i = find(p, name);
    return i < p->n && p->text[i] ? p->text[i] : "";
}

void kv_params_format(const kv_params *p, size_t i, char *out, size_t size) {
    const kv_param *s = &p->spec[i];
    if (s->type == KV_PARAM_TEXT)
        snprintf(out, size, "%s", p->text[i]);
    else if (s->type == KV_PARAM_CHOICE)
        choice_word(s->choices, (size_t)p->value[i], out, size);
    else if (isinf(p->value[i]))
        snprintf(out, size, "max");
    else
        kv_format_real(p->value[i], out, size);
}

static int is_default(const kv_params *p, size_t i) {
    const kv_param *s = &p->spec[i];
    if (s->type == KV_PARAM_TEXT)
        return strcmp(p->text[i], s->default_text ? s->default_text : "") == 0;
    return p->value[i] == (s->type == KV_PARAM_CHOICE ? 0 : s->default_value);
}

void kv_params_variant(const kv_params *p, char *out, size_t size) {
    size_t order[KV_PARAM_MAX], n = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (is_default(p, i)) continue;
        size_t at = n++;
        while (at > 0 && strcmp(p->spec[order[at - 1]].name, p->spec[i].name) > 0) {
            order[at] = order[at - 1];
            at--;
        }
        order[at] = i;
    }
    out[0] = '\0';
    for (size_t j = 0; j < n; j++) {
        char value[256];
        kv_params_format(p, order[j], value, sizeof value);
        size_t used = strlen(out);
        if (used + 1 < size)
            snprintf(out + used, size - used, "%s%s=%s", j ? ":" : "", p->spec[order[j]].name,
                     value);
    }
}
