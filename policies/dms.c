/* dms: Dynamic Memory Sparsification. A gate per KV head marks tokens; a marked token leaves when it has passed the window. No
 * budget, no sinks; the caches are ragged (maths.md 7, contract.md 2). */
#include "policies/policy.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/ops.h"

static const kv_param params[] = {
    {.name = "shift",
     .help = "the gate computed at token t + shift decides about key t",
     .type = KV_PARAM_CHOICE,
     .choices = "1|0"},
    {0},
};

/* Key t is marked iff gate[t + shift] > 0; a flag beyond the document's end: the token stays. */
static kv_status gate(const kv_policy_input *input, uint8_t *leaves) {
    kv_status st = KV_OK;
    const kv_span *span = input->span;
    int32_t shift = kv_params_int(input->params, "shift") == 0, trained = shift;
    const float *logit = span->gate;
    float *own = NULL;
    if (input->weights) {
        KV_NEW(own, span->n_kv_head * span->stride);
        KV_TRY(input->ops->gate_logits(input, own, &trained));
        logit = own;
    }
    if (!logit)
        KV_RAISE(KV_E_DATA,
                 "dms: layer %d of the trace has no recorded gate, and no weights were given; use "
                 "--weights dms=FILE",
                 span->layer_id);
    if (trained != shift)
        kv_log(KV_LOG_WARN, "dms", "the weights were trained with shift %d, the run has shift %d",
               trained, shift);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t + shift < span->n_token; t++)
            leaves[h * span->stride + t] = logit[h * span->stride + t + shift] > 0;
out:
    free(own);
    return st;
}

const kv_policy kv_policy_dms = {
    .name = "dms",
    .summary = "learned gate: marked tokens leave after the window, caches are ragged",
    .source = "Dynamic Memory Sparsification, arXiv 2506.05345; maths.md 7",
    .kind = KV_GATE,
    .params = params,
    .learned = true,
    .gate = gate,
};
