/* dms weights -> safetensors. */
#include "traces/dms_file.h"

#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "traces/safetensors.h"

enum { NAME_SIZE = 64, PARTS = 4, META_MAX = 48 };

kv_status kv_dms_file_write(const char *path, const kv_dms_file *f) {
    kv_status st = KV_OK;
    int64_t m = f->spec.n_mlp, ni = f->spec.n_input, n_param = kv_dms_param(&f->spec);
    int64_t heads = f->n_kv_head;
    const struct {
        const char *name;
        int64_t shape[3];
        int32_t n_dim;
        int64_t size;
    } mlp[PARTS] = {{"w1", {heads, m, ni}, 3, m * ni},
                    {"b1", {heads, m}, 2, m},
                    {"w2", {heads, m}, 2, m},
                    {"bias", {heads}, 1, 1}},
      linear[] = {{"weight", {heads, ni}, 2, ni}, {"bias", {heads}, 1, 1}};
    int32_t parts = m ? PARTS : 2, n = 0;
    kv_tensor_out *out = NULL;
    char(*name)[NAME_SIZE] = NULL;
    float *data = NULL;
    KV_NEW(out, f->n_layer * PARTS);
    KV_NEW(name, f->n_layer * PARTS);
    KV_NEW(data, f->n_layer * heads * n_param);
    float *next = data;
    for (int32_t layer = 0; layer < f->n_layer; layer++) {
        int64_t at = 0;
        for (int32_t p = 0; p < parts; p++, n++) {
            int64_t size = m ? mlp[p].size : linear[p].size;
            snprintf(name[n], NAME_SIZE, "layers.%d.gate.%s", f->layer_id[layer],
                     m ? mlp[p].name : linear[p].name);
            out[n] = (kv_tensor_out){
                .name = name[n], .n_dim = m ? mlp[p].n_dim : linear[p].n_dim, .data = next};
            memcpy(out[n].shape, m ? mlp[p].shape : linear[p].shape, 3 * sizeof *out[n].shape);
            for (int64_t h = 0; h < heads; h++, next += size)
                memcpy(next, f->param + (layer * heads + h) * n_param + at,
                       (size_t)size * sizeof *next);
            at += size;
        }
    }
    static const char *const source[] = {"kv", "hidden", "channel"};
    char window[16], shift[16], channel[16], scale[32], budget[16], sinks[16];
    snprintf(window, sizeof window, "%d", f->window);
    snprintf(shift, sizeof shift, "%d", f->shift);
    snprintf(channel, sizeof channel, "%d", f->spec.channel);
    snprintf(budget, sizeof budget, "%d", f->budget);
    snprintf(sinks, sizeof sinks, "%d", f->sinks);
    kv_format_real(f->spec.scale, scale, sizeof scale);
    const char *meta[META_MAX] = {
        "policy",  "dms",   "window", window, "shift",  shift,  "source", source[f->spec.source],
        "channel", channel, "scale",  scale,  "budget", budget, "sinks",  sinks};
    int32_t at = 0;
    while (meta[at]) at++;
    for (int32_t i = 0; f->more && f->more[i] && at < META_MAX - 1; i++) meta[at++] = f->more[i];
    KV_TRY(kv_safetensors_write(path, out, n, meta));
out:
    free(out);
    free(name);
    free(data);
    return st;
}
