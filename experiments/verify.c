/* Frame of `kvlab verify` (engineering.md 2e): counts, verdicts, the table. */
#include "experiments/verify.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

typedef struct operation {
    const char *name;
    kv_status (*run)(kv_verify *v);
} operation;

static const operation operations[] = {
    {"dense", kv_verify_dense},
    {"masked", kv_verify_masked},
    {"turned", kv_verify_turned},
    {"attend", kv_verify_attend},
    {"metrics", kv_verify_metrics},
    {"oracle step", kv_verify_step},
    {"knorm", kv_verify_norms},
    {"keydiff", kv_verify_cosines},
    {"select", kv_verify_select},
    {"closed loop", kv_verify_replay},
    {"mlp", kv_verify_mlp},
    {"mlstm", kv_verify_mlstm},
    {"scorer gradients", kv_verify_gradients},
    {"boundary loss", kv_verify_boundary},
    {"adamw", kv_verify_adamw},
    {"soft mask", kv_verify_soft_mask},
    {"dms gates", kv_verify_gates},
    {"gate offset", kv_verify_gate_offset},
    {"linear", kv_verify_linear},
    {"forward", kv_verify_forward},
};
enum { OPERATIONS = sizeof operations / sizeof *operations, SHOWN = 10, SMALL_TOKENS = 257 };

struct kv_verify {
    FILE *out;
    const kv_ops *ops;
    kv_gpu *gpu;
    bool small;
    const char *name, *path;
    char label[256];
    int64_t cases, cells, decisions, near, failures, unsupported;
    double worst; /* largest error in units of its tolerance */
    char worst_at[320];
};

bool kv_verify_skips(const kv_verify *v, int32_t n_token) {
    return v->small && n_token > SMALL_TOKENS;
}

const kv_ops *kv_verify_ops(const kv_verify *v) { return v->ops; }
kv_gpu *kv_verify_gpu(const kv_verify *v) { return v->gpu; }

kv_status kv_verify_send(kv_gpu *g, const void *x, size_t bytes, kv_gpu_buffer **out) {
    const kv_status st = kv_gpu_new(g, bytes, out);
    return st == KV_OK && x ? kv_gpu_put(*out, x, bytes) : st;
}

void kv_verify_case(kv_verify *v, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(v->label, sizeof v->label, format, list);
    va_end(list);
    v->cases++;
}

__attribute__((format(printf, 2, 3))) static void fail(kv_verify *v, const char *format, ...) {
    va_list list;
    if (v->failures++ >= SHOWN) return;
    fprintf(v->out, "FAIL %s (%s) [%s] ", v->name, v->path, v->label);
    va_start(list, format);
    vfprintf(v->out, format, list);
    va_end(list);
    fputc('\n', v->out);
}

static void compare(kv_verify *v, const char *what, int32_t row, int32_t i, double got, double want,
                    double relative, double absolute) {
    const double tolerance = absolute + relative * fabs(want);
    v->cells++;
    if (got == want) return;
    const double error = isfinite(got) && isfinite(want) ? fabs(got - want) / tolerance : INFINITY;
    if (error > v->worst) {
        v->worst = error;
        snprintf(v->worst_at, sizeof v->worst_at, "%s of %s", what, v->label);
    }
    if (!(error <= 1))
        fail(v, "%s[%d][%d] is %.9g, CPU %.9g (tolerance %.3g)", what, row, i, got, want,
             tolerance);
}

void kv_verify_f32(kv_verify *v, const char *what, kv_verify_shape s, const float *got,
                   const float *want, double relative, double absolute) {
    for (int32_t row = 0; row < s.rows; row++)
        for (int32_t i = 0; i < s.n; i++) {
            const size_t at = (size_t)row * (size_t)s.stride + (size_t)i;
            compare(v, what, row, i, (double)got[at], (double)want[at], relative, absolute);
        }
}

void kv_verify_f64(kv_verify *v, const char *what, kv_verify_shape s, const double *got,
                   const double *want, double relative, double absolute) {
    for (int32_t row = 0; row < s.rows; row++)
        for (int32_t i = 0; i < s.n; i++) {
            const size_t at = (size_t)row * (size_t)s.stride + (size_t)i;
            compare(v, what, row, i, got[at], want[at], relative, absolute);
        }
}

void kv_verify_i32(kv_verify *v, const char *what, kv_verify_shape s, const int32_t *got,
                   const int32_t *want) {
    for (int32_t row = 0; row < s.rows; row++)
        for (int32_t i = 0; i < s.n; i++) {
            const size_t at = (size_t)row * (size_t)s.stride + (size_t)i;
            v->cells++;
            if (got[at] != want[at])
                fail(v, "%s[%d][%d] is %d, CPU %d", what, row, i, got[at], want[at]);
        }
}

void kv_verify_bits(kv_verify *v, const char *what, kv_verify_shape s, const float *got,
                    const float *want) {
    for (int32_t row = 0; row < s.rows; row++)
        for (int32_t i = 0; i < s.n; i++) {
            const size_t at = (size_t)row * (size_t)s.stride + (size_t)i;
            v->cells++;
            if (kv_bits(got[at]) != kv_bits(want[at]))
                fail(v, "%s[%d][%d] is %.9g (bits %08x), CPU %.9g (%08x)", what, row, i,
                     (double)got[at], kv_bits(got[at]), (double)want[at], kv_bits(want[at]));
        }
}

void kv_verify_decisions(kv_verify *v, const char *what, int64_t cells, int64_t near,
                         int64_t wrong) {
    v->cells += cells;
    v->decisions += cells;
    v->near += near;
    if (wrong > 0)
        fail(v, "%s: %lld of %lld decisions differ", what, (long long)wrong, (long long)cells);
}

void kv_verify_unsupported(kv_verify *v, const char *why) {
    v->unsupported++;
    fprintf(v->out, "unsupported: %s (%s) [%s] %s\n", v->name, v->path, v->label, why);
}

/* Runs one operation on one path; *failed counts those that did not pass. */
static kv_status judge(kv_verify *v, const operation *op, const char *path, int *failed) {
    FILE *out = v->out;
    *v = (kv_verify){.out = out,
                     .ops = v->ops,
                     .gpu = v->gpu,
                     .small = v->small,
                     .name = op->name,
                     .path = path,
                     .label = "?"};
    const kv_status st = op->run(v);
    if (st == KV_E_INTERRUPTED) return st;
    if (st != KV_OK) fail(v, "could not run: %s", kv_error_message());
    if (v->near * 1000 > v->decisions)
        fail(v, "%lld of %lld decisions are near ties, at most .1 %% may be", (long long)v->near,
             (long long)v->decisions);
    const char *verdict = v->failures ? "FAIL" : v->unsupported ? "UNSUPPORTED" : "pass";
    *failed += v->failures > 0;
    fprintf(out, "%-20s %-8s %6lld %10lld %9.3f %9lld %6lld  %s\n", op->name, path,
            (long long)v->cases, (long long)v->cells, v->worst, (long long)v->near,
            (long long)v->unsupported, verdict);
    if (v->worst > 0.5) fprintf(out, "%20s worst: %s\n", "", v->worst_at);
    fflush(out);
    return KV_OK;
}

/* Without a GPU too, so that a wrong name is not first told to get one. */
static kv_status check_name(const char *only) {
    char names[OPERATIONS * 24] = "";
    for (int i = 0; i < OPERATIONS; i++) {
        if (!only || strcmp(only, operations[i].name) == 0) return KV_OK;
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", operations[i].name);
    }
    return KV_FAIL(KV_E_USAGE, "--only: there is no operation '%s'; expected one of %s", only,
                   names);
}

kv_status kv_verify_run(FILE *out, const char *only, bool small) {
    kv_status st = KV_OK;
    kv_verify v = {.out = out, .small = small};
    kv_gpu_info info;
    int failed = 0, matched = 0;
    KV_TRY(check_name(only));
    KV_TRY(kv_gpu_ops(&v.ops));
    KV_TRY(kv_gpu_shared(&v.gpu));
    kv_gpu_describe(v.gpu, &info);
    fprintf(out, "%s, compute capability %d.%d\n", info.name, info.cc_major, info.cc_minor);
    fprintf(out, "%-20s %-8s %6s %10s %9s %9s %6s  %s\n", "operation", "path", "cases", "cells",
            "error/tol", "near ties", "unsup.", "verdict");
    const bool hopper = info.hopper;
    for (int path = hopper ? 1 : 0; path >= 0; path--) {
        KV_TRY(kv_gpu_use_hopper(v.gpu, path == 1));
        for (int i = 0; i < OPERATIONS; i++) {
            if (only && strcmp(only, operations[i].name) != 0) continue;
            KV_TRY(judge(&v, &operations[i], path ? "wgmma" : "mma.sync", &failed));
            matched++;
        }
    }
    KV_TRY(kv_gpu_use_hopper(v.gpu, hopper));
    if (failed) KV_RAISE(KV_E_MISMATCH, "verify: %d of %d rows failed", failed, matched);
out:
    return st;
}
