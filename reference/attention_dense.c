/* Dense sweep: one QK^T per query head yields the log-sum-exp, column sums of several powers, long-range mass, the largest
 * long-range probability and the output (maths.md 2; contract.md 3).
 *
 * A panel of rows keeps its exponentials for all keys (rows x S, cache-sized) until the rows' sums are known; then every column adds
 * its share. Two passes over QK^T would cost 1.7 times as much. Sums over queries: fp32 inside a panel, double beyond. A head is cut
 * into slabs of equal area whose columns are summed apart and joined in order, so that the thread count changes nothing. */
#include "reference/attention.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "reference/attention_panel.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"

/* Slabs of all heads together: enough for many threads, few enough for the memory of their columns. */
enum { UNITS = 64 };

static const double log2_e = 1.44269504088896340736;

/* Per thread. */
typedef struct scratch {
    float *queries, *output; /* of the panel */
    float *store;            /* [n_chunk][n_row][KV_CHUNK_KEYS] exponentials, or logits */
    float *work;             /* [n_row][KV_CHUNK_KEYS] exponentials while the store holds logits */
    float *anchor; /* [n_chunk][KV_PANEL_ROWS] running maximum that the exponentials refer to */
} scratch;

typedef struct sweep {
    const kv_span *span;
    const kv_dense_request *request;
    kv_dense *out;
    kv_panel_shape shape;
    kv_packed packed;
    bool keep_logits; /* columns come from logits: another power than 1, 2, max, or a given lse */
    int32_t n_row;    /* queries of a panel */
    size_t cells;     /* n_row * KV_CHUNK_KEYS */
    int32_t n_slab;   /* per head */
    size_t width;     /* columns of a partial sum: n_chunk * KV_CHUNK_KEYS */
    double *partial;  /* [n_q_head][n_slab][n_power][width] */
    scratch *scratch; /* [threads] */
    int32_t n_scratch;
} sweep;

/* First panel of slab b: the triangle's area up to there is b / n_slab of the whole. */
static int32_t slab_start(const sweep *s, int32_t b) {
    const int32_t n_panel = (s->span->n_token + s->n_row - 1) / s->n_row;
    return (int32_t)ceil(n_panel * sqrt((double)b / s->n_slab));
}

/* Window and causality of the columns: cells of the store with key > u - window count nothing. Returns the number of columns that
 * any row of the panel reaches. */
static int32_t cut_window(const sweep *s, const scratch *x, const kv_panel *p) {
    const int32_t n = p->first + p->n_row - s->request->window;
    if (n <= 0) return 0;
    const int32_t end = kv_round_up(n, s->shape.kernel->tile_keys);
    for (int32_t r = 0; r < p->n_row; r++) {
        const int32_t reach = p->first + r - s->request->window + 1;
        for (int32_t t = reach > 0 ? reach : 0; t < end; t++)
            x->store[(size_t)(t / KV_CHUNK_KEYS) * s->cells + (size_t)(r * KV_CHUNK_KEYS) +
                     (size_t)(t % KV_CHUNK_KEYS)] = s->keep_logits ? -INFINITY : 0.0f;
    }
    return n;
}

/* Normaliser of the column sums in units of log 2, as a sum of two floats. */
static void normaliser(const sweep *s, const kv_panel *p, float *high, float *low) {
    for (int32_t r = 0; r < p->n_row; r++) {
        const double given =
            s->request->lse ? (double)s->request->lse[p->row + (size_t)r] * log2_e : 0;
        high[r] = s->request->lse ? (float)given : p->softmax.max[r];
        low[r] = (float)(s->request->lse ? given - (double)high[r] : log2(p->softmax.sum[r]));
    }
}

static void add_columns(const sweep *s, const scratch *x, const kv_panel *p, double *partial) {
    const kv_attention_kernel *kernel = s->shape.kernel;
    const int32_t n_column = cut_window(s, x, p);
    float high[KV_PANEL_ROWS], low[KV_PANEL_ROWS], weight[KV_PANEL_ROWS];
    if (s->keep_logits) normaliser(s, p, high, low);
    for (int32_t c = 0; c * KV_CHUNK_KEYS < n_column; c++) {
        const float *cells = x->store + (size_t)c * s->cells,
                    *anchor = x->anchor + c * KV_PANEL_ROWS;
        const int32_t left = n_column - c * KV_CHUNK_KEYS;
        const int32_t n_key = left < KV_CHUNK_KEYS ? left : KV_CHUNK_KEYS;
        for (int32_t r = 0; r < p->n_row && !s->keep_logits; r++)
            if (c == 0 || anchor[r] != anchor[r - KV_PANEL_ROWS])
                weight[r] = (float)(exp2((double)anchor[r] - (double)p->softmax.max[r]) /
                                    p->softmax.sum[r]);
        for (int32_t i = 0; i < s->request->n_power; i++) {
            const double power = s->request->power[i];
            double *column = partial + (size_t)i * s->width + (size_t)(c * KV_CHUNK_KEYS);
            if (s->keep_logits)
                kernel->add_power(cells, high, low, p->n_row, n_key, power, column);
            else
                (power == 1   ? kernel->add_p
                 : power == 2 ? kernel->add_p2
                              : kernel->max_p)(cells, weight, p->n_row, n_key, column);
        }
    }
}

/* Per-query results of a finished panel. */
static void store_rows(const sweep *s, const kv_panel *p) {
    const kv_dense *out = s->out;
    for (int32_t r = 0; r < p->n_row; r++) {
        const kv_softmax *x = &p->softmax;
        const size_t at = p->row + (size_t)r;
        out->lse[at] = (float)kv_softmax_lse(x->max[r], x->sum[r]);
        if (!s->request->want_events) continue;
        const float top = (float)(exp2((double)x->top[r] - (double)x->max[r]) / x->sum[r]);
        const bool seen = top >= 0x1p-126f; /* else every long-range probability counts as 0 */
        out->top_p[at] = seen ? top : 0.0f;
        out->top_t[at] = x->top_key[r] < 0 || seen ? x->top_key[r] : s->request->sinks;
        out->long_mass[at] = seen ? (float)(x->far[r] / x->sum[r]) : 0.0f;
    }
    if (out->o) kv_panel_output(p, &s->shape, out->o + p->row * (size_t)s->shape.head_dim);
}

static void sweep_panel(const sweep *s, const scratch *x, int32_t head, int32_t first,
                        double *partial) {
    const kv_panel_shape *shape = &s->shape;
    kv_panel p = {.queries = x->queries, .output = x->output};
    kv_panel_begin(&p, shape, s->span, head, first, s->n_row);
    const int32_t last = first + p.n_row - 1;
    for (int32_t c = 0; c * KV_CHUNK_KEYS <= last; c++) {
        const kv_chunk chunk = kv_packed_chunk(&s->packed, shape, head / shape->group, c, last);
        float *cells = x->store + (size_t)c * s->cells, row_max[KV_PANEL_ROWS];
        float *e = s->keep_logits ? x->work : cells;
        kv_panel_logits(&p, shape, &chunk, cells, row_max);
        kv_softmax_add(&p.softmax, shape, &chunk, first, p.n_row, row_max, cells, e);
        memcpy(x->anchor + c * KV_PANEL_ROWS, p.softmax.max, sizeof p.softmax.max);
        if (shape->want_output) kv_panel_values(&p, shape, &chunk, e);
    }
    if (s->request->n_power > 0) add_columns(s, x, &p, partial);
    store_rows(s, &p);
}

static void sweep_slab(const sweep *s, int32_t unit) {
    const int32_t b = unit % s->n_slab, end = slab_start(s, b + 1);
    double *partial = s->partial + (size_t)unit * (size_t)s->request->n_power * s->width;
    for (int32_t panel = slab_start(s, b); panel < end && kv_interrupt_poll() == KV_OK; panel++)
        sweep_panel(s, &s->scratch[omp_get_thread_num()], unit / s->n_slab, panel * s->n_row,
                    partial);
}

/* Columns of all slabs joined, in slab order; fails if a sum left the range of double. */
static kv_status join_slabs(const sweep *s) {
    const kv_dense_request *request = s->request;
    for (int32_t head = 0; head < s->span->n_q_head; head++)
        for (int32_t i = 0; i < request->n_power; i++) {
            double *column = s->out->column[i] + (size_t)head * (size_t)s->span->stride;
            for (int32_t b = 0; b < s->n_slab; b++) {
                const size_t unit = (size_t)head * (size_t)s->n_slab + (size_t)b;
                const double *part =
                    s->partial + (unit * (size_t)request->n_power + (size_t)i) * s->width;
                for (int32_t t = 0; t < s->span->n_token; t++)
                    column[t] =
                        isinf(request->power[i]) ? fmax(column[t], part[t]) : column[t] + part[t];
            }
            for (int32_t t = 0; t < s->span->n_token; t++)
                if (!isfinite(column[t]))
                    return KV_FAIL(
                        KV_E_DATA,
                        "query head %d, key %d: the sum of p^%g leaves the range of double: "
                        "the logits are too large (check q, k and the softmax scale), "
                        "or the given normaliser is too small for this power",
                        head, t, request->power[i]);
        }
    return KV_OK;
}

static kv_status check_request(const kv_dense_request *r) {
    if (r->n_power < 0 || r->n_power > KV_DENSE_POWERS)
        return KV_FAIL(KV_E_INTERNAL, "%d powers asked for, 0 to %d are possible", r->n_power,
                       KV_DENSE_POWERS);
    for (int32_t i = 0; i < r->n_power; i++)
        if (!(r->power[i] > 0))
            return KV_FAIL(KV_E_USAGE, "power %g of the future mass: must be above 0", r->power[i]);
    if (r->window < 1 || r->sinks < 0)
        return KV_FAIL(KV_E_USAGE, "sinks %d, window %d: sinks >= 0 and window >= 1 are needed",
                       r->sinks, r->window);
    return KV_OK;
}

static kv_status allocate(sweep *s) {
    kv_status st = KV_OK;
    const kv_dense_request *r = s->request;
    const size_t cells = (size_t)s->span->n_q_head * (size_t)s->span->stride;
    const size_t n_chunk = (size_t)s->packed.n_chunk;
    KV_NEW(s->out->lse, cells);
    for (int32_t i = 0; i < r->n_power; i++) KV_NEW(s->out->column[i], cells);
    if (r->want_events) {
        KV_NEW(s->out->long_mass, cells);
        KV_NEW(s->out->top_p, cells);
        KV_NEW(s->out->top_t, cells);
    }
    if (r->want_output) KV_NEW(s->out->o, cells * (size_t)s->shape.head_dim);
    KV_NEW(s->partial,
           (size_t)s->span->n_q_head * (size_t)s->n_slab * (size_t)r->n_power * s->width);
    KV_NEW(s->scratch, s->n_scratch);
    for (int32_t i = 0; i < s->n_scratch; i++) {
        KV_NEW(s->scratch[i].queries, KV_PANEL_ROWS * s->shape.head_dim);
        KV_NEW(s->scratch[i].output, KV_PANEL_ROWS * s->shape.padded_dim);
        KV_NEW(s->scratch[i].store, n_chunk * s->cells);
        KV_NEW(s->scratch[i].work, s->cells);
        KV_NEW(s->scratch[i].anchor, n_chunk * KV_PANEL_ROWS);
    }
out:
    return st;
}

static void release(sweep *s) {
    kv_packed_free(&s->packed);
    free(s->partial);
    for (int32_t i = 0; s->scratch && i < s->n_scratch; i++) {
        free(s->scratch[i].queries);
        free(s->scratch[i].output);
        free(s->scratch[i].store);
        free(s->scratch[i].work);
        free(s->scratch[i].anchor);
    }
    free(s->scratch);
}

kv_status kv_dense_compute(const kv_span *span, const kv_dense_request *request, kv_dense *out) {
    kv_status st = KV_OK;
    sweep s = {.span = span, .request = request, .out = out, .n_scratch = kv_threads()};
    *out = (kv_dense){.request = *request, .stride = span->stride};
    KV_TRY(check_request(request));
    KV_TRY(kv_panel_shape_make(span, &s.shape));
    s.shape.sinks = request->sinks;
    s.shape.window = request->window;
    s.shape.want_long = s.shape.want_top = request->want_events;
    s.shape.want_output = request->want_output;
    s.keep_logits = request->lse != NULL;
    for (int32_t i = 0; i < request->n_power; i++)
        s.keep_logits |=
            request->power[i] != 1 && request->power[i] != 2 && !isinf(request->power[i]);
    /* the store of a panel must stay near L2; what it loses in reuse of keys costs less (measured at 512 KiB) */
    s.n_row = span->n_token > 8192 ? KV_PANEL_ROWS / 2 : KV_PANEL_ROWS;
    s.cells = (size_t)s.n_row * KV_CHUNK_KEYS;
    s.n_slab = UNITS / span->n_q_head > 1 ? UNITS / span->n_q_head : 1;
    KV_TRY(kv_packed_make(span, &s.shape, &s.packed));
    s.width = (size_t)s.packed.n_chunk * KV_CHUNK_KEYS;
    KV_TRY(allocate(&s));
#pragma omp parallel num_threads(s.n_scratch)
    {
        const unsigned mode = kv_flush_begin();
#pragma omp for schedule(dynamic, 1)
        for (int32_t unit = 0; unit < span->n_q_head * s.n_slab; unit++) sweep_slab(&s, unit);
        kv_flush_end(mode);
    }
    KV_TRY(kv_interrupt_poll());
    KV_TRY(join_slabs(&s));
out:
    release(&s);
    if (st != KV_OK) kv_dense_free(out);
    return st;
}

void kv_dense_free(kv_dense *d) {
    if (!d) return;
    free(d->lse);
    for (int i = 0; i < KV_DENSE_POWERS; i++) free(d->column[i]);
    free(d->long_mass);
    free(d->top_p);
    free(d->top_t);
    free(d->o);
    *d = (kv_dense){0};
}
