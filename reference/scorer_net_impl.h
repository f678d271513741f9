/* Forward and backward pass of the scorer network (scorer_net.h), hand-written, for one element type. The includer defines
 *   REAL        float or double
 *   NAME(x)     x with the type's suffix
 * Sources: maths.md 5, 6. What one token needs alone is here, the memory in scorer_memory_impl.h. */
#include <math.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/gemm.h"
#include "reference/scorer_net.h"

enum { TILE_TOKENS = 512 };

typedef struct chunk {
    int64_t first;      /* first position */
    int32_t n;          /* positions */
    int32_t skip;       /* leading rows without a token to read for */
    bool opens, closes; /* first, last chunk of its document */
} chunk;

struct NAME(kv_net_tape) {
    int64_t n_token;
    /* n_augmented: n_value, and the normaliser's 1 without a norm */
    int32_t chunk, n_chunk, n_augmented;
    chunk *list;
    REAL *mlp;         /* [n_token][n_mlp] before silu */
    REAL *feature, *f; /* [n_token][n_feature] before and after silu */
    REAL *project;     /* [n_token][n_project]: q~, k~, v~, 1 */
    double *gate; /* [n_token][4]: i, log sigmoid f, their derivatives by the pre-activations */
    REAL *h, *divisor, *den; /* [n_token][n_value], [n_token]; den: sign where it divides, else 0 */
    REAL *state;             /* [n_chunk + 1][n_key][n_augmented] at the start of each chunk */
    double *level;           /* [n_chunk + 1] their log scale M */
    /* backward */
    REAL *delta;     /* [n_token][n_augmented] gradient at the readout of token t */
    REAL *d_project; /* [n_token][n_project] */
    REAL *d_gate;    /* [n_token][2] */
    REAL *d_state;   /* [n_key][n_augmented] */
    /* one chunk */
    REAL *weight, *product, *mix; /* [chunk][chunk] */
    REAL *rows, *scaled;          /* [chunk][max(n_key, n_augmented)] */
    double *sum, *top, *fresh;    /* [chunk] b_j, mu_j, log strength of a write */
    /* one tile of tokens */
    REAL *value, *slope, *ones; /* [TILE_TOKENS][widest layer], ones [TILE_TOKENS] */
};

static int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

void NAME(kv_net_tape_free)(struct NAME(kv_net_tape) * t) {
    if (!t) return;
    void *owned[] = {t->list,      t->mlp,     t->feature, t->f,      t->project, t->gate,
                     t->h,         t->divisor, t->den,     t->state,  t->level,   t->delta,
                     t->d_project, t->d_gate,  t->d_state, t->weight, t->product, t->mix,
                     t->rows,      t->scaled,  t->sum,     t->top,    t->fresh,   t->value,
                     t->slope,     t->ones};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) free(owned[i]);
    free(t);
}

static int32_t n_project(const kv_net_spec *spec) { return 2 * spec->n_key + spec->n_value + 1; }

static kv_status new_tape(const kv_net_spec *spec, const NAME(kv_net_input) * in,
                          struct NAME(kv_net_tape) * *out) {
    kv_status st = KV_OK;
    struct NAME(kv_net_tape) *t = NULL;
    int64_t n = in->n_token, on = spec->recurrent, c = in->chunk;
    int64_t chunks = on * (n / c + in->n_doc);
    int32_t augmented = spec->n_value + !spec->norm, side = larger(spec->n_key, augmented);
    int32_t widest = larger(larger(spec->n_mlp, kv_net_feature_width(spec)), spec->n_value);
    KV_NEW(t, 1);
    t->n_token = n;
    t->chunk = in->chunk;
    t->n_augmented = augmented;
    KV_NEW(t->mlp, n * spec->n_mlp);
    KV_NEW(t->value, TILE_TOKENS * widest);
    KV_NEW(t->slope, TILE_TOKENS * widest);
    KV_NEW(t->ones, TILE_TOKENS);
    for (int i = 0; i < TILE_TOKENS; i++) t->ones[i] = 1;
    KV_NEW(t->list, chunks);
    KV_NEW(t->feature, on * n * spec->n_feature);
    KV_NEW(t->f, on * n * spec->n_feature);
    KV_NEW(t->project, on * n * n_project(spec));
    KV_NEW(t->gate, on * n * 4);
    KV_NEW(t->h, on * n * spec->n_value);
    KV_NEW(t->divisor, on * n);
    KV_NEW(t->den, on * n);
    KV_NEW(t->state, (chunks + 1) * spec->n_key * augmented);
    KV_NEW(t->level, chunks + 1);
    KV_NEW(t->delta, on * n * augmented);
    KV_NEW(t->d_project, on * n * n_project(spec));
    KV_NEW(t->d_gate, on * n * 2);
    KV_NEW(t->d_state, spec->n_key * augmented);
    KV_NEW(t->weight, on * c * c);
    KV_NEW(t->product, on * c * c);
    KV_NEW(t->mix, on * c * c);
    KV_NEW(t->rows, on * c * side);
    KV_NEW(t->scaled, on * c * side);
    KV_NEW(t->sum, on * c);
    KV_NEW(t->top, on * c);
    KV_NEW(t->fresh, on * c);
    *out = t;
out:
    if (st != KV_OK) NAME(kv_net_tape_free)(t);
    return st;
}

static const REAL *at_part(const kv_net_layout *l, const REAL *param, kv_net_part p) {
    return param + l->part[p].at;
}

static void add_rows(int32_t n, int32_t width, const REAL *bias, REAL *z) {
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < width; j++) z[(int64_t)i * width + j] += bias[j];
}

static double log_sigmoid(double x) { return fmin(x, 0) - log1p(exp(-fabs(x))); }

/* i, log sigmoid(f) and their derivatives by the pre-activations. */
static void gate_values(const kv_net_spec *spec, double pre_i, double pre_f, double *out) {
    double ti = tanh(pre_i / 15), tf = tanh(pre_f / 15), i = 15 * ti, f = 15 * tf;
    out[0] = spec->sigmoid_gate ? log_sigmoid(i) : i;
    out[1] = log_sigmoid(f);
    out[2] = (1 - ti * ti) * (spec->sigmoid_gate ? 1 / (1 + exp(i)) : 1);
    out[3] = (1 - tf * tf) / (1 + exp(f));
}

/* Everything that looks at one token alone: own score, features, projections, gates. */
static void forward_tokens(const kv_net_spec *spec, const kv_net_layout *l, const REAL *param,
                           const NAME(kv_net_input) * in, struct NAME(kv_net_tape) * t,
                           REAL *rhat) {
    int32_t wide = kv_net_feature_width(spec), np = n_project(spec), m = spec->n_mlp;
    for (int64_t at = 0; at < in->n_token; at += TILE_TOKENS) {
        int32_t n =
            (int32_t)(in->n_token - at < TILE_TOKENS ? in->n_token - at : (int64_t)TILE_TOKENS);
        const REAL *x = in->x + at * spec->n_input;
        memset(rhat + at, 0, (size_t)n * sizeof *rhat);
        if (m) {
            REAL *z = t->mlp + at * m;
            NAME(kv_gemm)
            (KV_NT, n, m, spec->n_input, x, spec->n_input, at_part(l, param, KV_NET_MLP_W1),
             spec->n_input, false, z, m);
            add_rows(n, m, at_part(l, param, KV_NET_MLP_B1), z);
            NAME(kv_silu)((int64_t)n * m, z, t->value, NULL);
            NAME(kv_gemm)
            (KV_NN, n, 1, m, t->value, m, at_part(l, param, KV_NET_MLP_W2), 1, false, rhat + at, 1);
        }
        if (!spec->recurrent) continue;
        const REAL *f = x;
        if (spec->n_feature) {
            REAL *z = t->feature + at * wide, *to = t->f + at * wide;
            NAME(kv_gemm)
            (KV_NT, n, wide, spec->n_input, x, spec->n_input, at_part(l, param, KV_NET_FEATURE_W),
             spec->n_input, false, z, wide);
            add_rows(n, wide, at_part(l, param, KV_NET_FEATURE_B), z);
            NAME(kv_silu)((int64_t)n * wide, z, to, NULL);
            f = to;
        }
        REAL *project = t->project + at * np, pre[2 * TILE_TOKENS];
        NAME(kv_gemm)
        (KV_NT, n, np - 1, wide, f, wide, at_part(l, param, KV_NET_PHI_Q), wide, false, project,
         np);
        int32_t width = l->part[KV_NET_GATE_I_W].rows;
        NAME(kv_gemm)
        (KV_NT, n, 2, width, spec->hidden_gate ? in->hidden + at * width : f, width,
         at_part(l, param, KV_NET_GATE_I_W), width, false, pre, 2);
        for (int32_t i = 0; i < n; i++) {
            project[(int64_t)i * np + np - 1] = 1;
            gate_values(spec, (double)pre[2 * i] + (double)*at_part(l, param, KV_NET_GATE_I_B),
                        (double)pre[2 * i + 1] + (double)*at_part(l, param, KV_NET_GATE_F_B),
                        t->gate + (at + i) * 4);
        }
    }
}

#include "reference/scorer_memory_impl.h"

kv_status NAME(kv_net_forward)(const kv_net_spec *spec, const REAL *param,
                               const NAME(kv_net_input) * in, struct NAME(kv_net_tape) * *tape,
                               REAL *rhat) {
    kv_net_layout l;
    kv_net_describe(spec, &l);
    if (*tape && ((*tape)->n_token != in->n_token || (*tape)->chunk != in->chunk)) {
        NAME(kv_net_tape_free)(*tape);
        *tape = NULL;
    }
    if (!*tape) {
        kv_status st = new_tape(spec, in, tape);
        if (st != KV_OK) return st;
    }
    struct NAME(kv_net_tape) *t = *tape;
    forward_tokens(spec, &l, param, in, t, rhat);
    if (!spec->recurrent) return KV_OK;
    list_chunks(spec, in, t);
    forward_memory(spec, t);
    const REAL *a = at_part(&l, param, KV_NET_READOUT);
    for (int64_t at = 0; at < in->n_token; at += TILE_TOKENS) {
        int32_t n =
            (int32_t)(in->n_token - at < TILE_TOKENS ? in->n_token - at : (int64_t)TILE_TOKENS);
        NAME(kv_silu)((int64_t)n * spec->n_value, t->h + at * spec->n_value, t->value, NULL);
        NAME(kv_gemm)
        (KV_NN, n, 1, spec->n_value, t->value, spec->n_value, a, 1, true, rhat + at, 1);
    }
    return KV_OK;
}

/* e -> da and delta_p of maths.md 6.6, or through the norm (6.11). */
static void backward_readout(const kv_net_spec *spec, const kv_net_layout *l, const REAL *param,
                             struct NAME(kv_net_tape) * t, const REAL *e, REAL *grad) {
    int32_t nv = spec->n_value, na = t->n_augmented;
    const REAL *a = at_part(l, param, KV_NET_READOUT);
    REAL *da = grad + l->part[KV_NET_READOUT].at;
    memset(t->delta, 0, (size_t)(t->n_token * na) * sizeof *t->delta);
    for (int64_t at = 0; at < t->n_token; at += TILE_TOKENS) {
        int32_t n =
            (int32_t)(t->n_token - at < TILE_TOKENS ? t->n_token - at : (int64_t)TILE_TOKENS);
        NAME(kv_silu)((int64_t)n * nv, t->h + at * nv, t->value, t->slope);
        NAME(kv_gemm)(KV_TN, 1, nv, n, e + at, 1, t->value, nv, at > 0, da, nv);
        for (int32_t i = 0; i < n; i++) {
            int64_t token = at + i;
            const REAL *h = t->h + token * nv;
            REAL *g = t->slope + (int64_t)i * nv, *delta = t->delta + token * na;
            double along = 0;
            if (t->divisor[token] == 0) continue; /* nothing was read for it */
            for (int32_t c = 0; c < nv; c++) {
                g[c] *= e[token] * a[c];
                along += (double)g[c] * (double)h[c];
            }
            REAL by = 1 / t->divisor[token], mean = (REAL)(spec->norm ? along / nv : 0);
            for (int32_t c = 0; c < nv; c++) delta[c] = (g[c] - mean * h[c]) * by;
            if (!spec->norm) delta[nv] = -(REAL)along * by * t->den[token];
        }
    }
}

/* Through projections and features to the parameters. */
static void backward_tokens(const kv_net_spec *spec, const kv_net_layout *l, const REAL *param,
                            const NAME(kv_net_input) * in, struct NAME(kv_net_tape) * t,
                            const REAL *e, REAL *grad) {
    int32_t wide = kv_net_feature_width(spec), np = n_project(spec), m = spec->n_mlp;
    int32_t gates = l->part[KV_NET_GATE_I_W].rows, ni = spec->n_input;
#define GRAD(p) (grad + l->part[p].at)
    for (int64_t at = 0; at < in->n_token; at += TILE_TOKENS) {
        bool more = at > 0;
        int32_t n =
            (int32_t)(in->n_token - at < TILE_TOKENS ? in->n_token - at : (int64_t)TILE_TOKENS);
        const REAL *x = in->x + at * ni;
        if (m) {
            const REAL *w2 = at_part(l, param, KV_NET_MLP_W2);
            NAME(kv_silu)((int64_t)n * m, t->mlp + at * m, t->value, t->slope);
            NAME(kv_gemm)(KV_TN, 1, m, n, e + at, 1, t->value, m, more, GRAD(KV_NET_MLP_W2), m);
            for (int32_t i = 0; i < n; i++)
                for (int32_t j = 0; j < m; j++) t->slope[(int64_t)i * m + j] *= e[at + i] * w2[j];
            NAME(kv_gemm)(KV_TN, m, ni, n, t->slope, m, x, ni, more, GRAD(KV_NET_MLP_W1), ni);
            NAME(kv_gemm)(KV_TN, 1, m, n, t->ones, 1, t->slope, m, more, GRAD(KV_NET_MLP_B1), m);
        }
        if (!spec->recurrent) continue;
        const REAL *f = spec->n_feature ? t->f + at * wide : x;
        const REAL *d_project = t->d_project + at * np, *d_gate = t->d_gate + at * 2;
        const REAL *gate_in = spec->hidden_gate ? in->hidden + at * gates : f;
        NAME(kv_gemm)
        (KV_TN, np - 1, wide, n, d_project, np, f, wide, more, GRAD(KV_NET_PHI_Q), wide);
        NAME(kv_gemm)
        (KV_TN, 2, gates, n, d_gate, 2, gate_in, gates, more, GRAD(KV_NET_GATE_I_W), gates);
        NAME(kv_gemm)(KV_TN, 1, 2, n, t->ones, 1, d_gate, 2, more, GRAD(KV_NET_GATE_I_B), 2);
        if (!spec->n_feature) continue;
        REAL *df = t->value;
        NAME(kv_silu)((int64_t)n * wide, t->feature + at * wide, df, t->slope);
        NAME(kv_gemm)
        (KV_NN, n, wide, np - 1, d_project, np, at_part(l, param, KV_NET_PHI_Q), wide, false, df,
         wide);
        if (!spec->hidden_gate) NAME(kv_gemm)
        (KV_NN, n, wide, 2, d_gate, 2, at_part(l, param, KV_NET_GATE_I_W), wide, true, df, wide);
        for (int64_t i = 0; i < (int64_t)n * wide; i++) df[i] *= t->slope[i];
        NAME(kv_gemm)(KV_TN, wide, ni, n, df, wide, x, ni, more, GRAD(KV_NET_FEATURE_W), ni);
        NAME(kv_gemm)(KV_TN, 1, wide, n, t->ones, 1, df, wide, more, GRAD(KV_NET_FEATURE_B), wide);
    }
#undef GRAD
}

kv_status NAME(kv_net_backward)(const kv_net_spec *spec, const REAL *param,
                                const NAME(kv_net_input) * in, struct NAME(kv_net_tape) * t,
                                const REAL *e, REAL *grad) {
    kv_net_layout l;
    kv_net_describe(spec, &l);
    if (!t || t->n_token != in->n_token)
        return KV_FAIL(KV_E_INTERNAL, "backward pass without the forward pass of the same tokens");
    if (spec->recurrent) {
        backward_readout(spec, &l, param, t, e, grad);
        backward_memory(spec, t);
    }
    backward_tokens(spec, &l, param, in, t, e, grad);
    return KV_OK;
}
