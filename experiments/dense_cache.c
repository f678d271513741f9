/* Dense results through the cache. Sweeps are always the same few: powers 1 and 2 with output and events, or one power alone. */
#include "experiments/dense_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "experiments/cache.h"
#include "experiments/version.h"
#include "reference/core/cpu.h"
#include "reference/core/mem.h"

static void hash_heads(XXH3_state_t *h, const float *x, int32_t n_head, const kv_span *s) {
    size_t row = (size_t)s->head_dim * sizeof(float);
    for (int32_t i = 0; i < n_head; i++)
        XXH3_128bits_update(h, x + (size_t)(i * s->stride) * (size_t)s->head_dim,
                            (size_t)s->n_token * row);
}

static kv_status hash_span(const kv_ops *ops, const kv_span *s, uint64_t key[2]) {
    char about[512];
    XXH3_state_t *h = XXH3_createState();
    if (!h) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    XXH3_128bits_reset(h);
    int n = snprintf(about, sizeof about, "%s %s %s | %d %d %d %d %a %a", ops->name,
                     kv_isa_name(kv_cpu_isa()), kv_version_build.attention_sources, s->n_token,
                     s->n_q_head, s->n_kv_head, s->head_dim, (double)s->scale, (double)s->softcap);
    XXH3_128bits_update(h, about, (size_t)n);
    hash_heads(h, s->q, s->n_q_head, s);
    hash_heads(h, s->k, s->n_kv_head, s);
    hash_heads(h, s->v, s->n_kv_head, s);
    XXH128_hash_t d = XXH3_128bits_digest(h);
    XXH3_freeState(h);
    key[0] = d.high64;
    key[1] = d.low64;
    return KV_OK;
}

/* The arrays of one sweep, rows of the document's own tokens. Which sweep it was stands in the name: the same column computed together with others differs in the last
 * bits, and a result must not depend on what ran before. */
static int32_t list_parts(const kv_span *s, const kv_dense_request *r, kv_dense *d,
                          const uint64_t key[2], kv_cached *parts) {
    const char *sweep = r->want_events ? "base" : "alone";
    int32_t n = 0;
    size_t rows = (size_t)s->n_q_head * (size_t)s->n_token;
    kv_cached *p = &parts[n++];
    *p = (kv_cached){.n_array = 1, .array = {(void **)&d->lse}, .bytes = {rows * 4}};
    snprintf(p->name, sizeof p->name, "%s-lse", sweep);
    for (int32_t i = 0; i < r->n_power; i++) {
        p = &parts[n++];
        *p = (kv_cached){.n_array = 1, .array = {(void **)&d->column[i]}, .bytes = {rows * 8}};
        snprintf(p->name, sizeof p->name, "%s-column-w%d-p%.17g", sweep, r->window, r->power[i]);
    }
    if (r->want_events) {
        p = &parts[n++];
        *p = (kv_cached){.n_array = 3,
                         .array = {(void **)&d->long_mass, (void **)&d->top_p, (void **)&d->top_t},
                         .bytes = {rows * 4, rows * 4, rows * 4}};
        snprintf(p->name, sizeof p->name, "%s-events-s%d-w%d", sweep, r->sinks, r->window);
    }
    if (r->want_output) {
        p = &parts[n++];
        *p = (kv_cached){
            .n_array = 1, .array = {(void **)&d->o}, .bytes = {rows * (size_t)s->head_dim * 4}};
        snprintf(p->name, sizeof p->name, "%s-o", sweep);
    }
    for (int32_t i = 0; i < n; i++) memcpy(parts[i].key, key, sizeof parts[i].key);
    return n;
}

/* *to = rows of `to_stride` elements of `size` bytes for rows of `from_stride` of them; the document's tokens are copied. */
static kv_status copy_rows(const kv_span *s, const void *from, int64_t from_stride,
                           int64_t to_stride, size_t size, void **to) {
    const size_t used = (size_t)s->n_token * size;
    if (!from) return KV_OK;
    char *out = kv_mem_new((size_t)(s->n_q_head * to_stride), size);
    if (!out) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    for (int32_t h = 0; h < s->n_q_head; h++)
        memcpy(out + (size_t)(h * to_stride) * size,
               (const char *)from + (size_t)(h * from_stride) * size, used);
    *to = out;
    return KV_OK;
}

/* The same results with another stride. A document's arrays in memory have the stride of the whole trace; its files have its own length:
 * many short documents would fill the disk otherwise. */
static kv_status copy_strided(const kv_span *s, const kv_dense *from, int64_t stride,
                              kv_dense *to) {
    kv_status st = KV_OK;
    const int64_t old = from->stride;
    *to = (kv_dense){.request = from->request, .stride = stride};
    KV_TRY(copy_rows(s, from->lse, old, stride, 4, (void **)&to->lse));
    for (int32_t i = 0; i < KV_DENSE_POWERS; i++)
        KV_TRY(copy_rows(s, from->column[i], old, stride, 8, (void **)&to->column[i]));
    KV_TRY(copy_rows(s, from->long_mass, old, stride, 4, (void **)&to->long_mass));
    KV_TRY(copy_rows(s, from->top_p, old, stride, 4, (void **)&to->top_p));
    KV_TRY(copy_rows(s, from->top_t, old, stride, 4, (void **)&to->top_t));
    KV_TRY(copy_rows(s, from->o, old, stride, (size_t)s->head_dim * 4, (void **)&to->o));
out:
    if (st != KV_OK) kv_dense_free(to);
    return st;
}

/* One sweep, from the folder when all its arrays are there. */
static kv_status run_sweep(const kv_ops *ops, const kv_span *span, const kv_dense_request *request,
                           const char *folder, const uint64_t key[2], kv_dense *out) {
    kv_status st = KV_OK;
    kv_cached parts[KV_DENSE_POWERS + 3];
    const bool whole = span->n_token == span->stride;
    bool complete = folder != NULL;
    kv_dense own = {.request = *request, .stride = span->n_token};
    int32_t n = list_parts(span, request, &own, key, parts);
    *out = (kv_dense){0};
    for (int32_t i = 0; complete && i < n; i++) complete = kv_cache_load(folder, &parts[i]);
    if (complete && whole) {
        *out = own;
        return KV_OK;
    }
    if (complete) {
        KV_TRY(copy_strided(span, &own, span->stride, out));
        goto out;
    }
    kv_dense_free(&own);
    own = (kv_dense){0};
    KV_TRY(ops->dense(span, request, out));
    if (!folder) return KV_OK;
    if (!whole) KV_TRY(copy_strided(span, out, span->n_token, &own));
    list_parts(span, request, whole ? out : &own, key, parts);
    for (int32_t i = 0; i < n; i++) kv_cache_store(folder, &parts[i]);
out:
    kv_dense_free(&own);
    if (st != KV_OK) kv_dense_free(out);
    return st;
}

static kv_status column_alone(const kv_ops *ops, const kv_span *span,
                              const kv_dense_request *request, int32_t i, const char *folder,
                              const uint64_t key[2], kv_dense *out) {
    kv_dense alone = {0};
    kv_dense_request r = {.sinks = request->sinks,
                          .window = request->window,
                          .n_power = 1,
                          .power = {request->power[i]}};
    kv_status st = run_sweep(ops, span, &r, folder, key, &alone);
    if (st != KV_OK) return st;
    out->column[i] = alone.column[0];
    alone.column[0] = NULL;
    if (!out->lse) {
        out->lse = alone.lse;
        alone.lse = NULL;
    }
    kv_dense_free(&alone);
    return KV_OK;
}

kv_status kv_dense_cached(const kv_ops *ops, const kv_span *span, const kv_dense_request *request,
                          const char *folder, kv_dense *out) {
    kv_status st = KV_OK;
    kv_dense base = {0};
    uint64_t key[2] = {0};
    *out = (kv_dense){.request = *request, .stride = span->stride};
    if (folder) KV_TRY(hash_span(ops, span, key));
    if (request->want_output || request->want_events) {
        kv_dense_request r = {.sinks = request->sinks,
                              .window = request->window,
                              .n_power = 2,
                              .power = {1, 2},
                              .want_output = request->want_output,
                              .want_events = true};
        KV_TRY(run_sweep(ops, span, &r, folder, key, &base));
        *out = base;
        out->request = *request;
        memset(out->column, 0, sizeof out->column);
        base = (kv_dense){.column = {base.column[0], base.column[1]}};
    }
    for (int32_t i = 0; i < request->n_power; i++) {
        double power = request->power[i];
        int32_t at = power == 2;
        if ((power == 1 || power == 2) && base.column[at]) {
            out->column[i] = base.column[at];
            base.column[at] = NULL;
        } else {
            KV_TRY(column_alone(ops, span, request, i, folder, key, out));
        }
    }
out:
    kv_dense_free(&base);
    if (st != KV_OK) kv_dense_free(out);
    return st;
}
