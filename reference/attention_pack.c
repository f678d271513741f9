/* Packing of queries, keys and values for the attention kernels, and the choice of the kernel. */
#include "reference/attention_panel.h"

#include <string.h>

#include "reference/core/cpu.h"
#include "reference/core/mem.h"

const kv_attention_kernel *kv_attention_kernel_get(void) {
    static const kv_attention_kernel *const table[] = {
        [KV_ISA_GENERIC] = &kv_attention_generic,
        [KV_ISA_AVX2] = &kv_attention_avx2,
        [KV_ISA_AVX512] = &kv_attention_avx512,
    };
    return table[kv_cpu_isa()];
}

/* Gathered rows lie apart, where no hardware prefetcher looks: ask for a row a few keys ahead. */
static inline void prefetch_row(const float *row, int32_t n) {
    for (int32_t c = 0; c < n; c += 16) __builtin_prefetch(row + c);
}

enum { AHEAD = 6 };

void kv_pack_queries(const float *x, int32_t n, int32_t head_dim, float *out) {
    for (int32_t i = 0; i < n; i += KV_TILE_ROWS)
        for (int32_t r = 0; r < KV_TILE_ROWS; r++) {
            float *to = out + (ptrdiff_t)i * head_dim + r;
            const float *from = x + (ptrdiff_t)(i + r) * head_dim;
            for (int32_t c = 0; c < head_dim; c++)
                to[c * KV_TILE_ROWS] = i + r < n ? from[c] : 0.0f;
        }
}

void kv_pack_keys(const float *x, const int32_t *index, int32_t n, int32_t head_dim,
                  int32_t tile_keys, float *out) {
    for (int32_t j = 0; j < n; j += tile_keys, out += (ptrdiff_t)tile_keys * head_dim) {
        const int32_t here = n - j < tile_keys ? n - j : tile_keys;
        if (here < tile_keys) memset(out, 0, sizeof *out * (size_t)(tile_keys * head_dim));
        for (int32_t i = 0; i < here; i++) {
            const float *from = x + (ptrdiff_t)(index ? index[j + i] : j + i) * head_dim;
            if (index && j + i + AHEAD < n)
                prefetch_row(x + (ptrdiff_t)index[j + i + AHEAD] * head_dim, head_dim);
            for (int32_t c = 0; c < head_dim; c++) out[(ptrdiff_t)c * tile_keys + i] = from[c];
        }
    }
}

void kv_pack_values(const float *x, const int32_t *index, int32_t n, int32_t head_dim,
                    int32_t tile_keys, float *out) {
    for (int32_t c = 0; c < head_dim; c += tile_keys, out += (ptrdiff_t)KV_CHUNK_KEYS * tile_keys) {
        const int32_t here = head_dim - c < tile_keys ? head_dim - c : tile_keys;
        if (here < tile_keys) memset(out, 0, sizeof *out * (size_t)(n * tile_keys));
        for (int32_t j = 0; j < n; j++) {
            const float *from = x + (ptrdiff_t)(index ? index[j] : j) * head_dim + c;
            float *to = out + (ptrdiff_t)j * tile_keys;
            if (index && j + AHEAD < n)
                prefetch_row(x + (ptrdiff_t)index[j + AHEAD] * head_dim + c, here);
            for (int32_t i = 0; i < here; i++) to[i] = from[i];
        }
    }
}

kv_status kv_packed_make(const kv_span *span, const kv_panel_shape *shape, kv_packed *packed) {
    kv_status st = KV_OK;
    const int32_t n_chunk = (span->n_token + KV_CHUNK_KEYS - 1) / KV_CHUNK_KEYS;
    const int32_t n_job = span->n_kv_head * n_chunk, tile_keys = shape->kernel->tile_keys;
    const size_t key_floats = (size_t)KV_CHUNK_KEYS * (size_t)shape->head_dim;
    const size_t value_floats = (size_t)KV_CHUNK_KEYS * (size_t)shape->padded_dim;
    *packed = (kv_packed){.n_token = span->n_token, .n_chunk = n_chunk};
    KV_NEW(packed->birth, (size_t)n_chunk * KV_CHUNK_KEYS);
    KV_NEW(packed->keys, (size_t)n_job * key_floats);
    if (shape->want_output) KV_NEW(packed->values, (size_t)n_job * value_floats);
    for (int32_t t = 0; t < n_chunk * KV_CHUNK_KEYS; t++) packed->birth[t] = t;
#pragma omp parallel for schedule(static)
    for (int32_t job = 0; job < n_job; job++) {
        const int32_t first = job % n_chunk * KV_CHUNK_KEYS, left = span->n_token - first;
        const int32_t n = left < KV_CHUNK_KEYS ? left : KV_CHUNK_KEYS;
        const ptrdiff_t at =
            (ptrdiff_t)(job / n_chunk * span->stride + first) * (ptrdiff_t)span->head_dim;
        kv_pack_keys(span->k + at, NULL, n, span->head_dim, tile_keys,
                     packed->keys + (size_t)job * key_floats);
        if (packed->values)
            kv_pack_values(span->v + at, NULL, n, span->head_dim, tile_keys,
                           packed->values + (size_t)job * value_floats);
    }
out:
    return st;
}

void kv_packed_free(kv_packed *packed) {
    free(packed->keys);
    free(packed->values);
    free(packed->birth);
}

kv_chunk kv_packed_chunk(const kv_packed *packed, const kv_panel_shape *shape, int32_t kv_head,
                         int32_t c, int32_t last) {
    const int32_t first = c * KV_CHUNK_KEYS, left = last + 1 - first;
    const int32_t n = left < KV_CHUNK_KEYS ? left : KV_CHUNK_KEYS;
    const ptrdiff_t at = (ptrdiff_t)(kv_head * packed->n_chunk + c) * KV_CHUNK_KEYS;
    return (kv_chunk){
        .keys = packed->keys + at * shape->head_dim,
        .values = packed->values ? packed->values + at * shape->padded_dim : NULL,
        .birth = packed->birth + first,
        .n_key = n,
        .birth_min = first,
        .birth_max = first + n - 1,
        .seen_from = first + kv_round_up(n, shape->kernel->tile_keys) - 1,
        .seen_to = KV_NEVER,
    };
}
