/* content_xxh3: XXH3-128 over the raw little-endian elements of all data sets in the order of contract.md 4. */
#include <stdio.h>
#include <xxhash.h>

#include "reference/core/mem.h"
#include "traces/trace_file.h"

/* Elements go into the hash row by row of dimension 0 (for q, k, v one layer at a time), so memory does not grow with depth. */
static kv_status hash_found(const kv_trace *t, const kv_found *f, XXH3_state_t *state) {
    kv_status st = KV_OK;
    void *raw = NULL;
    if (f->presence != KV_DATASET) goto out;
    int64_t step = f->n_dim == 1 ? f->dim[0] : 1;
    size_t bytes = (size_t)(step * kv_found_row(f)) * (size_t)f->element_size;
    raw = kv_mem_new(bytes, 1);
    if (!raw) KV_TRY(KV_E_INTERNAL);
    for (int64_t i = 0; i < f->dim[0]; i += step) {
        KV_TRY(kv_interrupt_poll());
        KV_TRY(kv_found_read_raw(t, f, i, step, raw));
        XXH3_128bits_update(state, raw, bytes);
    }
out:
    free(raw);
    return st;
}

kv_status kv_trace_content_hash(kv_trace *t, char *hex) {
    kv_status st = KV_OK;
    XXH3_state_t *state = XXH3_createState();
    if (!state) return KV_FAIL(KV_E_INTERNAL, "out of memory: no hash state");
    XXH3_128bits_reset(state);
    for (int32_t i = 0; i < KV_MODEL_ITEMS; i++) KV_TRY(hash_found(t, &t->desc.model[i], state));
    for (int32_t r = 0; r < t->desc.n_request; r++) {
        const kv_found_request *request = &t->desc.request[r];
        for (int32_t i = 0; i < KV_REQUEST_ITEMS; i++)
            KV_TRY(hash_found(t, &request->item[i], state));
        for (int32_t i = 0; i < request->n_score; i++)
            KV_TRY(hash_found(t, &request->score[i], state));
    }
    XXH128_hash_t hash = XXH3_128bits_digest(state);
    snprintf(hex, 33, "%016llx%016llx", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
out:
    XXH3_freeState(state);
    return st;
}
