/* kvpop: the delayed scorer. A recurrent memory per KV head takes in every token; when a token leaves the window, its own features
 * read the memory and give its score (KVpop's mLSTM scorer; maths.md 6, contract.md 2). */
#include "policies/policy.h"
#include "reference/core/num.h"
#include "reference/ops.h"
#include "reference/scorer.h"

static const kv_param params[] = {
    {.name = "scores",
     .help = "where scores come from: the weights, or score/<name> recorded in the trace",
     .type = KV_PARAM_CHOICE,
     .choices = "weights|trace"},
    {0},
};

/* Scores and decay that the trace recorded (contract.md 4 score/<name>). */
static kv_status recorded(const kv_policy_input *input, float *out) {
    const kv_span *span = input->span;
    if (!input->trace_score || !input->trace_delta)
        return KV_FAIL(KV_E_DATA, "kvpop:scores=trace: layer %d of the trace has no recorded score",
                       span->layer_id);
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            int64_t at = h * span->stride + t;
            out[at] = kv_static_priority(input->trace_score[at], t, log1p(-input->trace_delta[h]));
        }
    return KV_OK;
}

static kv_status priority(const kv_policy_input *input, float *out) {
    if (kv_params_int(input->params, "scores") == 1) return recorded(input, out);
    return kv_scorer_priority(input, input->ops->mlstm_scores, out);
}

static kv_status open(const kv_policy_input *input, void **state) {
    if (kv_params_int(input->params, "scores") == 1)
        return KV_FAIL(KV_E_USAGE, "kvpop:scores=trace has no token-by-token form: recorded scores "
                                   "are not computed while decoding");
    return kv_scorer_stream_open(input, "kvpop", state);
}

static const kv_stream_hooks stream = {
    open,
    kv_scorer_stream_push,
    kv_scorer_stream_priority,
    kv_scorer_stream_close,
};

const kv_policy kv_policy_kvpop = {
    .name = "kvpop",
    .summary = "learned score with delay: a recurrent memory is read when the token leaves the "
               "window",
    .source = "KVpop arXiv 2607.05061, mLSTM scorer; maths.md 6",
    .kind = KV_PRIORITY,
    .params = params,
    .learned = true,
    .priority = priority,
    .stream = &stream,
    .own_target = kv_scorer_target,
};
