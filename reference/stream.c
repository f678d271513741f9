/* Token-by-token decoding over slots: each KV head owns a table of slots with real K and V rows; the token that leaves gives its
 * slot to the one that enters. Priority policies decide here, step by step, from their stream hooks; the decisions of the other
 * kinds come from kv_replay. Known decisions are carried out, with attention over the slots, head by head. Source: contract.md 1, maths.md 3.4 and 3.8 "Decode". */
#include "reference/replay.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"
#include "reference/logit.h"

enum { RAGGED_PAGE = 64 }; /* slots by which a cache without a fixed budget grows */

/* Slots of one KV head. Memory comes in pages: one page of the whole budget, or small ones when lengths are ragged. */
typedef struct slots {
    int32_t page_slots, n_page, used, n_free; /* `used` slots were ever filled */
    float **page;                             /* [pages][page_slots][2][head_dim]: K row, V row */
    int32_t *token, *free_slot, *slot_of;     /* [n_token]; token -1: free; slot_of by token */
    uint64_t *key;        /* [n_token] the least key leaves first; KEEP: may not leave */
    double *weight, *sum; /* [n_token], [head_dim] scratch of attend */
} slots;

static const uint64_t KEEP = UINT64_MAX;

static void slots_free(slots *s) {
    for (int32_t i = 0; i < s->n_page; i++) free(s->page[i]);
    free(s->page);
    free(s->token);
    free(s->free_slot);
    free(s->slot_of);
    free(s->key);
    free(s->weight);
    free(s->sum);
}

static kv_status slots_open(slots *s, int32_t n_token, int32_t head_dim, int32_t fixed) {
    kv_status st = KV_OK;
    s->page_slots = fixed > 0 ? fixed : RAGGED_PAGE;
    KV_NEW(s->page, n_token / s->page_slots + 1);
    KV_NEW(s->token, n_token);
    KV_NEW(s->free_slot, n_token);
    KV_NEW(s->slot_of, n_token);
    KV_NEW(s->key, n_token);
    KV_NEW(s->weight, n_token);
    KV_NEW(s->sum, head_dim);
out:
    return st;
}

static float *slot_row(const slots *s, int32_t slot, int32_t head_dim) {
    return s->page[slot / s->page_slots] + (size_t)(slot % s->page_slots) * 2 * (size_t)head_dim;
}

static kv_status slots_enter(slots *s, int32_t t, uint64_t key, const float *k, const float *v,
                             int32_t d) {
    kv_status st = KV_OK;
    if (s->n_free == 0 && s->used == s->n_page * s->page_slots) {
        KV_NEW(s->page[s->n_page], (size_t)s->page_slots * 2 * (size_t)d);
        s->n_page++;
    }
    int32_t slot = s->n_free > 0 ? s->free_slot[--s->n_free] : s->used++;
    s->token[slot] = t;
    s->slot_of[t] = slot;
    s->key[slot] = key;
    float *row = slot_row(s, slot, d);
    memcpy(row, k, (size_t)d * sizeof *k);
    memcpy(row + d, v, (size_t)d * sizeof *v);
out:
    return st;
}

static int32_t slots_least(const slots *s) {
    int32_t least = 0;
    for (int32_t i = 1; i < s->used; i++)
        if (s->key[i] < s->key[least]) least = i;
    return least;
}

/* Frees the slot and returns the token that held it. */
static int32_t slots_leave(slots *s, int32_t slot) {
    int32_t t = s->token[slot];
    s->token[slot] = -1;
    s->key[slot] = KEEP;
    s->free_slot[s->n_free++] = slot;
    return t;
}

/* o [head_dim] of one query over everything held. The query's own token is held, so the sum is positive. */
static void slots_attend(slots *s, const kv_span *span, const float *q, float *o) {
    int32_t d = span->head_dim;
    double max = -INFINITY, total = 0;
    for (int32_t i = 0; i < s->used; i++) {
        s->weight[i] = s->token[i] < 0 ? -INFINITY : kv_logit(span, q, slot_row(s, i, d));
        max = fmax(max, s->weight[i]);
    }
    for (int32_t c = 0; c < d; c++) s->sum[c] = 0;
    for (int32_t i = 0; i < s->used; i++) {
        const float *v = slot_row(s, i, d) + d;
        double p = exp(s->weight[i] - max);
        total += p;
        for (int32_t c = 0; c < d; c++) s->sum[c] += p * (double)v[c];
    }
    for (int32_t c = 0; c < d; c++) o[c] = (float)(s->sum[c] / total);
}

typedef struct stream {
    const kv_policy *policy;
    const kv_policy_input *input;
    const kv_span *span;
    void *state;            /* of the policy's hooks */
    slots *head;            /* [n_kv_head] */
    float *k, *v, *arrived; /* [n_kv_head][head_dim] of the current token; [n_kv_head] priorities */
    int32_t *evict_at;
} stream;

/* The token that has just left the window becomes eligible in every head. */
static kv_status admit_eligible(stream *m, int32_t t) {
    kv_status st = KV_OK;
    KV_TRY(m->policy->stream->priority(m->state, t, m->arrived));
    for (int32_t h = 0; h < m->span->n_kv_head && t >= m->input->run->sinks; h++) {
        if (isnan(m->arrived[h]))
            KV_RAISE(KV_E_DATA, "%s: the priority of token %d, layer %d, KV head %d is NaN",
                     m->policy->name, t, m->span->layer_id, h);
        m->head[h].key[m->head[h].slot_of[t]] =
            (uint64_t)kv_ordered(m->arrived[h]) << 32 | ~(uint32_t)t;
    }
out:
    return st;
}

static const float *row_of(const kv_span *span, const float *x, int32_t h, int32_t u) {
    return x + ((size_t)h * (size_t)span->stride + (size_t)u) * (size_t)span->head_dim;
}

/* Token u arrives in every head; where the cache is full the least key gives its slot. */
static kv_status step(stream *m, int32_t u) {
    kv_status st = KV_OK;
    const kv_span *span = m->span;
    int32_t d = span->head_dim, w = m->input->run->window;
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        memcpy(m->k + (size_t)h * (size_t)d, row_of(span, span->k, h, u), (size_t)d * sizeof *m->k);
        memcpy(m->v + (size_t)h * (size_t)d, row_of(span, span->v, h, u), (size_t)d * sizeof *m->v);
    }
    const float *hidden = span->hidden ? span->hidden + (size_t)u * (size_t)span->d_model : NULL;
    KV_TRY(m->policy->stream->push(m->state, u, m->k, m->v, hidden));
    if (u >= w) KV_TRY(admit_eligible(m, u - w));
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        slots *s = &m->head[h];
        if (u >= m->input->run->budget)
            m->evict_at[h * span->stride + slots_leave(s, slots_least(s))] = u;
        KV_TRY(slots_enter(s, u, KEEP, m->k + h * d, m->v + h * d, d));
    }
out:
    return st;
}

/* Slots a head can ever hold; 0: no bound. Attend-then-evict policies hold one more while they attend (contract.md 1). */
static int32_t fixed_slots(const kv_policy *policy, const kv_policy_input *input) {
    if (policy->decide || policy->kind == KV_GATE) return 0;
    int64_t most = (int64_t)input->run->budget + (policy->kind == KV_ATTENTION);
    return most < input->span->n_token ? (int32_t)most : input->span->n_token;
}

static kv_status open_heads(stream *m) {
    kv_status st = KV_OK;
    const int32_t fixed = fixed_slots(m->policy, m->input);
    KV_NEW(m->head, m->span->n_kv_head);
    for (int32_t h = 0; h < m->span->n_kv_head; h++)
        KV_TRY(slots_open(&m->head[h], m->span->n_token, m->span->head_dim, fixed));
out:
    return st;
}

static void close_heads(stream *m) {
    for (int32_t h = 0; m->head && h < m->span->n_kv_head; h++) slots_free(&m->head[h]);
    free(m->head);
    m->head = NULL;
}

static uint64_t pages_of(const stream *m) { /* slots of all heads */
    uint64_t n = 0;
    for (int32_t h = 0; h < m->span->n_kv_head; h++)
        n += (uint64_t)m->head[h].n_page * (uint64_t)m->head[h].page_slots;
    return n;
}

/* A priority policy decides over its slots, all heads in step. */
static kv_status decide(stream *m) {
    kv_status st = KV_OK;
    const kv_span *span = m->span;
    KV_NEW(m->k, span->n_kv_head * span->head_dim);
    KV_NEW(m->v, span->n_kv_head * span->head_dim);
    KV_NEW(m->arrived, span->n_kv_head);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) m->evict_at[h * span->stride + t] = KV_NEVER;
    KV_TRY(m->policy->stream->open(m->input, &m->state));
    KV_TRY(open_heads(m));
    for (int32_t u = 0; u < span->n_token; u++) {
        KV_TRY(kv_interrupt_poll());
        KV_TRY(step(m, u));
    }
out:
    return st;
}

/* Carries known decisions out in one head; its queries attend over what the slots hold. A failure has no message: the caller may be
 * another thread. */
static kv_status carry_out(const stream *m, int32_t h, float *o) {
    const kv_span *span = m->span;
    const int32_t d = span->head_dim, group = span->n_q_head / span->n_kv_head;
    slots *s = &m->head[h];
    for (int32_t u = 0; u < span->n_token; u++) {
        const int32_t leaves = m->evict_at[h * span->stride + u];
        const uint64_t key = leaves == KV_NEVER ? KEEP : (uint64_t)leaves;
        if (kv_interrupt_poll() != KV_OK) return KV_E_INTERRUPTED;
        for (int32_t i = slots_least(s); s->used > 0 && s->key[i] <= (uint64_t)u;
             i = slots_least(s))
            slots_leave(s, i);
        const kv_status st =
            slots_enter(s, u, key, row_of(span, span->k, h, u), row_of(span, span->v, h, u), d);
        if (st != KV_OK) return st;
        for (int32_t i = h * group; o && i < (h + 1) * group; i++)
            slots_attend(s, span, row_of(span, span->q, i, u),
                         o + (row_of(span, span->q, i, u) - span->q));
    }
    return KV_OK;
}

/* Heads share nothing once the decisions are known, so threads meet at the end only. */
static kv_status carry_out_all(stream *m, float *o) {
    kv_status st = KV_OK, *head = NULL;
    close_heads(m);
    KV_TRY(open_heads(m));
    KV_NEW(head, m->span->n_kv_head);
#pragma omp parallel for schedule(dynamic, 1)
    for (int32_t h = 0; h < m->span->n_kv_head; h++) head[h] = carry_out(m, h, o);
    KV_TRY(kv_interrupt_poll());
    for (int32_t h = 0; h < m->span->n_kv_head; h++)
        if (head[h] != KV_OK) KV_RAISE(head[h], "out of memory for the slots of KV head %d", h);
out:
    free(head);
    return st;
}

kv_status kv_stream_attend(const kv_policy *policy, const kv_policy_input *input,
                           int32_t element_size, int32_t *evict_at, uint64_t *bytes_allocated,
                           float *o) {
    kv_status st = KV_OK;
    const bool decides = policy->kind == KV_PRIORITY && !policy->decide;
    stream m = {.policy = policy, .input = input, .span = input->span, .evict_at = evict_at};
    KV_TRY(kv_replay_check(policy, input));
    if (policy->non_causal || (decides && !policy->stream))
        KV_RAISE(KV_E_USAGE, "%s sees the future: it cannot decode token by token", policy->name);
    KV_TRY(decides ? decide(&m) : kv_replay(policy, input, evict_at));
    if (o || !decides) KV_TRY(carry_out_all(&m, o));
    *bytes_allocated = pages_of(&m) * 2u * (uint64_t)input->span->head_dim * (uint64_t)element_size;
out:
    if (m.state) policy->stream->close(m.state);
    close_heads(&m);
    free(m.k);
    free(m.v);
    free(m.arrived);
    return st;
}

kv_status kv_stream(const kv_policy *policy, const kv_policy_input *input, int32_t element_size,
                    int32_t *evict_at, uint64_t *bytes_allocated) {
    return kv_stream_attend(policy, input, element_size, evict_at, bytes_allocated, NULL);
}
