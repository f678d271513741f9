/* Scorer, all pairs, double. */
#include "tests/naive/naive_scorer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double silu(double x) { return x * sigmoid(x); }

static double product(int32_t n, const double *w, const double *x) {
    double sum = 0;
    for (int32_t j = 0; j < n; j++) sum += w[j] * x[j];
    return sum;
}

typedef struct token {
    double *q, *k, *v, i, log_forget, own;
} token;

static token features(const kv_net_spec *s, const kv_net_layout *l, const double *p,
                      const double *x, const double *hidden) {
    token t = {0};
    for (int32_t m = 0; m < s->n_mlp; m++)
        t.own += p[l->part[KV_NET_MLP_W2].at + m] *
                 silu(product(s->n_input, p + l->part[KV_NET_MLP_W1].at + m * s->n_input, x) +
                      p[l->part[KV_NET_MLP_B1].at + m]);
    if (!s->recurrent) return t;
    int32_t wide = s->n_feature ? s->n_feature : s->n_input;
    double *f = malloc((size_t)wide * sizeof *f);
    for (int32_t i = 0; i < wide; i++)
        f[i] =
            s->n_feature
                ? silu(product(s->n_input, p + l->part[KV_NET_FEATURE_W].at + i * s->n_input, x) +
                       p[l->part[KV_NET_FEATURE_B].at + i])
                : x[i];
    t.q = malloc((size_t)s->n_key * sizeof *t.q);
    t.k = malloc((size_t)s->n_key * sizeof *t.k);
    t.v = malloc((size_t)s->n_value * sizeof *t.v);
    for (int32_t i = 0; i < s->n_key; i++) {
        t.q[i] = product(wide, p + l->part[KV_NET_PHI_Q].at + i * wide, f);
        t.k[i] = product(wide, p + l->part[KV_NET_PHI_K].at + i * wide, f);
    }
    for (int32_t i = 0; i < s->n_value; i++)
        t.v[i] = product(wide, p + l->part[KV_NET_PHI_V].at + i * wide, f);
    const double *z = s->hidden_gate ? hidden : f;
    int32_t nz = s->hidden_gate ? s->n_hidden : wide;
    double pre_i = product(nz, p + l->part[KV_NET_GATE_I_W].at, z) + p[l->part[KV_NET_GATE_I_B].at];
    double pre_f = product(nz, p + l->part[KV_NET_GATE_F_W].at, z) + p[l->part[KV_NET_GATE_F_B].at];
    t.i = 15 * tanh(pre_i / 15);
    if (s->sigmoid_gate) t.i = log(sigmoid(t.i));
    t.log_forget = log(sigmoid(15 * tanh(pre_f / 15)));
    free(f);
    return t;
}

/* a . silu(h) where memory position `p` is read with `query`, from the tokens first..p. */
static double readout(const kv_net_spec *s, const double *a, const token *all, int64_t first,
                      int64_t p, const double *query) {
    double *num = calloc((size_t)s->n_value, sizeof *num), den = 0, log_decay = 0, size = 0, r = 0;
    for (int64_t u = p; u >= first; u--) { /* D(p,u) = exp(Fc_p - Fc_u + i_u) */
        double weight =
            product(s->n_key, query, all[u].k) / sqrt((double)s->n_key) * exp(log_decay + all[u].i);
        for (int32_t c = 0; c < s->n_value; c++) num[c] += weight * all[u].v[c];
        den += weight;
        log_decay += all[u].log_forget;
    }
    for (int32_t c = 0; c < s->n_value; c++) size += num[c] * num[c] / s->n_value;
    double by = s->norm ? sqrt(size + 1e-6) : fmax(fabs(den), 1);
    for (int32_t c = 0; c < s->n_value; c++) r += a[c] * silu(num[c] / by);
    free(num);
    return r;
}

void naive_scorer(const kv_net_spec *spec, const double *param, const kv_net_input_f64 *in,
                  double *rhat) {
    kv_net_layout l;
    kv_net_describe(spec, &l);
    token *all = calloc((size_t)in->n_token, sizeof *all);
    for (int64_t t = 0; t < in->n_token; t++) {
        all[t] = features(spec, &l, param, in->x + t * spec->n_input,
                          in->hidden ? in->hidden + t * spec->n_hidden : NULL);
        rhat[t] = all[t].own;
    }
    for (int32_t doc = 0; spec->recurrent && doc < in->n_doc; doc++)
        for (int64_t t = in->doc_first[doc]; t < in->doc_first[doc + 1]; t++) {
            int64_t p = t + (spec->delay ? spec->window : 0);
            if (p < in->doc_first[doc + 1])
                rhat[t] += readout(spec, param + l.part[KV_NET_READOUT].at, all, in->doc_first[doc],
                                   p, all[t].q);
        }
    for (int64_t t = 0; t < in->n_token; t++) {
        free(all[t].q);
        free(all[t].k);
        free(all[t].v);
    }
    free(all);
}

void naive_scorer_gradient(const kv_net_spec *spec, const double *param, const kv_net_input_f64 *in,
                           const double *e, double *grad) {
    kv_net_layout l;
    kv_net_describe(spec, &l);
    double *p = malloc((size_t)l.n_param * sizeof *p);
    double *rhat = malloc((size_t)in->n_token * sizeof *rhat);
    memcpy(p, param, (size_t)l.n_param * sizeof *p);
    for (int64_t i = 0; i < l.n_param; i++) {
        /* Four points: error h^4. The norm bends within 1e-3 (its eps), so h lies well below that. */
        const double h = 2e-5, step[4] = {h, -h, 2 * h, -2 * h};
        double loss[4];
        for (int k = 0; k < 4; k++) {
            p[i] = param[i] + step[k];
            naive_scorer(spec, p, in, rhat);
            loss[k] = 0;
            for (int64_t t = 0; t < in->n_token; t++) loss[k] += e[t] * rhat[t];
        }
        p[i] = param[i];
        grad[i] = (8 * (loss[0] - loss[1]) - (loss[2] - loss[3])) / (12 * h);
    }
    free(p);
    free(rhat);
}
