/* What a row reads of the recording (recorded.h). */
#include "experiments/recorded.h"

#include <stdlib.h>
#include <string.h>

#include "policies/registry.h"
#include "reference/core/mem.h"

bool kv_row_reads_recording(const kv_row *row) {
    return row->policy == kv_policy_find("file") || (row->policy->learned && !row->weights);
}

kv_status kv_recorded_read(kv_trace *trace, const kv_row *row, kv_recorded *out) {
    kv_status st = KV_OK;
    const kv_trace_info *t = kv_trace_get(trace);
    const bool gates = row->policy->kind == KV_GATE;
    *out = (kv_recorded){.n_layer = t->n_layer};
    if (!row->policy->learned) return KV_OK; /* file reads for itself */
    KV_NEW(*(gates ? &out->gate : &out->score), t->n_layer);
    if (!gates) KV_NEW(out->delta, t->n_layer * t->n_kv_head);
    for (int32_t l = 0; l < t->n_layer; l++) {
        if (gates) {
            KV_TRY(kv_trace_read_gate(trace, l, &out->gate[l]));
            continue;
        }
        KV_NEW(out->score[l], t->n_kv_head * t->n_token);
        KV_TRY(kv_trace_read_score(trace, row->policy->name, l, out->score[l],
                                   out->delta + l * t->n_kv_head));
    }
out:
    if (st != KV_OK) kv_recorded_free(out);
    return st;
}

static kv_status cut(float *const *recorded, const kv_trace_info *trace, const kv_span *span,
                     float **out) {
    kv_status st = KV_OK;
    *out = NULL;
    if (!recorded) return KV_OK;
    KV_NEW(*out, span->n_kv_head * span->stride);
    for (int64_t h = 0; h < span->n_kv_head; h++)
        memcpy(*out + h * span->stride,
               recorded[span->layer_index] + h * trace->n_token + span->first,
               (size_t)span->n_token * sizeof **out);
out:
    return st;
}

kv_status kv_recorded_cut(const kv_recorded *r, const kv_trace_info *trace, const kv_span *span,
                          float **gate, float **score) {
    const kv_status st = cut(r->gate, trace, span, gate);
    return st == KV_OK ? cut(r->score, trace, span, score) : st;
}

void kv_recorded_free(kv_recorded *r) {
    for (int32_t l = 0; l < r->n_layer; l++) {
        if (r->gate) free(r->gate[l]);
        if (r->score) free(r->score[l]);
    }
    free(r->gate);
    free(r->score);
    free(r->delta);
    *r = (kv_recorded){0};
}
