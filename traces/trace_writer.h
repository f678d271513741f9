/* The open writer and its two halves. Private to traces/. */
#ifndef KV_TRACE_WRITER_H
#define KV_TRACE_WRITER_H

#include "traces/trace_file.h"

struct kv_trace_writer {
    char *path, *temporary;
    hid_t file, request, scale[KV_MODEL_ITEMS], tensor[KV_REQUEST_ITEMS];
    int32_t n_layer, n_q_head, n_kv_head, head_dim, d_model, n_token, written;
    kv_dtype type;
    bool overflowed;
    void *narrow; /* [n_token * max(head_dim, d_model)] elements as stored */
};

/* Tokens per chunk of a tensor, 0 for other items. */
extern const uint16_t kv_trace_stripe[KV_REQUEST_ITEMS];

/* Attributes, scales and small data sets with their values; tensors empty (trace_create.c). */
kv_status kv_trace_writer_create(kv_trace_writer *w, const kv_trace_spec *spec);

#endif
