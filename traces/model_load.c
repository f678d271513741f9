/* Model folders in Hugging Face layout: config.json is read strictly, every tensor is checked against it, and whatever the engine
 * does not compute (other architectures, sliding windows, other RoPE scalings, extra biases) is refused by name. */
#include "traces/model_load.h"

#include <inttypes.h>
#include <jansson.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "reference/core/mem.h"
#include "traces/safetensors.h"

enum { EXTENT_MAX = 1 << 24 };

static const struct {
    const char *name;
    kv_family family;
    bool qkv_bias, qk_norm;
} architecture[] = {
    {"Qwen3ForCausalLM", KV_QWEN3, false, true},
    {"Qwen2ForCausalLM", KV_QWEN2, true, false},
    {"LlamaForCausalLM", KV_LLAMA, false, false},
};

static const struct {
    const char *name;
    kv_dtype type;
} torch_dtype[] = {{"float32", KV_F32}, {"float16", KV_F16}, {"bfloat16", KV_BF16}};

/* Sizes that shapes are made of. */
enum { ONE, D_MODEL, D_FF, Q_SIZE, KV_SIZE, HEAD_DIM, VOCAB, N_EXTENT };
typedef enum condition { ALWAYS, WITH_BIAS, WITH_NORM } condition;

static const struct {
    size_t offset; /* in kv_layer_weights */
    const char *name;
    int rows, cols;
    condition when;
} layer_tensor[] = {
#define W(field) offsetof(kv_layer_weights, field)
    {W(norm_attn), "input_layernorm.weight", ONE, D_MODEL, ALWAYS},
    {W(norm_mlp), "post_attention_layernorm.weight", ONE, D_MODEL, ALWAYS},
    {W(wq), "self_attn.q_proj.weight", Q_SIZE, D_MODEL, ALWAYS},
    {W(wk), "self_attn.k_proj.weight", KV_SIZE, D_MODEL, ALWAYS},
    {W(wv), "self_attn.v_proj.weight", KV_SIZE, D_MODEL, ALWAYS},
    {W(wo), "self_attn.o_proj.weight", D_MODEL, Q_SIZE, ALWAYS},
    {W(w_gate), "mlp.gate_proj.weight", D_FF, D_MODEL, ALWAYS},
    {W(w_up), "mlp.up_proj.weight", D_FF, D_MODEL, ALWAYS},
    {W(w_down), "mlp.down_proj.weight", D_MODEL, D_FF, ALWAYS},
    {W(bq), "self_attn.q_proj.bias", ONE, Q_SIZE, WITH_BIAS},
    {W(bk), "self_attn.k_proj.bias", ONE, KV_SIZE, WITH_BIAS},
    {W(bv), "self_attn.v_proj.bias", ONE, KV_SIZE, WITH_BIAS},
    {W(q_norm), "self_attn.q_norm.weight", ONE, HEAD_DIM, WITH_NORM},
    {W(k_norm), "self_attn.k_norm.weight", ONE, HEAD_DIM, WITH_NORM},
#undef W
};

/* A config.json and its path for messages. */
typedef struct source {
    const char *path;
    const json_t *root;
} source;

static bool is_absent(const json_t *value) { return !value || json_is_null(value); }

static kv_status read_int(const source *s, const char *key, int32_t absent, int32_t *out) {
    const json_t *value = json_object_get(s->root, key);
    json_int_t found = json_integer_value(value);
    if (is_absent(value) && absent > 0) {
        *out = absent;
        return KV_OK;
    }
    if (!json_is_integer(value) || found < 1 || found > EXTENT_MAX)
        return KV_FAIL(KV_E_DATA, "%s: %s must be a whole number in 1..%d", s->path, key,
                       EXTENT_MAX);
    *out = (int32_t)found;
    return KV_OK;
}

static kv_status read_real(const source *s, const json_t *object, const char *key, double absent,
                           double *out) {
    const json_t *value = json_object_get(object, key);
    if (is_absent(value) && absent > 0) {
        *out = absent;
        return KV_OK;
    }
    if (!json_is_number(value) || !(json_number_value(value) > 0))
        return KV_FAIL(KV_E_DATA, "%s: %s must be a number > 0", s->path, key);
    *out = json_number_value(value);
    return KV_OK;
}

static kv_status refuse_flag(const source *s, const char *key) {
    if (!json_is_true(json_object_get(s->root, key))) return KV_OK;
    return KV_FAIL(KV_E_DATA, "%s: %s is true, which the engine does not compute", s->path, key);
}

static kv_status refuse_unsupported(const source *s) {
    static const char *const flag[] = {"use_sliding_window", "attention_bias", "mlp_bias"};
    kv_status st = KV_OK;
    size_t i;
    json_t *item;
    for (i = 0; i < sizeof flag / sizeof *flag; i++) KV_TRY(refuse_flag(s, flag[i]));
    json_array_foreach(json_object_get(s->root, "layer_types"), i, item) {
        const char *type = json_string_value(item);
        if (!type || strcmp(type, "full_attention") != 0)
            KV_RAISE(KV_E_DATA, "%s: layer_types[%zu] is %s, only full_attention is supported",
                     s->path, i, type ? type : "not a text");
    }
    const json_t *act = json_object_get(s->root, "hidden_act");
    if (!is_absent(act) && (!json_is_string(act) || strcmp(json_string_value(act), "silu") != 0))
        KV_RAISE(KV_E_DATA, "%s: hidden_act is %s, only silu is supported", s->path,
                 json_is_string(act) ? json_string_value(act) : "not a text");
    if (!is_absent(json_object_get(s->root, "quantization_config")))
        KV_RAISE(KV_E_DATA, "%s: quantization_config: only f32, f16 and bf16 weights are supported",
                 s->path);
out:
    return st;
}

static kv_status refuse_partial(const source *s, const json_t *object) {
    double partial = 1.0;
    kv_status st = read_real(s, object, "partial_rotary_factor", 1.0, &partial);
    if (st == KV_OK && partial < 1.0)
        st = KV_FAIL(KV_E_DATA, "%s: partial_rotary_factor is %g, only 1 is supported", s->path,
                     partial);
    return st;
}

/* rope_theta and rope_scaling; newer transformers write both into rope_parameters. */
static kv_status read_rope(const source *s, kv_model_config *c) {
    kv_status st = KV_OK;
    const json_t *rope = json_object_get(s->root, "rope_parameters"), *type;
    bool joined = json_is_object(rope);
    if (!joined) rope = json_object_get(s->root, "rope_scaling");
    KV_TRY(refuse_partial(s, s->root));
    KV_TRY(refuse_partial(s, rope));
    KV_TRY(read_real(s, joined ? rope : s->root, "rope_theta", joined ? -1.0 : 10000.0,
                     &c->rope_theta));
    if (is_absent(rope)) goto out;
    type = json_object_get(rope, "rope_type");
    if (!type) type = json_object_get(rope, "type");
    const char *name = json_string_value(type);
    if (name && strcmp(name, "default") == 0) goto out;
    if (!name || strcmp(name, "llama3") != 0)
        KV_RAISE(KV_E_DATA, "%s: rope scaling type is %s, supported are default and llama3",
                 s->path, name ? name : "missing");
    const source scaling = {s->path, rope};
    KV_TRY(read_real(s, rope, "factor", -1.0, &c->rope_factor));
    KV_TRY(read_real(s, rope, "low_freq_factor", -1.0, &c->rope_low));
    KV_TRY(read_real(s, rope, "high_freq_factor", -1.0, &c->rope_high));
    KV_TRY(read_int(&scaling, "original_max_position_embeddings", 0, &c->rope_original));
    if (c->rope_high <= c->rope_low)
        KV_RAISE(KV_E_DATA, "%s: high_freq_factor %g must exceed low_freq_factor %g", s->path,
                 c->rope_high, c->rope_low);
    c->llama3_scaling = true;
out:
    return st;
}

static kv_status read_architecture(const source *s, kv_model_config *c) {
    const json_t *list = json_object_get(s->root, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    for (size_t i = 0; name && i < sizeof architecture / sizeof *architecture; i++)
        if (strcmp(name, architecture[i].name) == 0) {
            c->family = architecture[i].family;
            c->qkv_bias = architecture[i].qkv_bias;
            c->qk_norm = architecture[i].qk_norm;
            return KV_OK;
        }
    return KV_FAIL(KV_E_DATA,
                   "%s: architecture %s is not supported; supported are Qwen3ForCausalLM, "
                   "Qwen2ForCausalLM and LlamaForCausalLM",
                   s->path, name ? name : "(none given)");
}

static kv_status read_dtype(const source *s, kv_model_config *c) {
    const json_t *value = json_object_get(s->root, "torch_dtype");
    if (is_absent(value)) value = json_object_get(s->root, "dtype");
    c->compute_type = KV_F32;
    if (is_absent(value)) return KV_OK;
    const char *name = json_string_value(value);
    for (size_t i = 0; name && i < sizeof torch_dtype / sizeof *torch_dtype; i++)
        if (strcmp(name, torch_dtype[i].name) == 0) {
            c->compute_type = torch_dtype[i].type;
            return KV_OK;
        }
    return KV_FAIL(KV_E_DATA, "%s: torch_dtype is %s, supported are float32, float16, bfloat16",
                   s->path, name ? name : "not a text");
}

/* A token id, or the first of a list; -1 when there is none. */
static int32_t read_token(const source *s, const char *key) {
    const json_t *value = json_object_get(s->root, key);
    if (json_is_array(value)) value = json_array_get(value, 0);
    json_int_t id = json_integer_value(value);
    return json_is_integer(value) && id >= 0 && id < EXTENT_MAX ? (int32_t)id : -1;
}

static kv_status read_config(const source *s, kv_model_config *c) {
    kv_status st = KV_OK;
    if (!json_is_object(s->root)) KV_RAISE(KV_E_DATA, "%s: is not a JSON object", s->path);
    KV_TRY(read_architecture(s, c));
    KV_TRY(refuse_unsupported(s));
    KV_TRY(read_int(s, "num_hidden_layers", 0, &c->n_layer));
    KV_TRY(read_int(s, "num_attention_heads", 0, &c->n_q_head));
    KV_TRY(
        read_int(s, "num_key_value_heads", c->family == KV_LLAMA ? c->n_q_head : 0, &c->n_kv_head));
    KV_TRY(read_int(s, "hidden_size", 0, &c->d_model));
    KV_TRY(read_int(s, "intermediate_size", 0, &c->d_ff));
    KV_TRY(read_int(s, "vocab_size", 0, &c->vocab));
    KV_TRY(read_int(s, "max_position_embeddings", 0, &c->max_position));
    KV_TRY(read_int(s, "head_dim", c->family == KV_QWEN3 ? 0 : c->d_model / c->n_q_head,
                    &c->head_dim));
    KV_TRY(read_real(s, s->root, "rms_norm_eps", 1e-6, &c->rms_eps));
    KV_TRY(read_rope(s, c));
    KV_TRY(read_dtype(s, c));
    c->tied_embedding = json_is_true(json_object_get(s->root, "tie_word_embeddings"));
    c->bos = read_token(s, "bos_token_id");
    c->eos = read_token(s, "eos_token_id");
    if (c->n_q_head % c->n_kv_head != 0)
        KV_RAISE(KV_E_DATA,
                 "%s: num_attention_heads %d is not a multiple of num_key_value_heads %d", s->path,
                 c->n_q_head, c->n_kv_head);
    if (c->head_dim % 2 != 0 || (int64_t)c->n_q_head * c->head_dim > EXTENT_MAX)
        KV_RAISE(KV_E_DATA,
                 "%s: head_dim %d with %d heads: it must be even and heads * head_dim "
                 "at most %d",
                 s->path, c->head_dim, c->n_q_head, EXTENT_MAX);
out:
    return st;
}

static kv_status bind(const kv_tensors *set, const char *name, const int64_t *extent, int rows,
                      int cols, bool *used, kv_weight *out) {
    const int64_t shape[2] = {extent[rows], extent[cols]};
    const kv_tensor *t = NULL;
    bool vector = rows == ONE;
    kv_status st = kv_tensors_get(set, name, vector ? 1 : 2, vector ? shape + 1 : shape, &t);
    if (st != KV_OK) return st;
    used[t - set->tensor] = true;
    *out = (kv_weight){t->type, (int32_t)shape[0], (int32_t)shape[1], t->data};
    return KV_OK;
}

/* A tensor nobody asked for means that the model computes something the engine does not. */
static kv_status check_unused(const kv_tensors *set, const bool *used, bool tied) {
    for (int32_t i = 0; i < set->n_tensor; i++) {
        const char *name = set->tensor[i].name;
        if (used[i] || strstr(name, "rotary_emb.inv_freq") ||
            (tied && strcmp(name, "lm_head.weight") == 0))
            continue;
        return KV_FAIL(KV_E_DATA,
                       "%s: tensor \"%s\" has no place in the architecture that config.json names",
                       set->path, name);
    }
    return KV_OK;
}

static kv_status bind_all(kv_model *model) {
    const kv_model_config *c = &model->config;
    const kv_tensors *set = model->tensors;
    kv_status st = KV_OK;
    bool *used = NULL;
    char name[128];
    const int64_t extent[N_EXTENT] = {[ONE] = 1,
                                      [D_MODEL] = c->d_model,
                                      [D_FF] = c->d_ff,
                                      [Q_SIZE] = (int64_t)c->n_q_head * c->head_dim,
                                      [KV_SIZE] = (int64_t)c->n_kv_head * c->head_dim,
                                      [HEAD_DIM] = c->head_dim,
                                      [VOCAB] = c->vocab};
    KV_NEW(used, set->n_tensor);
    KV_TRY(bind(set, "model.embed_tokens.weight", extent, VOCAB, D_MODEL, used, &model->embedding));
    KV_TRY(bind(set, "model.norm.weight", extent, ONE, D_MODEL, used, &model->norm_final));
    model->lm_head = model->embedding;
    if (!c->tied_embedding)
        KV_TRY(bind(set, "lm_head.weight", extent, VOCAB, D_MODEL, used, &model->lm_head));
    for (int32_t l = 0; l < c->n_layer; l++)
        for (size_t i = 0; i < sizeof layer_tensor / sizeof *layer_tensor; i++) {
            if ((layer_tensor[i].when == WITH_BIAS && !c->qkv_bias) ||
                (layer_tensor[i].when == WITH_NORM && !c->qk_norm))
                continue;
            snprintf(name, sizeof name, "model.layers.%d.%s", l, layer_tensor[i].name);
            char *slot = (char *)&model->layer[l] + layer_tensor[i].offset;
            KV_TRY(bind(set, name, extent, layer_tensor[i].rows, layer_tensor[i].cols, used,
                        (kv_weight *)(void *)slot));
        }
    KV_TRY(check_unused(set, used, c->tied_embedding));
out:
    free(used);
    return st;
}

static char *join(const char *dir, const char *file) {
    size_t size = strlen(dir) + strlen(file) + 2;
    char *path = kv_mem_new(size, 1);
    if (path) snprintf(path, size, "%s/%s", dir, file);
    return path;
}

static kv_status load_config(const char *dir, kv_model_config *c) {
    kv_status st = KV_OK;
    json_error_t error;
    char *path = join(dir, "config.json");
    json_t *root = NULL;
    if (!path) return KV_E_INTERNAL;
    if (access(path, R_OK) != 0)
        KV_RAISE(KV_E_NOINPUT,
                 "%s: not found; a model folder holds config.json and "
                 "model.safetensors",
                 path);
    root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!root) KV_RAISE(KV_E_DATA, "%s:%d: %s", path, error.line, error.text);
    KV_TRY(read_config(&(source){path, root}, c));
out:
    json_decref(root);
    free(path);
    return st;
}

static kv_status load_weights(const char *dir, kv_model *model) {
    kv_status st = KV_OK;
    char *single = join(dir, "model.safetensors"), *sharded = NULL;
    sharded = join(dir, "model.safetensors.index.json");
    if (!single || !sharded) {
        st = KV_E_INTERNAL;
        goto out;
    }
    bool is_single = access(single, F_OK) == 0;
    if (!is_single && access(sharded, F_OK) != 0)
        KV_RAISE(KV_E_NOINPUT, "%s: not found, nor is model.safetensors.index.json", single);
    KV_TRY(kv_safetensors_open(is_single ? single : sharded, model->tensors));
    snprintf(model->hash, sizeof model->hash, "%016" PRIx64 "%016" PRIx64, model->tensors->hash[0],
             model->tensors->hash[1]);
out:
    free(single);
    free(sharded);
    return st;
}

kv_status kv_model_load(const char *dir, kv_model **out) {
    kv_status st = KV_OK;
    kv_model *model = NULL;
    KV_NEW(model, 1);
    KV_NEW(model->tensors, 1);
    model->path = kv_strdup(dir);
    if (!model->path) {
        st = KV_E_INTERNAL;
        goto out;
    }
    KV_TRY(load_config(dir, &model->config));
    KV_TRY(load_weights(dir, model));
    KV_NEW(model->layer, model->config.n_layer);
    KV_NEW(model->inv_freq, model->config.head_dim / 2);
    KV_TRY(bind_all(model));
    kv_rope_frequencies(&model->config, model->inv_freq);
out:
    *out = st == KV_OK ? model : NULL;
    if (st != KV_OK) kv_model_free(model);
    return st;
}
