/* Closed-loop replay of tova, h2o and cumulative (contract.md 1, 2): attend over the B+1 slots, update the statistic, evict.
 *
 * The keys of a set change by one slot per query, so KV_LOOP_STEP queries are handled together: the logits and exponentials of all
 * of them against the slots as they stand, and against each other's keys, are formed first (a matrix product instead of
 * KV_LOOP_STEP matrix-vector products); then the queries are walked one by one, each putting its own column into the slot that is
 * free by then. The exponentials are taken relative to the largest logit over all those keys; only if that key was evicted in
 * between (the sum falls below 1) are the rows of that query formed again. The bits are those of the query-by-query computation.
 *
 * Threads share the sets of a call, so a per-layer rule runs on one: waiting for each other at every few queries costs more than it
 * gains as soon as a core is busy elsewhere. Callers run several layers at a time (experiments/replay_ahead.c). */
#include <math.h>
#include <string.h>

#include "reference/closed_loop.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"
#include "reference/replay.h"

enum { STEP = KV_LOOP_STEP, FREE = INT32_MAX };

/* The slots that one set of decisions governs: one KV head, or all of them (per_layer). A lane is one KV head of the set. */
typedef struct slots {
    const kv_span *span;
    const kv_loop_kernel *kernel;
    const kv_attention_rule *rule;
    int32_t budget, first_head, n_lane, group;
    int32_t n_used; /* slots in use so far; once budget + 1, `free` is the one without a key */
    int32_t free;
    int32_t n_padded;  /* budget + 1 rounded up to panels */
    int32_t *time;     /* [n_padded] position of the slot's key, FREE if it has none */
    double *a;         /* [n_padded] statistic */
    float *panels;     /* [n_lane][n_padded / panel][head_dim][panel] keys */
    float *arrivals;   /* [n_lane][head_dim][panel] keys of the queries in work */
    float *q;          /* [n_lane][group][STEP][head_dim] */
    float *e;          /* [n_lane][group][STEP][n_padded] logits, then exponentials */
    float *e_arrival;  /* [n_lane][group][STEP][panel] the same against the arrivals */
    float *again;      /* [STEP][n_padded] scratch */
    const float **row; /* [n_lane * group] rows of the query in work */
    double *inverse;   /* [n_lane * group] */
    float *tiny;       /* [n_lane * group] */
} slots;

const kv_loop_kernel *kv_loop_kernel_best(void) {
    static const kv_loop_kernel *const kernels[] = {
        [KV_ISA_GENERIC] = &kv_loop_kernel_generic,
        [KV_ISA_AVX2] = &kv_loop_kernel_avx2,
        [KV_ISA_AVX512] = &kv_loop_kernel_avx512,
    };
    return kernels[kv_cpu_isa()];
}

static void slots_free(slots *s) {
    free(s->time);
    free(s->a);
    free(s->panels);
    free(s->arrivals);
    free(s->q);
    free(s->e);
    free(s->e_arrival);
    free(s->again);
    free(s->row);
    free(s->inverse);
    free(s->tiny);
}

static kv_status slots_new(slots *s, const kv_span *span, const kv_attention_rule *rule,
                           int32_t budget, int32_t first_head, int32_t n_lane) {
    kv_status st = KV_OK;
    const kv_loop_kernel *kernel = kv_loop_kernel_best();
    const int32_t panel = kernel->panel, d = span->head_dim;
    *s = (slots){.span = span,
                 .kernel = kernel,
                 .rule = rule,
                 .budget = budget,
                 .first_head = first_head,
                 .n_lane = n_lane,
                 .group = span->n_q_head / span->n_kv_head,
                 .n_padded = (budget + panel) / panel * panel};
    const size_t lanes = (size_t)n_lane, rows = lanes * (size_t)s->group, n = (size_t)s->n_padded;
    KV_NEW(s->time, n);
    KV_NEW(s->a, n);
    KV_NEW(s->panels, lanes * n * (size_t)d);
    KV_NEW(s->arrivals, lanes * (size_t)(d * panel));
    KV_NEW(s->q, rows * (size_t)(STEP * d));
    KV_NEW(s->e, rows * STEP * n);
    KV_NEW(s->e_arrival, rows * (size_t)(STEP * panel));
    KV_NEW(s->again, STEP * n);
    KV_NEW(s->row, rows);
    KV_NEW(s->inverse, rows);
    KV_NEW(s->tiny, rows);
    for (size_t i = 0; i < n; i++) s->time[i] = FREE;
out:
    return st;
}

static const float *key_of(const slots *s, int32_t lane, int32_t t) {
    const kv_span *x = s->span;
    return x->k +
           ((size_t)(s->first_head + lane) * (size_t)x->stride + (size_t)t) * (size_t)x->head_dim;
}

/* Writes key t of a lane into column `slot` of a block of panels. */
static void put_key(const slots *s, float *panels, int32_t lane, int32_t slot, int32_t t) {
    const int32_t panel = s->kernel->panel, d = s->span->head_dim;
    const float *key = key_of(s, lane, t);
    float *column = panels + (size_t)(slot / panel) * (size_t)(d * panel) + slot % panel;
    for (int32_t c = 0; c < d; c++) column[(size_t)c * (size_t)panel] = key[c];
}

static float *lane_panels(const slots *s, int32_t lane) {
    return s->panels + (size_t)lane * (size_t)s->n_padded * (size_t)s->span->head_dim;
}

/* Slots in use rounded up to whole panels. */
static int32_t extent(const slots *s, int32_t n_used) {
    const int32_t panel = s->kernel->panel;
    return (n_used + panel - 1) / panel * panel;
}

/* Logits of one row become exponentials; `held` slots and the arrivals 0..n_arrival-1 are visible. */
static void exponentials(const slots *s, float *e, int32_t held, float *e_arrival,
                         int32_t n_arrival) {
    const kv_loop_kernel *f = s->kernel;
    const int32_t n = extent(s, held), panel = f->panel;
    if (s->span->softcap > 0) {
        f->softcap(e, n, s->span->softcap);
        f->softcap(e_arrival, panel, s->span->softcap);
    }
    for (int32_t i = held; i < n; i++) e[i] = -INFINITY;
    if (held > s->budget && s->time[s->free] == FREE) e[s->free] = -INFINITY;
    for (int32_t i = n_arrival; i < panel; i++) e_arrival[i] = -INFINITY;
    const float top = fmaxf(f->maximum(e, n), f->maximum(e_arrival, panel));
    f->exponential(e, n, top);
    f->exponential(e_arrival, panel, top);
}

/* Rows of the queries u .. u + n_query - 1 in one lane. */
static void lane_rows(slots *s, int32_t lane, int32_t u, int32_t n_query) {
    const kv_loop_kernel *f = s->kernel;
    const kv_span *x = s->span;
    const int32_t d = x->head_dim, panel = f->panel, group = s->group;
    const size_t n = (size_t)s->n_padded, first_row = (size_t)(lane * group * STEP);
    float *q = s->q + first_row * (size_t)d, *e = s->e + first_row * n,
          *e_arrival = s->e_arrival + first_row * (size_t)panel,
          *arrivals = s->arrivals + (size_t)lane * (size_t)(d * panel);
    for (int32_t g = 0; g < group; g++) {
        const size_t head = (size_t)((s->first_head + lane) * group + g);
        memcpy(q + (size_t)(g * STEP * d),
               x->q + (head * (size_t)x->stride + (size_t)u) * (size_t)d,
               (size_t)(n_query * d) * sizeof *q);
    }
    for (int32_t i = 0; i < n_query; i++) put_key(s, arrivals, lane, i, u + i);
    f->logits(q, lane_panels(s, lane), group, extent(s, s->n_used) / panel, d, x->scale, e, n);
    f->logits(q, arrivals, group, 1, d, x->scale, e_arrival, (size_t)panel);
    const int32_t last = s->n_used + n_query <= s->budget ? s->n_used + n_query : s->budget + 1;
    for (int32_t r = 0; r < group * STEP; r++) {
        if (r % STEP >= n_query) continue;
        exponentials(s, e + (size_t)r * n, s->n_used, e_arrival + r * panel, r % STEP + 1);
        for (int32_t i = extent(s, s->n_used); i < extent(s, last); i++)
            e[(size_t)r * n + (size_t)i] = 0;
    }
}

/* Query i of those in work again, in one tile, from the keys that are held now (its own included). */
static void row_again(slots *s, int32_t tile, int32_t i) {
    const kv_loop_kernel *f = s->kernel;
    const int32_t d = s->span->head_dim;
    const size_t n = (size_t)s->n_padded;
    float *e = s->e + ((size_t)tile * STEP + (size_t)i) * n,
          *e_arrival = s->e_arrival + (size_t)((tile * STEP + i) * f->panel);
    f->logits(s->q + (size_t)tile * (size_t)(STEP * d), lane_panels(s, tile / s->group), 1,
              extent(s, s->n_used) / f->panel, d, s->span->scale, s->again, n);
    memcpy(e, s->again + (size_t)i * n, n * sizeof *e);
    exponentials(s, e, s->n_used, e_arrival, 0);
}

/* Key u takes a slot, in the panels and in the rows of the queries from i on. */
static void append(slots *s, int32_t u, int32_t i, int32_t n_query) {
    const int32_t panel = s->kernel->panel;
    if (s->n_used <= s->budget) s->free = s->n_used++;
    const int32_t slot = s->free;
    s->time[slot] = u;
    s->a[slot] = 0;
    for (int32_t lane = 0; lane < s->n_lane; lane++)
        put_key(s, lane_panels(s, lane), lane, slot, u);
    for (int32_t tile = 0; tile < s->n_lane * s->group; tile++)
        for (int32_t j = i; j < n_query; j++) {
            const size_t r = (size_t)(tile * STEP + j);
            s->e[r * (size_t)s->n_padded + (size_t)slot] =
                s->e_arrival[r * (size_t)panel + (size_t)i];
        }
}

/* The statistic after query i of those in work; the least A among the keys at positions <= limit. */
static double observe(slots *s, int32_t i, int32_t limit) {
    const kv_loop_kernel *f = s->kernel;
    const int32_t n_row = s->n_lane * s->group, n = extent(s, s->n_used);
    for (int32_t tile = 0; tile < n_row; tile++) {
        s->row[tile] = s->e + ((size_t)tile * STEP + (size_t)i) * (size_t)s->n_padded;
        double sum = f->sum(s->row[tile], n);
        if (sum < 1) { /* the key with the largest logit has gone */
            row_again(s, tile, i);
            sum = f->sum(s->row[tile], n);
        }
        s->inverse[tile] = 1 / sum;
        s->tiny[tile] = (float)(sum * 0x1p-126);
    }
    const kv_loop_update work = {
        .e = s->row,
        .inverse = s->inverse,
        .tiny = s->tiny,
        .n_row = n_row,
        .n = n,
        .use_max = s->rule->reduce == KV_REDUCE_MAX,
        .factor = s->rule->reduce == KV_REDUCE_MEAN ? 1.0 / n_row : 1,
        .decay = s->rule->decay,
        .time = s->time,
        .limit = limit,
        .a = s->a,
    };
    return f->update(&work);
}

/* The slot that leaves: the newest key among those with the least A; -1 if there is none (A is NaN). */
static int32_t victim(const slots *s, double least, int32_t limit) {
    int32_t best = -1;
    for (int32_t i = 0; i < s->n_used; i++)
        if (s->a[i] == least && s->time[i] <= limit && (best < 0 || s->time[i] > s->time[best]))
            best = i;
    return best;
}

/* Replays the set over the document. KV_E_DATA and KV_E_INTERRUPTED come without a message: the caller may be another thread. */
static kv_status replay_set(slots *s, int32_t *evict_at) {
    const int32_t n_token = s->span->n_token, budget = s->budget;
    int32_t u = 0;
    /* A statistic without memory needs no attention before the cache is full. */
    for (; s->rule->decay == 0 && u < budget; u++) append(s, u, 0, 0);
    /* What the last query evicts is never missed. */
    for (int32_t n_query; u < n_token - 1; u += n_query) {
        n_query = n_token - 1 - u < STEP ? n_token - 1 - u : STEP;
        if (kv_interrupt_poll() != KV_OK) return KV_E_INTERRUPTED;
        for (int32_t lane = 0; lane < s->n_lane; lane++) lane_rows(s, lane, u, n_query);
        for (int32_t i = 0; i < n_query; i++) {
            const int32_t limit = u + i - s->rule->protect_recent;
            append(s, u + i, i, n_query);
            const double least = observe(s, i, limit);
            if (u + i < budget) continue;
            const int32_t slot = victim(s, least, limit);
            if (slot < 0) return KV_E_DATA;
            for (int32_t lane = 0; lane < s->n_lane; lane++)
                evict_at[(s->first_head + lane) * s->span->stride + s->time[slot]] = u + i + 1;
            s->time[slot] = FREE;
            s->free = slot;
        }
    }
    return KV_OK;
}

kv_status kv_replay_attention(const kv_span *span, const kv_attention_rule *rule, int32_t budget,
                              int32_t *evict_at) {
    kv_status st = KV_OK;
    const int32_t n_set = rule->per_layer ? 1 : span->n_kv_head, n_lane = span->n_kv_head / n_set;
    slots *set = NULL;
    kv_status *result = NULL;
    if (budget < 1) KV_RAISE(KV_E_USAGE, "budget is %d; a cache keeps at least 1 token", budget);
    if (rule->protect_recent < 0 || rule->protect_recent > budget)
        KV_RAISE(KV_E_USAGE, "%d newest keys are protected; a budget of %d allows 0 to %d",
                 rule->protect_recent, budget, budget);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) evict_at[h * span->stride + t] = KV_NEVER;
    if (span->n_token <= budget + 1) goto out; /* the first to leave would be missed at B + 1 */
    KV_NEW(set, n_set);
    KV_NEW(result, n_set);
    for (int32_t i = 0; i < n_set; i++)
        KV_TRY(slots_new(&set[i], span, rule, budget, i * n_lane, n_lane));
#pragma omp parallel for schedule(dynamic, 1) if (n_set > 1)
    for (int32_t i = 0; i < n_set; i++) result[i] = replay_set(&set[i], evict_at);
    for (int32_t i = 0; i < n_set; i++) {
        if (result[i] == KV_E_INTERRUPTED) KV_TRY(kv_interrupt_poll());
        if (result[i] != KV_OK)
            KV_RAISE(KV_E_DATA,
                     "layer %d, KV head %d: attention is not a number; q and k must be finite",
                     span->layer_id, i * n_lane);
    }
out:
    for (int32_t i = 0; set && i < n_set; i++) slots_free(&set[i]);
    free(set);
    free(result);
    return st;
}
