/* Describes a trace. */
#include <stdlib.h>

#include "experiments/inspect.h"

static void print_model(const kv_trace_info *i, FILE *out) {
    fprintf(out,
            "model      %d of %s%d layers, %d query heads, %d KV heads, head size %d, d_model %d\n",
            i->n_layer, i->depth_is_guess ? "at least " : "", i->n_model_layer, i->n_q_head,
            i->n_kv_head, i->head_dim, i->d_model);
    fprintf(out, "attention  RoPE theta %g, softmax scale %g, softcap ", i->rope_theta,
            i->softmax_scale);
    if (i->logit_softcap > 0)
        fprintf(out, "%g\n", i->logit_softcap);
    else
        fprintf(out, "none\n");
    if (i->n_layer < i->n_model_layer) {
        fprintf(out, "layers    ");
        for (int32_t l = 0; l < i->n_layer; l++) fprintf(out, " %d", i->layer_id[l]);
        fprintf(out, "\n");
    }
}

static void print_counts(const char *title, const uint8_t *value, int64_t n,
                         const char *const *name, int32_t n_name, FILE *out) {
    int64_t count[256] = {0};
    for (int64_t t = 0; t < n; t++) count[value[t]]++;
    fprintf(out, "%-10s", title);
    for (int32_t v = 0; v < 256; v++) {
        if (!count[v]) continue;
        if (v < n_name)
            fprintf(out, " %s %lld", name[v], (long long)count[v]);
        else
            fprintf(out, " %d %lld", v, (long long)count[v]);
    }
    fprintf(out, "\n");
}

static void print_trace(const kv_trace_info *i, FILE *out) {
    static const char *const scored_name[] = {"none", "deterministic", "recall", "result"};
    fprintf(out, "trace      %s\n", i->path);
    if (i->title[0]) fprintf(out, "title      %s\n", i->title);
    if (i->source[0]) fprintf(out, "source     %s\n", i->source);
    if (i->trace_id) fprintf(out, "id         %s\n", i->trace_id);
    print_model(i, out);
    fprintf(out, "tokens     %lld in %d request%s, %d document%s, the longest has %d\n",
            (long long)i->n_token, i->n_request, i->n_request == 1 ? "" : "s", i->n_document,
            i->n_document == 1 ? "" : "s", i->longest);
    fprintf(out, "tensors    q, k, v (keys and values %s)%s%s%s\n", kv_dtype_name(i->type),
            i->has_hidden ? ", hidden" : "", i->has_lse ? ", lse" : "",
            i->has_gate ? ", gate" : "");
    if (i->kind) print_counts("kinds", i->kind, i->n_token, i->kind_name, i->n_kind_name, out);
    if (i->scored) print_counts("scored", i->scored, i->n_token, scored_name, 4, out);
    if (i->has_corpus)
        fprintf(out, "corpus     seed %llu (%s)\n", (unsigned long long)i->corpus_seed,
                i->corpus_seed >> 31 ? "for training" : "held out");
}

kv_status kv_inspect_trace(const char *path, bool deep, FILE *out) {
    kv_status st = KV_OK;
    kv_trace *trace = NULL;
    KV_TRY(kv_trace_open(path, &trace));
    print_trace(kv_trace_get(trace), out);
    if (deep) KV_TRY(kv_inspect_deep(trace, out));
out:
    kv_trace_close(trace);
    return st;
}
