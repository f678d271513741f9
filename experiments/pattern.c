/* Counting evictions by token, kind and head. */
#include "experiments/pattern.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/csv.h"
#include "reference/core/mem.h"

enum { LAST, ALL, RANGES, KINDS = 256 };
enum { PATTERN, KIND, RATIO, TABLES };

static const char *const range_name[RANGES] = {"last", "all"};
static const struct {
    const char *name, *columns;
} tables[TABLES] = {
    {"pattern.csv", "layer,token,kind,kept_heads"},
    {"evict_kind.csv", "tokens,kind,n_token,evict_rate,base_rate"},
    {"evict_ratio.csv", "layer,kv_head,evict_ratio"},
};

typedef struct tally {               /* of one row of the plan */
    int32_t kept[KV_PATTERN_TOKENS]; /* KV heads of this layer that hold the token */
    int64_t gone[RANGES][KINDS];     /* evicted cells, all layers so far */
    int64_t *evicted;                /* [n_kv_head] tokens of this layer */
} tally;

struct kv_pattern {
    FILE *file[TABLES];
    char folder[PATH_MAX];
    const kv_plan *plan;
    const kv_trace_info *trace;
    int32_t document;          /* the pictured one */
    int32_t from[RANGES], end; /* its tokens [from, end) */
    int64_t n_token[RANGES][KINDS];
    int64_t n_short, n_far; /* tokens t <= S-w-1 of all documents; those of them with t >= s */
    tally *row;             /* [n_row] */
};

static void release(kv_pattern *p) {
    for (size_t i = 0; p->row && i < p->plan->n_row; i++) free(p->row[i].evicted);
    for (int i = 0; i < TABLES; i++)
        if (p->file[i]) fclose(p->file[i]);
    free(p->row);
    free(p);
}

/* First token of a document that counts in evict_ratio. */
static int32_t ratio_from(const kv_row *row) {
    return row->policy->kind == KV_PRIORITY ? row->run.sinks : 0;
}

/* Which tokens are looked at; sinks and window are the same in every row. */
static void choose_tokens(kv_pattern *p) {
    const kv_trace_info *t = p->trace;
    const int32_t sinks = p->plan->row[0].run.sinks, window = p->plan->row[0].run.window;
    int64_t longest = -1;
    for (int32_t doc = 0; doc < t->n_document; doc++) {
        int64_t n = t->doc_first[doc + 1] - t->doc_first[doc];
        if (n > window) p->n_short += n - window;
        if (n - window > sinks) p->n_far += n - window - sinks;
        if (n <= longest) continue;
        longest = n;
        p->document = doc;
    }
    p->end = (int32_t)(longest - window);
    p->from[ALL] = sinks;
    p->from[LAST] = p->end - KV_PATTERN_TOKENS > sinks ? p->end - KV_PATTERN_TOKENS : sinks;
    for (int range = 0; t->kind && range < RANGES; range++)
        for (int32_t i = p->from[range]; i < p->end; i++)
            p->n_token[range][t->kind[t->doc_first[p->document] + i]]++;
}

kv_status kv_pattern_open(const char *folder, const kv_plan *plan, const kv_trace_info *trace,
                          kv_pattern **out) {
    kv_status st = KV_OK;
    kv_pattern *p = NULL;
    char path[PATH_MAX + 32];
    KV_NEW(p, 1);
    p->plan = plan;
    p->trace = trace;
    snprintf(p->folder, sizeof p->folder, "%s", folder);
    choose_tokens(p);
    KV_NEW(p->row, plan->n_row);
    for (size_t i = 0; i < plan->n_row; i++) KV_NEW(p->row[i].evicted, trace->n_kv_head);
    for (int i = 0; i < TABLES; i++) {
        snprintf(path, sizeof path, "%s/%s", p->folder, tables[i].name);
        p->file[i] = fopen(path, "w");
        if (!p->file[i]) KV_RAISE(KV_E_CANTCREATE, "cannot create %s: %s", path, strerror(errno));
        fprintf(p->file[i], "policy,variant,budget,%s\n", tables[i].columns);
    }
    *out = p;
    p = NULL;
out:
    if (p) release(p);
    return st;
}

static void add_pictured(kv_pattern *p, tally *row, int32_t token, bool gone) {
    const kv_trace_info *t = p->trace;
    const uint8_t kind = t->kind ? t->kind[t->doc_first[p->document] + token] : 0;
    row->gone[ALL][kind] += gone;
    if (token < p->from[LAST]) return;
    row->gone[LAST][kind] += gone;
    row->kept[token - p->from[LAST]] += !gone;
}

void kv_pattern_add(kv_pattern *p, size_t row, const kv_span *span, const int32_t *evict_at) {
    tally *r = &p->row[row];
    const int32_t window = p->plan->row[row].run.window, from = ratio_from(&p->plan->row[row]);
    const bool pictured = span->first == p->trace->doc_first[p->document];
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token - window; t++) {
            const bool gone = evict_at[h * span->stride + t] < span->n_token;
            r->evicted[h] += gone && t >= from;
            if (pictured && t >= p->from[ALL]) add_pictured(p, r, t, gone);
        }
}

static void put_key(FILE *f, const kv_row *row) {
    fprintf(f, "%s,", row->policy->name);
    kv_csv_put(f, row->variant);
    fprintf(f, ",%d,", row->run.budget);
}

static void put_kind(FILE *f, const kv_trace_info *t, int32_t kind) {
    if (kind < t->n_kind_name)
        kv_csv_put(f, t->kind_name[kind]);
    else
        fprintf(f, "%d", kind);
}

static void write_row(kv_pattern *p, size_t i, int32_t layer_id) {
    const kv_row *row = &p->plan->row[i];
    const kv_trace_info *t = p->trace;
    FILE *f = p->file[PATTERN];
    for (int32_t x = p->from[LAST]; x < p->end; x++) {
        put_key(f, row);
        fprintf(f, "%d,%d,", layer_id, x);
        if (t->kind) put_kind(f, t, t->kind[t->doc_first[p->document] + x]);
        fprintf(f, ",%d\n", p->row[i].kept[x - p->from[LAST]]);
    }
    f = p->file[RATIO];
    const int64_t of = ratio_from(row) > 0 ? p->n_far : p->n_short;
    for (int32_t h = 0; h < t->n_kv_head && of > 0; h++) {
        put_key(f, row);
        fprintf(f, "%d,%d,%.6g\n", layer_id, h, (double)p->row[i].evicted[h] / (double)of);
    }
}

void kv_pattern_write_layer(kv_pattern *p, int32_t layer_id) {
    for (size_t i = 0; i < p->plan->n_row; i++) {
        if (!p->plan->row[i].policy->no_evict_at) write_row(p, i, layer_id);
        memset(p->row[i].kept, 0, sizeof p->row[i].kept);
        memset(p->row[i].evicted, 0, (size_t)p->trace->n_kv_head * sizeof *p->row[i].evicted);
    }
}

/* Cells of a token: layers times KV heads. */
static void write_rates(kv_pattern *p, size_t i, int range) {
    const double cells = (double)p->trace->n_layer * p->trace->n_kv_head;
    const tally *r = &p->row[i];
    FILE *f = p->file[KIND];
    int64_t gone = 0, n = 0;
    for (int32_t kind = 0; kind < KINDS; kind++) {
        gone += r->gone[range][kind];
        n += p->n_token[range][kind];
    }
    for (int32_t kind = 0; kind < KINDS; kind++) {
        const int64_t tokens = p->n_token[range][kind];
        if (tokens == 0) continue;
        put_key(f, &p->plan->row[i]);
        fprintf(f, "%s,", range_name[range]);
        put_kind(f, p->trace, kind);
        fprintf(f, ",%lld,%.6g,%.6g\n", (long long)tokens,
                (double)r->gone[range][kind] / (cells * (double)tokens),
                (double)gone / (cells * (double)n));
    }
}

kv_status kv_pattern_close(kv_pattern *p) {
    kv_status st = KV_OK;
    for (size_t i = 0; i < p->plan->n_row; i++)
        for (int range = 0; range < RANGES && !p->plan->row[i].policy->no_evict_at; range++)
            write_rates(p, i, range);
    for (int i = 0; i < TABLES; i++) {
        bool bad = ferror(p->file[i]) != 0;
        if (fclose(p->file[i]) != 0) bad = true;
        p->file[i] = NULL;
        if (bad && st == KV_OK)
            st = KV_FAIL(KV_E_IO, "writing %s/%s failed: %s", p->folder, tables[i].name,
                         strerror(errno));
    }
    release(p);
    return st;
}
