/* Scorer weights -> safetensors. */
#include "traces/scorer_file.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "traces/safetensors.h"

enum { NAME_SIZE = 64, META_MAX = 64 };

/* One part of all heads of a layer, [n_kv_head][size]. */
static kv_status gather(const kv_scorer_file *f, const kv_net_layout *l, int32_t layer, int part,
                        char *name, kv_tensor_out *out) {
    int64_t size = kv_net_part_size(l, (kv_net_part)part);
    int32_t rows = l->part[part].rows, cols = l->part[part].cols;
    float *data = kv_mem_new((size_t)(f->n_kv_head * size), sizeof *data);
    if (!data) return KV_E_INTERNAL;
    for (int32_t h = 0; h < f->n_kv_head; h++)
        memcpy(data + h * size,
               f->param + (layer * f->n_kv_head + h) * l->n_param + l->part[part].at,
               (size_t)size * sizeof *data);
    snprintf(name, NAME_SIZE, "layers.%d.%s", f->layer_id[layer], l->part[part].name);
    *out = (kv_tensor_out){.name = name,
                           .n_dim = cols       ? 3
                                    : rows > 1 ? 2
                                               : 1,
                           .shape = {f->n_kv_head, rows, cols},
                           .data = data};
    return KV_OK;
}

kv_status kv_scorer_file_write(const char *path, const kv_scorer_file *f) {
    kv_status st = KV_OK;
    kv_net_layout l;
    kv_tensor_out *out = NULL;
    char(*name)[NAME_SIZE] = NULL;
    int32_t n = 0, per_layer = KV_NET_PARTS + 1;
    kv_net_describe(&f->spec, &l);
    KV_NEW(out, f->n_layer * per_layer);
    KV_NEW(name, f->n_layer * per_layer);
    for (int32_t layer = 0; layer < f->n_layer; layer++) {
        for (int part = 0; part < KV_NET_PARTS; part++) {
            if (kv_net_part_size(&l, (kv_net_part)part) == 0) continue;
            KV_TRY(gather(f, &l, layer, part, name[n], &out[n]));
            n++;
        }
        float *theta;
        KV_NEW(theta, f->n_kv_head);
        memcpy(theta, f->theta + layer * f->n_kv_head, (size_t)f->n_kv_head * sizeof *theta);
        snprintf(name[n], NAME_SIZE, "layers.%d.theta", f->layer_id[layer]);
        out[n] = (kv_tensor_out){name[n], 1, {f->n_kv_head}, theta};
        n++;
    }
    char budget[16], sinks[16], window[16], delay[16], power[32];
    snprintf(budget, sizeof budget, "%d", f->budget);
    snprintf(sinks, sizeof sinks, "%d", f->sinks);
    snprintf(window, sizeof window, "%d", f->spec.window);
    snprintf(delay, sizeof delay, "%d", f->spec.recurrent && f->spec.delay ? f->spec.window : 0);
    if (isinf(f->target_power))
        snprintf(power, sizeof power, "max");
    else
        kv_format_real(f->target_power, power, sizeof power);
    const char *meta[META_MAX] = {"policy",        f->policy,
                                  "budget",        budget,
                                  "sinks",         sinks,
                                  "window",        window,
                                  "delay",         delay,
                                  "target_power",  power,
                                  "target_reduce", f->target_mean ? "mean" : "max",
                                  "lse",           f->sparse_lse ? "sparse" : "dense",
                                  "norm",          f->spec.norm ? "rms" : "none",
                                  "gate",          f->spec.sigmoid_gate ? "sigmoid" : "exp",
                                  "input",         f->spec.hidden_input ? "hidden" : "kv",
                                  "gate_input",    f->spec.hidden_gate ? "hidden" : "feature"};
    int32_t at = 0;
    while (meta[at]) at++;
    for (int32_t i = 0; f->more && f->more[i] && at < META_MAX - 1; i++) meta[at++] = f->more[i];
    KV_TRY(kv_safetensors_write(path, out, n, meta));
out:
    for (int32_t i = 0; out && i < n; i++) free((void *)(uintptr_t)out[i].data);
    free(out);
    free(name);
    return st;
}
