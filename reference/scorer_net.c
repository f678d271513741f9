/* Shape, parameter layout and starting values of the scorer network (contract.md 2, maths.md 5, 6.9). */
#include "reference/scorer_net.h"

#include <math.h>
#include <string.h>

#include "reference/core/rand.h"

static const char *const part_name[KV_NET_PARTS] = {
    "feature.weight", "feature.bias",  "phi_q.weight", "phi_k.weight", "phi_v.weight",
    "gate_i.weight",  "gate_f.weight", "gate_i.bias",  "gate_f.bias",  "readout.weight",
    "mlp.w1",         "mlp.b1",        "mlp.w2",
};

int32_t kv_net_feature_width(const kv_net_spec *spec) {
    return spec->n_feature ? spec->n_feature : spec->n_input;
}

void kv_net_describe(const kv_net_spec *spec, kv_net_layout *out) {
    int32_t on = spec->recurrent, wide = kv_net_feature_width(spec);
    int32_t gate = spec->hidden_gate ? spec->n_hidden : wide;
    const int32_t shape[KV_NET_PARTS][2] = {
        [KV_NET_FEATURE_W] = {on * spec->n_feature, spec->n_input},
        [KV_NET_FEATURE_B] = {on * spec->n_feature, 0},
        [KV_NET_PHI_Q] = {on * spec->n_key, wide},
        [KV_NET_PHI_K] = {on * spec->n_key, wide},
        [KV_NET_PHI_V] = {on * spec->n_value, wide},
        [KV_NET_GATE_I_W] = {on * gate, 0},
        [KV_NET_GATE_F_W] = {on * gate, 0},
        [KV_NET_GATE_I_B] = {on, 0},
        [KV_NET_GATE_F_B] = {on, 0},
        [KV_NET_READOUT] = {on * spec->n_value, 0},
        [KV_NET_MLP_W1] = {spec->n_mlp, spec->n_input},
        [KV_NET_MLP_B1] = {spec->n_mlp, 0},
        [KV_NET_MLP_W2] = {spec->n_mlp, 0},
    };
    memset(out, 0, sizeof *out);
    for (int i = 0; i < KV_NET_PARTS; i++) {
        out->part[i].at = out->n_param;
        out->part[i].rows = shape[i][0];
        out->part[i].cols = shape[i][1];
        out->part[i].name = part_name[i];
        out->n_param += kv_net_part_size(out, (kv_net_part)i);
    }
}

int64_t kv_net_part_size(const kv_net_layout *layout, kv_net_part part) {
    int64_t cols = layout->part[part].cols;
    return layout->part[part].rows * (cols ? cols : 1);
}

void kv_net_init(const kv_net_spec *spec, uint64_t seed, int32_t lane, int32_t n_lane,
                 float *param) {
    kv_net_layout layout;
    kv_net_describe(spec, &layout);
    memset(param, 0, (size_t)layout.n_param * sizeof *param);
    /* Standard deviations; parts that are not listed start at 0. Linear features follow maths.md 6.9; without a norm a zero readout
     * gives the StreamingLLM start, with it a small one is needed because silu(h) has no scale to grow into. */
    double fan = 1 / sqrt((double)spec->n_input);
    double phi = spec->n_feature ? 2 / sqrt((double)spec->n_feature) : fan;
    const double spread[KV_NET_PARTS] = {
        [KV_NET_FEATURE_W] = fan,
        [KV_NET_PHI_Q] = phi,
        [KV_NET_PHI_K] = phi,
        [KV_NET_PHI_V] = phi,
        [KV_NET_READOUT] = spec->norm ? 0.02 : 0,
        [KV_NET_MLP_W1] = fan,
    };
    for (int i = 0; i < KV_NET_PARTS; i++)
        for (int64_t j = 0; spread[i] > 0 && j < kv_net_part_size(&layout, (kv_net_part)i); j++)
            param[layout.part[i].at + j] =
                (float)(spread[i] *
                        kv_rand_normal(seed, (uint32_t)lane, (uint32_t)i, (uint32_t)j, 0));
    if (spec->recurrent)
        param[layout.part[KV_NET_GATE_F_B].at] =
            n_lane > 1 ? (float)(4 + 4.0 * lane / (n_lane - 1)) : 4;
}

double kv_net_log_gamma(double theta, double *slope) {
    const double top = 1e-3, bottom = 1e-6;
    double s = 1 / (1 + exp(-theta)), delta = top - (top - bottom) * s;
    if (slope) *slope = (top - bottom) * s * (1 - s) / (1 - delta);
    return log1p(-delta);
}
