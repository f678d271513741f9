/* The structural rules on a plain description filled with whatever the input holds: no crash, and what is accepted keeps its promises. */
#include <stdlib.h>

#include "tests/fuzz/bytes.h"
#include "traces/trace_check.h"

static char path[] = "/x";

/* Mostly plausible values, so that the rules behind the first ones are reached. */
static void fill_found(bytes *b, kv_found *f, const int64_t *plausible) {
    f->path = path;
    f->presence = pick(b, 8) ? KV_DATASET : (kv_presence)pick(b, 4);
    f->element = (kv_element)pick(b, KV_EL_OTHER + 1);
    f->element_size = 1 << pick(b, 4);
    f->n_dim = pick(b, 8) ? 1 + (int32_t)pick(b, 4) : take(b);
    f->layout = (kv_layout)pick(b, 3);
    f->n_filter = pick(b, 8) ? (int32_t)pick(b, 3) : take(b);
    for (int i = 0; i < KV_FOUND_FILTERS; i++) f->filter[i] = take(b);
    f->filter_missing = take(b);
    f->chunks_written = f->bytes_stored = 1;
    for (int i = 0; i < KV_FOUND_DIMS; i++) {
        f->dim[i] = plausible[pick(b, 6)];
        f->chunk[i] = plausible[pick(b, 6)];
        if (i < f->n_dim) f->bytes_stored *= f->dim[i] & 0xffff;
        if (pick(b, 16) == 0) take_into(b, &f->dim[i], 8);
        if (pick(b, 16) == 0) take_into(b, &f->chunk[i], 8);
    }
    f->bytes_stored *= f->element_size;
    if (pick(b, 4) == 0) f->chunks_written = take(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { REQUESTS = 2, SCORES = 2 };
    static char half[] = "rotate_half";
    static const int64_t plausible[] = {2, 4, 8, 1, 16, 3};
    bytes b = {data, size};
    char conventions[16] = "KVTRACE-1.0";
    kv_found score[REQUESTS][SCORES] = {0};
    kv_found_request request[REQUESTS] = {0};
    kv_trace_shape shape;
    kv_trace_desc d = {.file = path,
                       .conventions = conventions,
                       .has_version = true,
                       .version = {1, 0, 0},
                       .rope_kind = half,
                       .request = request};
    if (pick(&b, 16) == 0) take_into(&b, conventions, sizeof conventions - 1);
    if (pick(&b, 16) == 0) take_into(&b, d.version, sizeof d.version);
    for (int i = 0; i < KV_MODEL_ATTRIBUTES; i++) {
        d.attribute[i] = (kv_found_attribute){true, true, (double)plausible[pick(&b, 6)]};
        if (pick(&b, 32) == 0) take_into(&b, &d.attribute[i].value, 8);
    }
    d.attribute[KV_ATTR_KEYS_ARE_ROTATED].value = 1;
    for (int i = 0; i < KV_MODEL_ITEMS; i++) fill_found(&b, &d.model[i], plausible);
    d.n_request = 1 + (int32_t)pick(&b, REQUESTS);
    for (int r = 0; r < d.n_request; r++) {
        request[r].path = path;
        for (int i = 0; i < KV_REQUEST_ITEMS; i++) fill_found(&b, &request[r].item[i], plausible);
        request[r].score = score[r];
        request[r].n_score = (int32_t)pick(&b, SCORES + 1);
        for (int i = 0; i < request[r].n_score; i++) fill_found(&b, &score[r][i], plausible);
    }
    kv_status st = kv_trace_check(&d, &shape);
    if (st != KV_OK && st != KV_E_DATA) abort();
    if (st != KV_OK) return 0;
    for (int r = 0; r < d.n_request; r++) {
        const kv_found *item = request[r].item, *k = &item[KV_ITEM_K];
        if (item[KV_ITEM_TOKEN].presence != KV_DATASET || item[KV_ITEM_Q].presence != KV_DATASET ||
            k->dim[0] != shape.n_layer || k->dim[1] != shape.n_kv_head ||
            k->dim[2] != item[KV_ITEM_TOKEN].dim[0] || k->dim[3] != shape.head_dim)
            abort();
    }
    if (shape.n_q_head % shape.n_kv_head || shape.head_dim % 2) abort();
    return 0;
}
