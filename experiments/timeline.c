/* Kept share over query bins and token bins. */
#include "experiments/timeline.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/csv.h"
#include "reference/core/mem.h"

enum { BINS = KV_TIMELINE_BINS };

/* Pairs of a query bin and a token bin: at the ends of intervals, and the change in how many intervals span the query bin wholly. */
typedef struct cell {
    int64_t at_ends, whole;
} cell;

struct kv_timeline {
    FILE *file;
    char path[PATH_MAX];
    const kv_plan *plan;
    int32_t n_kv_head;
    int64_t n_token;
    int64_t start[BINS + 1]; /* first absolute position of each bin */
    cell *
        kept; /* [n_row][n_kv_head][BINS query][BINS token] visible (query, token) pairs of this layer */
    cell *
        pair; /* [BINS query][BINS token] causal pairs of one document each, the same for every row */
    size_t n_kept;
    size_t counted_row; /* pairs are counted with the first row that is added */
    bool any_row;
};

kv_status kv_timeline_open(const char *folder, const kv_plan *plan, const kv_trace_info *trace,
                           kv_timeline **out) {
    kv_status st = KV_OK;
    kv_timeline *t = NULL;
    KV_NEW(t, 1);
    t->plan = plan;
    t->n_kv_head = trace->n_kv_head;
    t->n_token = trace->n_token;
    t->n_kept = plan->n_row * (size_t)trace->n_kv_head * BINS * BINS;
    KV_NEW(t->kept, t->n_kept);
    KV_NEW(t->pair, BINS * BINS);
    for (int64_t bin = 0; bin <= BINS; bin++) t->start[bin] = (bin * t->n_token + BINS - 1) / BINS;
    snprintf(t->path, sizeof t->path, "%s/timeline.csv", folder);
    t->file = fopen(t->path, "w");
    if (!t->file) KV_RAISE(KV_E_CANTCREATE, "cannot create %s: %s", t->path, strerror(errno));
    fputs("policy,variant,budget,layer,kv_head,query_bin,token_bin,kept_share\n", t->file);
    *out = t;
    t = NULL;
out:
    if (t) {
        free(t->kept);
        free(t->pair);
        free(t);
    }
    return st;
}

static int64_t bin_of(const kv_timeline *t, int64_t position) {
    return position * BINS / t->n_token;
}

/* Queries [from, to) see a token of bin `token_bin`: into the query bins of out [BINS query][BINS token]. */
static void add_interval(const kv_timeline *t, int64_t from, int64_t to, int64_t token_bin,
                         cell *out) {
    if (from >= to) return;
    const int64_t first = bin_of(t, from), last = bin_of(t, to - 1);
    cell *column = out + token_bin;
    if (first == last) {
        column[first * BINS].at_ends += to - from;
        return;
    }
    column[first * BINS].at_ends += t->start[first + 1] - from;
    column[last * BINS].at_ends += to - t->start[last];
    column[(first + 1) * BINS].whole++;
    column[last * BINS].whole--;
}

/* Pairs of token bin x in query bins 0..BINS-1. */
static void pairs_of(const kv_timeline *t, const cell *map, int32_t x, int64_t *out) {
    int64_t whole = 0;
    for (int32_t u = 0; u < BINS; u++) {
        const cell *c = &map[u * BINS + x];
        whole += c->whole;
        out[u] = c->at_ends + whole * (t->start[u + 1] - t->start[u]);
    }
}

void kv_timeline_add(kv_timeline *t, size_t row, const kv_span *span, const int32_t *evict_at) {
    if (!t->any_row) t->counted_row = row;
    t->any_row = true;
    int64_t last = span->first + span->n_token;
    for (int32_t i = 0; i < span->n_token; i++) {
        int64_t at = span->first + i, bin = bin_of(t, at);
        if (row == t->counted_row) add_interval(t, at, last, bin, t->pair);
        for (int32_t h = 0; h < t->n_kv_head; h++) {
            int32_t leaves = evict_at[h * span->stride + i];
            int64_t to = leaves >= span->n_token ? last : span->first + leaves;
            const size_t map = (row * (size_t)t->n_kv_head + (size_t)h) * BINS * BINS;
            add_interval(t, at, to, bin, t->kept + map);
        }
    }
}

static void write_map(kv_timeline *t, const kv_row *row, int32_t layer_id, int32_t h,
                      const cell *map) {
    int64_t kept[BINS][BINS], pairs[BINS][BINS]; /* [token bin][query bin] */
    for (int32_t x = 0; x < BINS; x++) {
        pairs_of(t, map, x, kept[x]);
        pairs_of(t, t->pair, x, pairs[x]);
    }
    for (int32_t u = 0; u < BINS; u++)
        for (int32_t x = 0; x <= u; x++) {
            if (pairs[x][u] <= 0) continue;
            fprintf(t->file, "%s,", row->policy->name);
            kv_csv_put(t->file, row->variant);
            fprintf(t->file, ",%d,%d,%d,%d,%d,%.6g\n", row->run.budget, layer_id, h, u, x,
                    (double)kept[x][u] / (double)pairs[x][u]);
        }
}

kv_status kv_timeline_write_layer(kv_timeline *t, int32_t layer_id) {
    const cell *kept = t->kept;
    for (size_t i = 0; i < t->plan->n_row; i++)
        for (int32_t h = 0; h < t->n_kv_head; h++, kept += BINS * BINS)
            if (!t->plan->row[i].policy->no_evict_at)
                write_map(t, &t->plan->row[i], layer_id, h, kept);
    memset(t->kept, 0, t->n_kept * sizeof *t->kept);
    memset(t->pair, 0, BINS * BINS * sizeof *t->pair);
    if (ferror(t->file)) return KV_FAIL(KV_E_IO, "writing %s failed: %s", t->path, strerror(errno));
    return KV_OK;
}

kv_status kv_timeline_close(kv_timeline *t) {
    kv_status st = KV_OK;
    bool bad = ferror(t->file) != 0;
    if (fclose(t->file) != 0) bad = true;
    if (bad) st = KV_FAIL(KV_E_IO, "writing %s failed: %s", t->path, strerror(errno));
    free(t->kept);
    free(t->pair);
    free(t);
    return st;
}
