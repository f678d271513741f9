/* fp64 build of the product and the activations: for checks of gradients, so simple rather than fast. */
#define REAL double
#define GEMM_NAME kv_gemm_f64
#define VEC double
#define LANES 1
#define LOAD(p) (*(p))
#define STORE(p, x) (*(p) = (x))
#define SPREAD(x) (x)
#define FMA(a, b, c) ((a) * (b) + (c))
#define ROWS 4
#define WIDTH 4
#include "reference/gemm_impl.h"

#include <math.h>

void kv_exp_f64(int64_t n, const double *x, double *y) {
    for (int64_t i = 0; i < n; i++) y[i] = exp(x[i]);
}

void kv_silu_f64(int64_t n, const double *z, double *value, double *slope) {
    for (int64_t i = 0; i < n; i++) {
        double x = z[i], s = 1 / (1 + exp(-x));
        value[i] = x * s;
        if (slope) slope[i] = s * (1 + x * (1 - s));
    }
}
