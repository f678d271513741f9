/* The recorder: one forward pass with a hook in every layer's attention. */
#include "experiments/record.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "experiments/token_file.h"
#include "experiments/version.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"
#include "reference/core/progress.h"
#include "traces/corpus.h"
#include "traces/model_load.h"
#include "traces/trace.h"

enum { DEFAULT_LENGTH = 16384 };

typedef struct source { /* what the model reads */
    int32_t *token;
    uint8_t *kind, *scored; /* NULL for a token file */
    int32_t n;
} source;

static kv_status check_options(const kv_record_options *o) {
    kv_status st = KV_OK;
    struct stat found;
    if (!o->model_dir)
        KV_RAISE(KV_E_USAGE, "--model DIR is missing: which model is to be recorded?");
    if (!o->output) KV_RAISE(KV_E_USAGE, "--output FILE is missing: where should the trace go?");
    if (!o->corpus == !o->tokens)
        KV_RAISE(KV_E_USAGE, "give either --corpus NAME or --tokens FILE%s",
                 o->corpus ? ", not both" : "");
    if (o->length < 0) KV_RAISE(KV_E_USAGE, "--length %d is negative", o->length);
    if (!o->force && stat(o->output, &found) == 0 && found.st_size > 0)
        KV_RAISE(KV_E_CANTCREATE, "%s exists; choose another --output or replace it with --force",
                 o->output);
out:
    return st;
}

static kv_status read_source(const kv_record_options *o, source *s) {
    kv_status st = KV_OK;
    if (o->tokens) {
        KV_TRY(kv_token_file_read(o->tokens, &s->token, &s->n));
        if (o->length > s->n)
            KV_RAISE(KV_E_USAGE, "--length %d: %s holds only %d tokens", o->length, o->tokens,
                     s->n);
        if (o->length) s->n = o->length;
        goto out;
    }
    s->n = o->length ? o->length : DEFAULT_LENGTH;
    KV_NEW(s->token, s->n);
    KV_NEW(s->kind, s->n);
    KV_NEW(s->scored, s->n);
    KV_TRY(kv_corpus_generate(o->corpus, o->seed, s->n, s->token, s->kind, s->scored));
out:
    return st;
}

static kv_status check_tokens(const kv_record_options *o, const kv_model *model, const source *s) {
    kv_status st = KV_OK;
    for (int32_t i = 0; i < s->n; i++)
        if (s->token[i] >= model->config.vocab)
            KV_RAISE(KV_E_DATA,
                     "%s: token %d is %d, but the vocabulary of %s ends at %d; use the model's own "
                     "tokenizer",
                     o->tokens ? o->tokens : o->corpus, i + 1, s->token[i], model->path,
                     model->config.vocab - 1);
    if (s->n > model->config.max_position)
        kv_log(KV_LOG_WARN, "record",
               "%d tokens exceed the %d positions that the model was made for", s->n,
               model->config.max_position);
out:
    return st;
}

typedef struct recorder {
    const kv_ops *ops;
    kv_trace_writer *writer;
    float *lse; /* [n_q_head][n_token] */
    kv_progress progress;
    int32_t done;
} recorder;

static kv_status record_layer(void *context, const kv_span *span, float *o) {
    recorder *r = context;
    kv_status st = KV_OK;
    KV_TRY(kv_interrupt_poll());
    KV_TRY(r->ops->attend(span, o, r->lse));
    KV_TRY(kv_trace_writer_layer(r->writer, span, r->lse));
    kv_progress_update(&r->progress, ++r->done);
out:
    return st;
}

typedef struct provenance {
    char title[160], source[320], history[192], producer[160];
} provenance;

static void describe(const kv_record_options *o, const kv_model *model, const source *s,
                     kv_trace_spec *spec, provenance *p) {
    static const char *const family[] = {"qwen3", "qwen2", "llama"};
    const kv_model_config *c = &model->config;
    const char *version = o->corpus ? kv_corpus_version(o->corpus) : "token file";
    if (o->corpus)
        snprintf(p->title, sizeof p->title, "%s, seed %llu, %d tokens", version,
                 (unsigned long long)o->seed, s->n);
    else
        snprintf(p->title, sizeof p->title, "%d tokens of a token file", s->n);
    snprintf(p->source, sizeof p->source,
             "%s, %d layers, %d query heads, %d KV heads, d_model %d, weights %s",
             family[c->family], c->n_layer, c->n_q_head, c->n_kv_head, c->d_model, model->hash);
    snprintf(p->history, sizeof p->history, "kvlab record: %s", p->title);
    snprintf(p->producer, sizeof p->producer, "kvlab %s, commit %.12s%s", kv_version_build.number,
             kv_version_build.commit, kv_version_build.dirty ? " with local changes" : "");
    spec->title = p->title;
    spec->source = p->source;
    spec->history = p->history;
    spec->producer = p->producer;
    spec->task = version;
    spec->model_hash = model->hash;
    spec->has_corpus = o->corpus != NULL;
    spec->corpus = version;
    spec->corpus_seed = o->seed;
}

/* One attempt with storage type `type`; *overflowed says that a wider type would have worked. */
static kv_status record_as(const kv_record_options *o, const kv_model *model, const source *s,
                           kv_dtype type, bool *overflowed) {
    kv_status st = KV_OK;
    const kv_model_config *c = &model->config;
    recorder r = {.ops = o->ops};
    provenance text;
    int32_t *layer_id = NULL;
    KV_NEW(layer_id, c->n_layer);
    KV_NEW(r.lse, (size_t)c->n_q_head * (size_t)s->n);
    for (int32_t i = 0; i < c->n_layer; i++) layer_id[i] = i;
    kv_trace_spec spec = {.n_layer = c->n_layer,
                          .n_q_head = c->n_q_head,
                          .n_kv_head = c->n_kv_head,
                          .head_dim = c->head_dim,
                          .d_model = c->d_model,
                          .n_model_layer = c->n_layer,
                          .layer_id = layer_id,
                          .rope_theta = c->rope_theta,
                          .softmax_scale = 1.0 / sqrt((double)c->head_dim),
                          .inv_freq = model->inv_freq,
                          .type = type,
                          .hidden = o->hidden,
                          .lse = true,
                          .n_token = s->n,
                          .token = s->token,
                          .kind = s->kind,
                          .scored = s->scored};
    describe(o, model, s, &spec, &text);
    KV_TRY(kv_trace_writer_open(o->output, &spec, &r.writer));
    kv_progress_begin(&r.progress, "record", c->n_layer);
    const kv_model_hooks hooks = {.context = &r, .attend = record_layer, .ops = o->ops};
    st = kv_model_forward(model, s->token, NULL, s->n, &hooks);
    kv_progress_end(&r.progress);
    *overflowed = st == KV_E_DATA && kv_trace_writer_overflowed(r.writer);
    if (st != KV_OK) goto out;
    kv_trace_writer *w = r.writer;
    r.writer = NULL;
    KV_TRY(kv_trace_writer_close(w, true));
out:
    kv_trace_writer_close(r.writer, false);
    free(r.lse);
    free(layer_id);
    return st;
}

kv_status kv_record(const kv_record_options *o) {
    kv_status st = KV_OK;
    kv_model *model = NULL;
    source s = {0};
    bool overflowed = false;
    KV_TRY(check_options(o));
    KV_TRY(read_source(o, &s));
    KV_TRY(kv_model_load(o->model_dir, &model));
    KV_TRY(check_tokens(o, model, &s));
    kv_dtype type = o->any_dtype ? KV_F16 : o->dtype;
    st = record_as(o, model, &s, type, &overflowed);
    if (overflowed && o->any_dtype) {
        kv_log(KV_LOG_INFO, "record", "a value exceeds the range of f16: storing f32 instead");
        st = record_as(o, model, &s, KV_F32, &overflowed);
    }
out:
    kv_model_free(model);
    free(s.token);
    free(s.kind);
    free(s.scored);
    return st;
}
