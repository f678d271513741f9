/* random: an independent uniform priority per token; the floor that a scorer has to beat. The number depends on its address
 * (seed, request, document, layer id, KV head, token) only. Source: contract.md 2. */
#include "policies/policy.h"
#include "reference/core/rand.h"

static float draw(const kv_policy_input *input, int32_t h, int32_t t) {
    const kv_span *span = input->span;
    uint32_t lane = (uint32_t)span->layer_id << 16 ^ (uint32_t)h;
    return (float)kv_rand_uniform(input->run->seed, (uint32_t)span->request,
                                  (uint32_t)span->document, lane, (uint32_t)t);
}

static kv_status priority(const kv_policy_input *input, float *out) {
    const kv_span *span = input->span;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) out[h * span->stride + t] = draw(input, h, t);
    return KV_OK;
}

static kv_status stream_open(const kv_policy_input *input, void **state) {
    *state = (void *)input;
    return KV_OK;
}

static kv_status stream_push(void *state, int32_t u, const float *k, const float *v,
                             const float *hidden) {
    (void)state, (void)u, (void)k, (void)v, (void)hidden;
    return KV_OK;
}

static kv_status stream_priority(void *state, int32_t t, float *out) {
    const kv_policy_input *input = state;
    for (int32_t h = 0; h < input->span->n_kv_head; h++) out[h] = draw(input, h, t);
    return KV_OK;
}

static void stream_close(void *state) { (void)state; }

static const kv_stream_hooks hooks = {stream_open, stream_push, stream_priority, stream_close};

const kv_policy kv_policy_random = {
    .name = "random",
    .summary = "independent uniform priorities",
    .source = "contract.md 2",
    .kind = KV_PRIORITY,
    .priority = priority,
    .stream = &hooks,
};
