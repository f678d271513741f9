/* dms: golden vector maths.md 12.6, gradients of mask and gate by finite differences, hard limit = eviction, schedule, weights. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policies/registry.h"
#include "reference/attention.h"
#include "reference/core/rand.h"
#include "reference/dms.h"
#include "reference/ops.h"
#include "reference/replay.h"
#include "tests/naive/naive_case.h"
#include "tests/naive/naive_dms.h"
#include "traces/dms_file.h"
#include "traces/safetensors.h"

/* sum of d_o times o over both heads of 12.6, and d_keep by the code under test, in blocks of `rows` queries */
static double objective(const kv_dms_head_f64 *head, const double *d_o, int32_t rows,
                        double *d_keep) {
    enum { N = 64 };
    double o[N * 4], dense[N * 4], p[N * N], scratch[N * N], sum = 0;
    for (int32_t first = 0; first < head->n; first += rows) {
        int32_t n = head->n - first < rows ? head->n - first : rows;
        const double *own = d_o + first * head->dim;
        kv_dms_rows_f64(head, first, n, o, dense, p, scratch);
        for (int32_t i = 0; i < n * head->dim; i++) sum += own[i] * o[i];
        kv_dms_rows_backward_f64(head, first, n, p, o, own, scratch, d_keep);
    }
    return sum;
}

Test(dms, golden_vector) {
    enum { S = 24, D = 4 };
    double q[2][S][D], k[S][D], v[S][D], d_o[2][S][D], keep[S], alpha[S], d_keep[S] = {0}, sum = 0;
    for (int t = 0; t < S; t++) {
        alpha[t] = kv_dms_alpha(-1 + 2 * sin(.8 * t), .5 * cos(2.3 * t), .5, &keep[t]);
        for (int j = 0; j < D; j++) {
            k[t][j] = 1.5 * sin(.7 * t + 1.1 * j);
            v[t][j] = cos(.4 * t - .9 * j);
            for (int g = 0; g < 2; g++) {
                q[g][t][j] = 1.5 * cos(.5 * t + .8 * j + 1.7 * g);
                d_o[g][t][j] = sin(.3 * t + .5 * j + g);
            }
        }
    }
    for (int g = 0; g < 2; g++) {
        kv_dms_head_f64 head = {.n = S,
                                .dim = D,
                                .window = 4,
                                .q = &q[g][0][0],
                                .k = &k[0][0],
                                .v = &v[0][0],
                                .q_stride = D,
                                .kv_stride = D,
                                .scale = .5,
                                .log_keep = keep};
        sum += objective(&head, &d_o[g][0][0], 7, d_keep);
    }
    cr_expect_float_eq(sum, 16.94056021, 1e-8, "objective %.10f", sum);
    double d_logit = -alpha[5] / .5 * d_keep[5];
    cr_expect_float_eq(d_logit, -0.0062582315, 1e-10, "d logit[5] = %.12f", d_logit);
}

Test(dms, mask_and_its_gradient_follow_the_definition) {
    enum { S = 37, D = 4 };
    for (uint32_t c = 0; c < 16; c++) {
        char name[96];
        double q[S][D + 1], kv[S][2 * D], d_o[S][D], keep[S], d_keep[S] = {0}, o[S * D];
        kv_dms_head_f64 head = {.n = S,
                                .dim = D,
                                .window = 1 + (int32_t)(c % 4) * 13,
                                .q = &q[0][0],
                                .k = &kv[0][0],
                                .v = &kv[0][D],
                                .q_stride = D + 1,
                                .kv_stride = 2 * D,
                                .scale = .5,
                                .softcap = c & 4 ? 2 : 0,
                                .log_keep = keep};
        int32_t rows = c & 8 ? 5 : 64;
        snprintf(name, sizeof name, "case %u: window %d, softcap %g, blocks of %d", c, head.window,
                 head.softcap, rows);
        for (int t = 0; t < S; t++) {
            kv_dms_alpha(2 * kv_rand_normal(1, c, (uint32_t)t, 0, 0), 0, .5, &keep[t]);
            for (int j = 0; j < D; j++) {
                q[t][j] = kv_rand_normal(1, c, (uint32_t)t, 1, (uint32_t)j);
                kv[t][j] = kv_rand_normal(1, c, (uint32_t)t, 2, (uint32_t)j);
                kv[t][D + j] = kv_rand_normal(1, c, (uint32_t)t, 3, (uint32_t)j);
                d_o[t][j] = kv_rand_normal(1, c, (uint32_t)t, 4, (uint32_t)j);
            }
        }
        double got = objective(&head, &d_o[0][0], rows, d_keep), want = 0, off = 0, size = 0;
        naive_dms_attention(&head, o);
        for (int i = 0; i < S * D; i++) want += (&d_o[0][0])[i] * o[i];
        cr_expect_float_eq(got, want, 1e-11, "%s: %.12g, want %.12g", name, got, want);
        for (int t = 0; t < S; t++) {
            const double h = 1e-4, step[4] = {h, -h, 2 * h, -2 * h};
            double value[4] = {0}, before = keep[t];
            for (int i = 0; i < 4; i++) {
                keep[t] = before + step[i];
                naive_dms_attention(&head, o);
                for (int j = 0; j < S * D; j++) value[i] += (&d_o[0][0])[j] * o[j];
            }
            keep[t] = before;
            double fd = (8 * (value[0] - value[1]) - (value[2] - value[3])) / (12 * h);
            off += pow(fd - d_keep[t], 2);
            size += fd * fd;
        }
        cr_expect_leq(sqrt(off), 1e-6 * sqrt(size) + 1e-10, "%s: gradient off by %g of %g", name,
                      sqrt(off), sqrt(size));
    }
}

Test(dms, gate_gradients) {
    enum { N = 20, IN = 5 };
    for (int m = 0; m <= 3; m += 3) {
        const kv_dms_spec spec = {.n_input = IN, .n_mlp = m, .scale = 3};
        int64_t n = kv_dms_param(&spec);
        double x[N * IN], param[64], grad[64], e[N], logit[N], off = 0, size = 0;
        kv_net_tape_f64 *tape = NULL;
        for (int i = 0; i < N * IN; i++) x[i] = kv_rand_normal(2, (uint32_t)i, 0, 0, 0);
        for (int64_t i = 0; i < n; i++) param[i] = .5 * kv_rand_normal(2, (uint32_t)i, 1, 0, 0);
        for (int64_t i = 0; i < n; i++) {
            const double h = 1e-4, step[4] = {h, -h, 2 * h, -2 * h};
            double value[4] = {0}, before = param[i];
            for (int s = 0; s < 4; s++) {
                param[i] = before + step[s];
                cr_assert_eq(kv_dms_logits_f64(&spec, param, N, x, &tape, logit), KV_OK);
                for (int t = 0; t < N; t++) value[s] += cos(t) * logit[t];
            }
            param[i] = before;
            grad[i] = (8 * (value[0] - value[1]) - (value[2] - value[3])) / (12 * h);
        }
        double ours[64];
        for (int t = 0; t < N; t++) e[t] = cos(t);
        cr_assert_eq(kv_dms_logits_f64(&spec, param, N, x, &tape, logit), KV_OK);
        cr_assert_eq(kv_dms_logits_backward_f64(&spec, param, N, x, tape, e, ours), KV_OK);
        for (int64_t i = 0; i < n; i++) {
            off += pow(ours[i] - grad[i], 2);
            size += grad[i] * grad[i];
        }
        cr_expect_leq(sqrt(off), 1e-6 * sqrt(size), "hidden %d: off by %g of %g", m, sqrt(off),
                      sqrt(size));
        kv_net_tape_free_f64(tape);
    }
    /* alpha's derivative, and the ends */
    double keep, up, down, h = 1e-5;
    double a = kv_dms_alpha(.3, .2, .4, &keep);
    kv_dms_alpha(.3 + h, .2, .4, &up);
    kv_dms_alpha(.3 - h, .2, .4, &down);
    cr_expect_float_eq(keep, log(1 - a), 1e-14);
    cr_expect_float_eq((up - down) / (2 * h), -a / .4, 1e-8);
    cr_expect(kv_dms_alpha(500, 0, .1, &keep) == 1 && keep == -5000);
    cr_expect_float_eq(kv_dms_target(5, 0, 100), 0, 0);
    cr_expect_float_eq(kv_dms_target(5, 25, 100), .5, 1e-15);
    cr_expect_float_eq(kv_dms_target(5, 300, 100), .8, 1e-15);
    double sum = 0, square = 0;
    for (uint32_t t = 0; t < 20000; t++) {
        double x = kv_dms_noise(1, 2, 3, t);
        sum += x / 20000;
        square += x * x / 20000;
    }
    /* logistic: mean 0, variance pi^2 / 3; 20000 draws: within 4 standard errors */
    cr_expect_float_eq(sum, 0, .06, "mean %g", sum);
    cr_expect_float_eq(square, M_PI * M_PI / 3, .15, "variance %g", square);
}

/* alpha 0 or 1 is eviction at t + window: the same output as masked attention under evict_at. */
Test(dms, hard_mask_is_eviction) {
    enum { S = 60, D = 8, W = 7 };
    naive_case c = naive_case_random(5, S, S, 1, 1, D, 1);
    float keep[S], o[S * D], dense[S * D], *p = malloc(S * S * 4), *scratch = malloc(S * S * 4);
    int32_t evict_at[S];
    for (int t = 0; t < S; t++) {
        bool leaves = kv_rand_uniform(6, (uint32_t)t, 0, 0, 0) < .7;
        keep[t] = leaves ? -200 : 0;
        evict_at[t] = leaves && t + W < S ? t + W : KV_NEVER;
    }
    kv_dms_head_f32 head = {.n = S,
                            .dim = D,
                            .window = W,
                            .q = c.q,
                            .k = c.k,
                            .v = c.v,
                            .q_stride = D,
                            .kv_stride = D,
                            .scale = (double)c.span.scale,
                            .log_keep = keep};
    kv_dms_rows_f32(&head, 0, S, o, dense, p, scratch);
    kv_masked_request request = {.evict_at = evict_at, .window = W, .want_output = true};
    kv_masked masked;
    cr_assert_eq(kv_masked_compute(&c.span, &request, &masked), KV_OK);
    for (int i = 0; i < S * D; i++)
        cr_assert_float_eq(o[i], masked.o[i], 2e-6, "o[%d] = %g, want %g", i, (double)o[i],
                           (double)masked.o[i]);
    kv_masked_free(&masked);
    free(p);
    free(scratch);
    naive_case_free(&c);
}

static kv_tensors written(const char *path, const kv_dms_spec *spec, const float *param) {
    const int32_t layer_id[] = {2};
    kv_tensors set;
    kv_dms_file f = {.spec = *spec,
                     .n_layer = 1,
                     .n_kv_head = 2,
                     .layer_id = layer_id,
                     .param = param,
                     .window = 5,
                     .shift = 1,
                     .budget = 20,
                     .sinks = 4};
    cr_assert_eq(kv_dms_file_write(path, &f), KV_OK, "%s", kv_error_message());
    cr_assert_eq(kv_safetensors_open(path, &set), KV_OK, "%s", kv_error_message());
    return set;
}

static int asked;
static kv_status count_gates(const kv_policy_input *input, float *logit, int32_t *shift) {
    asked++;
    return kv_dms_gate(input, logit, shift);
}

Test(dms, policy_reads_weights_or_the_recorded_gate) {
    enum { S = 40, D = 4, MODEL = 6 };
    char path[] = "/tmp/kv_test_dms_XXXXXX";
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    close(fd);
    const kv_policy *dms = kv_policy_find("dms");
    naive_case c = naive_case_random(7, S, S + 2, 4, 2, D, 1);
    float hidden[S * MODEL], gate[2 * (S + 2)], want[2 * (S + 2)];
    int32_t evict_at[2 * (S + 2)], shift;
    for (int i = 0; i < S * MODEL; i++) hidden[i] = (float)kv_rand_normal(8, (uint32_t)i, 0, 0, 0);
    c.span.layer_id = 2;
    c.span.n_layer = 3;
    c.span.hidden = hidden;
    c.span.d_model = MODEL;
    kv_run run = {.budget = 20, .sinks = 4, .window = 5};
    kv_params params;
    cr_assert_eq(kv_params_init(&params, dms->params), KV_OK);
    kv_ops table = kv_ops_cpu;
    table.gate_logits = count_gates;
    kv_policy_input input = {.span = &c.span, .run = &run, .params = &params, .ops = &table};
    const kv_dms_spec specs[] = {{KV_DMS_KV, 2 * D, 3, 0, 2},
                                 {KV_DMS_HIDDEN, MODEL, 0, 0, 1},
                                 {KV_DMS_CHANNEL, 1, 0, 3, 100}};
    for (int i = 0; i < 3; i++) {
        const kv_dms_spec *s = &specs[i];
        int64_t n = kv_dms_param(s);
        float param[2 * 64], x[S * 16];
        for (int64_t j = 0; j < 2 * n; j++)
            param[j] = (float)kv_rand_normal(9, (uint32_t)j, 0, 0, 0);
        kv_tensors set = written(path, s, param);
        input.weights = &set;
        cr_assert_eq(kv_dms_gate(&input, gate, &shift), KV_OK, "%s", kv_error_message());
        cr_expect_eq(shift, 1);
        for (int h = 0; h < 2; h++) {
            double logit[S];
            kv_net_tape_f64 *tape = NULL;
            double param64[64], x64[S * 16];
            kv_dms_input(s, S, D, c.k + h * (S + 2) * D, c.v + h * (S + 2) * D, D, hidden, x);
            for (int64_t j = 0; j < n; j++) param64[j] = (double)param[h * n + j];
            for (int j = 0; j < S * s->n_input; j++) x64[j] = (double)x[j];
            cr_assert_eq(kv_dms_logits_f64(s, param64, S, x64, &tape, logit), KV_OK);
            kv_net_tape_free_f64(tape);
            for (int t = 0; t < S; t++) {
                want[h * (S + 2) + t] = (float)logit[t];
                cr_assert_float_eq(gate[h * (S + 2) + t], logit[t], 1e-5 * (1 + fabs(logit[t])),
                                   "source %d, head %d, token %d: %g, want %g", i, h, t,
                                   (double)gate[h * (S + 2) + t], logit[t]);
            }
        }
        asked = 0;
        cr_assert_eq(kv_replay(dms, &input, evict_at), KV_OK);
        cr_expect_eq(asked, 1, "the gate is the device table's");
        for (int h = 0; h < 2; h++)
            for (int t = 0; t < S; t++) {
                bool leaves = t + 1 < S && want[h * (S + 2) + t + 1] > 0 && t + 5 < S;
                cr_assert_eq(evict_at[h * (S + 2) + t], leaves ? t + 5 : KV_NEVER,
                             "source %d, head %d, token %d", i, h, t);
            }
        run.window = 6;
        cr_expect_eq(kv_dms_gate(&input, gate, &shift), KV_E_DATA);
        run.window = 5;
        c.span.layer_id = 1;
        cr_expect_eq(kv_dms_gate(&input, gate, &shift), KV_E_DATA);
        c.span.layer_id = 2;
        /* a width that the file does not hold is refused before memory is taken for it */
        for (int32_t j = 0; j < set.n_tensor; j++) {
            kv_tensor *t = &set.tensor[j];
            const kv_tensor sound = *t;
            t->shape[1] = INT32_MAX;
            t->shape[t->n_dim - 1] = t->n_element = 0;
            cr_expect_eq(kv_dms_gate(&input, gate, &shift), KV_E_DATA, "%s: %s", t->name,
                         kv_error_message());
            *t = sound;
        }
        kv_tensors_free(&set);
    }
    /* the recorded gate: 0 does not mark, shift 0 and 1, the last token stays */
    input.weights = NULL;
    cr_expect_eq(kv_replay(dms, &input, evict_at), KV_E_DATA, "no gate, no weights");
    for (int i = 0; i < 2 * (S + 2); i++) gate[i] = i % 3 ? (i % 3 == 1 ? 1e-30f : -1) : 0;
    c.span.gate = gate;
    for (int late = 0; late < 2; late++) {
        cr_assert_eq(kv_params_set(&params, "dms", "shift", late ? "1" : "0"), KV_OK);
        cr_assert_eq(kv_replay(dms, &input, evict_at), KV_OK);
        for (int t = 0; t < S; t++)
            cr_expect_eq(evict_at[t], (t + late) % 3 == 1 && t + 5 < S ? t + 5 : KV_NEVER,
                         "shift %d, token %d", late, t);
    }
    kv_params_free(&params);
    naive_case_free(&c);
    unlink(path);
}

/* Keys seen by the queries u >= budget of a document, counted query by query. */
static int64_t seen_by_definition(const kv_dms_cache *cache, const float *logit, int64_t n,
                                  double offset) {
    int64_t seen = 0;
    for (int64_t u = cache->budget; u < n; u++)
        for (int64_t t = 0; t <= u; t++) {
            const bool marked =
                t + cache->shift < n && (double)logit[t + cache->shift] + offset > 0;
            seen += !marked || u < t + cache->window;
        }
    return seen;
}

Test(dms, cache_under_an_offset_by_definition) {
    enum { LANES = 3 };
    static const int64_t docs[][4] = {{0, 1, 1, 1}, {0, 70, 71, 120}, {0, 40, 90, 90}};
    static const int32_t n_docs[] = {1, 3, 2};
    for (uint32_t i = 0; i < 24; i++) {
        const int32_t which = (int32_t)(i % 3), budgets[] = {0, 1, 15, 60};
        const int64_t n = docs[which][n_docs[which]];
        const kv_dms_cache cache = {.n_doc = n_docs[which],
                                    .budget = budgets[i % 4],
                                    .window = 1 + (int32_t)(i % 5) * 6,
                                    .shift = (int32_t)(i / 3 % 2),
                                    .doc_first = docs[which]};
        const double offset = i % 2 ? 0 : (double)(i % 7) / 4 - .75;
        float logit[LANES * 120], below = -INFINITY, above = INFINITY, least = INFINITY,
                                  most = -INFINITY;
        int64_t want = 0, counted = 0;
        for (int64_t j = 0; j < LANES * n; j++) /* exact multiples, so that some meet the offset */
            logit[j] = (float)(round(4 * kv_rand_normal(17, i, (uint32_t)j, 0, 0)) / 4);
        for (int lane = 0; lane < LANES; lane++)
            for (int32_t d = 0; d < cache.n_doc; d++) {
                const int64_t first = cache.doc_first[d], size = cache.doc_first[d + 1] - first;
                want += seen_by_definition(&cache, logit + lane * n + first, size, offset);
                counted += size > cache.budget ? size - cache.budget : 0;
            }
        cr_expect_eq(kv_dms_kept(&cache, LANES, logit, offset), want, "case %u", i);
        cr_expect_eq(kv_dms_counted(&cache, LANES), counted, "case %u", i);
        kv_dms_gap(LANES * n, logit, offset, &below, &above);
        for (int64_t j = 0; j < LANES * n; j++) {
            if ((double)logit[j] + offset > 0 && logit[j] < least) least = logit[j];
            if ((double)logit[j] + offset <= 0 && logit[j] > most) most = logit[j];
        }
        cr_expect(below == most && above == least, "case %u: gap %g to %g, not %g to %g", i,
                  (double)below, (double)above, (double)most, (double)least);
    }
}
