/* Decoding over slots against the mask. */
#include "experiments/decode_check.h"

#include <math.h>
#include <stdlib.h>

#include "experiments/experiment.h"
#include "reference/attention.h"
#include "reference/core/mem.h"
#include "reference/replay.h"

/* Slots attend in double, masked attention in fp32 with an exponential of relative error 2e-7. */
static const double tolerance = 1e-4;

/* Variants of a causal policy that see the future refuse by themselves. */
static bool decodes(const kv_row *row) {
    return !row->policy->non_causal && !row->policy->no_evict_at && !kv_row_reads_scores(row) &&
           (row->policy->stream || row->policy->decide || row->policy->kind != KV_PRIORITY);
}

static kv_status compare_decisions(const kv_row *row, const kv_span *s, const int32_t *mask,
                                   const int32_t *slots) {
    for (int32_t h = 0; h < s->n_kv_head; h++)
        for (int32_t t = 0; t < s->n_token; t++) {
            const int64_t i = h * s->stride + t;
            if (mask[i] != slots[i])
                return KV_FAIL(
                    KV_E_INTERNAL,
                    "%s, budget %d, layer %d, KV head %d: token %d of document %d leaves "
                    "at query %d in the mask, at %d in the decoded cache; they must be "
                    "equal (%d: it stays)",
                    row->policy->name, row->run.budget, s->layer_id, h, t, s->document, mask[i],
                    slots[i], KV_NEVER);
        }
    return KV_OK;
}

static kv_status compare_outputs(const kv_row *row, const kv_span *s, const float *mask,
                                 const float *slots) {
    for (int32_t i = 0; i < s->n_q_head; i++) {
        double difference = 0, all = 0;
        for (int32_t u = 0; u < s->n_token; u++)
            for (int32_t c = 0; c < s->head_dim; c++) {
                const size_t at =
                    ((size_t)i * (size_t)s->stride + (size_t)u) * (size_t)s->head_dim + (size_t)c;
                const double x = (double)mask[at], y = (double)slots[at];
                difference += (x - y) * (x - y);
                all += y * y;
            }
        if (!(difference <= tolerance * tolerance * all))
            return KV_FAIL(KV_E_INTERNAL,
                           "%s, budget %d, layer %d, query head %d: the outputs of the mask and of "
                           "the decoded cache differ by %.3g of their size, %.0e is allowed",
                           row->policy->name, row->run.budget, s->layer_id, i,
                           all > 0 ? sqrt(difference / all) : INFINITY, tolerance);
    }
    return KV_OK;
}

kv_status kv_decode_check(const kv_row *row, const kv_policy_input *input, int32_t element_size,
                          const int32_t *evict_at, double *bytes) {
    kv_status st = KV_OK;
    const kv_span *s = input->span;
    const bool same_rotation = !kv_row_rerotates(row);
    const kv_masked_request request = {.evict_at = evict_at,
                                       .sinks = row->run.sinks,
                                       .window = row->run.window,
                                       .want_output = true};
    int32_t *leaves = NULL; /* [n_kv_head][stride] */
    float *out = NULL;      /* [n_q_head][stride][head_dim] */
    kv_masked masked = {0};
    uint64_t allocated = 0;
    *bytes = 0;
    if (!decodes(row)) goto out;
    KV_NEW(leaves, s->n_kv_head * s->stride);
    if (same_rotation) KV_NEW(out, s->n_q_head * s->stride * s->head_dim);
    st = kv_stream_attend(row->policy, input, element_size, leaves, &allocated, out);
    if (st == KV_E_USAGE) {
        st = KV_OK;
        goto out;
    }
    KV_TRY(st);
    KV_TRY(compare_decisions(row, s, evict_at, leaves));
    if (same_rotation) {
        KV_TRY(kv_masked_compute(s, &request, &masked));
        KV_TRY(compare_outputs(row, s, masked.o, out));
    }
    *bytes = (double)allocated;
out:
    kv_masked_free(&masked);
    free(leaves);
    free(out);
    return st;
}
