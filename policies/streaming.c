/* streaming (StreamingLLM): the sinks and the most recent tokens; the priority of a token is its position. `pos` changes the
 * rotation in masked attention only, never a decision. Source: mit-han-lab/streaming-llm; contract.md 2. */
#include "policies/policy.h"

static const kv_param params[] = {
    {.name = "pos",
     .help = "positions that attention sees: the original ones, or the index in the cache",
     .type = KV_PARAM_CHOICE,
     .choices = "orig|cache"},
    {0}};

static kv_status priority(const kv_policy_input *input, float *out) {
    const kv_span *span = input->span;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) out[h * span->stride + t] = (float)t;
    return KV_OK;
}

static kv_status stream_open(const kv_policy_input *input, void **state) {
    *state = (void *)input->span;
    return KV_OK;
}

static kv_status stream_push(void *state, int32_t u, const float *k, const float *v,
                             const float *hidden) {
    (void)state, (void)u, (void)k, (void)v, (void)hidden;
    return KV_OK;
}

static kv_status stream_priority(void *state, int32_t t, float *out) {
    for (int32_t h = 0; h < ((const kv_span *)state)->n_kv_head; h++) out[h] = (float)t;
    return KV_OK;
}

static void stream_close(void *state) { (void)state; }

static const kv_stream_hooks hooks = {stream_open, stream_push, stream_priority, stream_close};

const kv_policy kv_policy_streaming = {
    .name = "streaming",
    .summary = "sinks and the newest tokens (StreamingLLM)",
    .source = "mit-han-lab/streaming-llm; contract.md 2",
    .kind = KV_PRIORITY,
    .params = params,
    .priority = priority,
    .stream = &hooks,
};
