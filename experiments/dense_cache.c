/* Dense results through the cache: lse, columns of each power, events and output are stored apart, because they depend on different
 * settings. */
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
    int n = snprintf(about, sizeof about, "%s %s %s | %d %lld %d %d %d %a %a", ops->name,
                     kv_isa_name(kv_cpu_isa()), kv_version_build.attention_sources, s->n_token,
                     (long long)s->stride, s->n_q_head, s->n_kv_head, s->head_dim, (double)s->scale,
                     (double)s->softcap);
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

/* The parts of a request. The names carry what the numbers depend on besides the span. */
static int32_t list_parts(const kv_span *s, const kv_dense_request *r, kv_dense *d,
                          const uint64_t key[2], kv_cached *parts) {
    int32_t n = 0;
    size_t rows = (size_t)s->n_q_head * (size_t)s->stride;
    parts[n++] = (kv_cached){"lse", .n_array = 1, .array = {(void **)&d->lse}, .bytes = {rows * 4}};
    for (int32_t i = 0; i < r->n_power; i++) {
        kv_cached *p = &parts[n++];
        *p = (kv_cached){.n_array = 1, .array = {(void **)&d->column[i]}, .bytes = {rows * 8}};
        snprintf(p->name, sizeof p->name, "column-w%d-p%.17g", r->window, r->power[i]);
    }
    if (r->want_events) {
        kv_cached *p = &parts[n++];
        *p = (kv_cached){.n_array = 3,
                         .array = {(void **)&d->long_mass, (void **)&d->top_p, (void **)&d->top_t},
                         .bytes = {rows * 4, rows * 4, rows * 4}};
        snprintf(p->name, sizeof p->name, "events-s%d-w%d", r->sinks, r->window);
    }
    if (r->want_output)
        parts[n++] = (kv_cached){"o", .n_array = 1, .array = {(void **)&d->o},
                                 .bytes = {rows * (size_t)s->head_dim * 4}};
    for (int32_t i = 0; i < n; i++) memcpy(parts[i].key, key, sizeof parts[i].key);
    return n;
}

/* One sweep for everything that is missing; its arrays move into `out`. */
static kv_status compute_missing(const kv_ops *ops, const kv_span *span,
                                 const kv_dense_request *request, kv_dense *out) {
    kv_status st = KV_OK;
    kv_dense fresh = {0};
    kv_dense_request r = *request;
    int32_t from[KV_DENSE_POWERS];
    r.n_power = 0;
    for (int32_t i = 0; i < request->n_power; i++)
        if (!out->column[i]) {
            from[r.n_power] = i;
            r.power[r.n_power++] = request->power[i];
        }
    r.want_events = request->want_events && !out->top_t;
    r.want_output = request->want_output && !out->o;
    KV_TRY(ops->dense(span, &r, &fresh));
    for (int32_t i = 0; i < r.n_power; i++) {
        out->column[from[i]] = fresh.column[i];
        fresh.column[i] = NULL;
    }
#define MOVE(member) \
    if (!out->member) { \
        out->member = fresh.member; \
        fresh.member = NULL; \
    }
    MOVE(lse)
    MOVE(long_mass)
    MOVE(top_p)
    MOVE(top_t)
    MOVE(o)
#undef MOVE
out:
    kv_dense_free(&fresh);
    return st;
}

kv_status kv_dense_cached(const kv_ops *ops, const kv_span *span, const kv_dense_request *request,
                          const char *folder, kv_dense *out) {
    kv_status st = KV_OK;
    kv_cached parts[KV_DENSE_POWERS + 3];
    bool found[KV_DENSE_POWERS + 3] = {false}, complete = true;
    uint64_t key[2];
    if (!folder) return ops->dense(span, request, out);
    memset(out, 0, sizeof *out);
    out->request = *request;
    out->stride = span->stride;
    KV_TRY(hash_span(ops, span, key));
    int32_t n = list_parts(span, request, out, key, parts);
    for (int32_t i = 0; i < n; i++) complete &= found[i] = kv_cache_load(folder, &parts[i]);
    if (complete) goto out;
    KV_TRY(compute_missing(ops, span, request, out));
    for (int32_t i = 0; i < n; i++)
        if (!found[i]) kv_cache_store(folder, &parts[i]);
out:
    if (st != KV_OK) kv_dense_free(out);
    return st;
}
