/* file: decisions made elsewhere, read from a file as --save-evict writes it (absolute positions). Nothing is promised about them:
 * they may see the future, ignore sinks and window, or exceed the budget. Source: contract.md 2. */
#include "policies/policy.h"

#include "traces/trace.h"

static const kv_param params[] = {{.name = "path",
                                   .help = "HDF5 file that holds /evict_at/<item>/b<budget>",
                                   .type = KV_PARAM_TEXT,
                                   .default_text = ""},
                                  {.name = "item",
                                   .help = "whose decisions: <policy> or <policy>:<variant>",
                                   .type = KV_PARAM_TEXT,
                                   .default_text = "file"},
                                  {0}};

static kv_status decide(const kv_policy_input *input, int32_t *evict_at) {
    const kv_span *span = input->span;
    const char *path = kv_params_text(input->params, "path");
    const char *item = kv_params_text(input->params, "item");
    if (path[0] == '\0')
        return KV_FAIL(KV_E_USAGE, "the policy file needs a path: file:path=F[:item=NAME]");
    kv_status st = kv_evict_read_span(path, item, input->run->budget, span, evict_at);
    if (st != KV_OK) return st;
    for (int32_t h = 0; h < span->n_kv_head; h++)
        for (int32_t t = 0; t < span->n_token; t++) {
            int32_t *e = &evict_at[h * span->stride + t];
            int64_t at = *e - span->first;
            if (at <= t)
                return KV_FAIL(KV_E_DATA,
                               "%s: /evict_at/%s/b%d[%d][%d][%lld] is %d; a token leaves after its "
                               "own position, %lld at the earliest (layer index, KV head, token)",
                               path, item, input->run->budget, span->layer_index, h,
                               (long long)(span->first + t), *e, (long long)(span->first + t + 1));
            *e = at < span->n_token ? (int32_t)at : KV_NEVER;
        }
    return KV_OK;
}

const kv_policy kv_policy_file = {
    .name = "file",
    .summary = "decisions read from a file of --save-evict",
    .source = "contract.md 2",
    .kind = KV_PRIORITY,
    .params = params,
    .decide = decide,
};
