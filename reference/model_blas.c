/* The model's weight products through OpenBLAS.
 *
 * OpenBLAS changes the bits of a product with its thread count, so it is kept at one thread and called on fixed tiles that OpenMP
 * shares out: the bytes depend on the shapes and the core type only. Weights are widened panel by panel, so that the scratch
 * stays bounded whatever the vocabulary. */
#include "reference/model.h"

#include <cblas.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/cpu.h"
#include "reference/core/mem.h"

enum { ROW_TILE = 256, COLUMN_TILE = 512, PANEL_FLOATS = 4 << 20 };

static void use_one_thread(void) { openblas_set_num_threads(1); }

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* C[:, 0..n) of one panel: b [n][k] fp32, c points at the panel's first column, rows `ldc` apart. */
static void multiply(int32_t m, int32_t n, int32_t k, const float *a, const float *b, float *c,
                     int32_t ldc) {
    int32_t n_row = (m + ROW_TILE - 1) / ROW_TILE, n_column = (n + COLUMN_TILE - 1) / COLUMN_TILE;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int32_t i = 0; i < n_row; i++)
        for (int32_t j = 0; j < n_column; j++) {
            int32_t row = i * ROW_TILE, column = j * COLUMN_TILE;
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, least(ROW_TILE, m - row),
                        least(COLUMN_TILE, n - column), k, 1.0f, a + (size_t)row * (size_t)k, k,
                        b + (size_t)column * (size_t)k, k, 0.0f,
                        c + (size_t)row * (size_t)ldc + column, ldc);
        }
}

kv_status kv_linear(int32_t m, int32_t n, int32_t k, const float *a, kv_dtype w_type, const void *w,
                    float *c) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    kv_status st = KV_OK;
    float *wide = NULL; /* [panel][k] */
    pthread_once(&once, use_one_thread);
    if (m <= 0 || n <= 0 || k <= 0)
        KV_RAISE(KV_E_INTERNAL, "weight product of %d x %d x %d: every size must be positive", m, n,
                 k);
    if (w_type == KV_F32) {
        multiply(m, n, k, a, w, c, n);
        goto out;
    }
    int32_t panel = PANEL_FLOATS / k / COLUMN_TILE * COLUMN_TILE;
    panel = least(n, panel > COLUMN_TILE ? panel : COLUMN_TILE);
    KV_NEW(wide, (size_t)panel * (size_t)k);
    for (int32_t first = 0; first < n; first += panel) {
        int32_t count = least(panel, n - first);
        const char *stored = (const char *)w + (size_t)first * (size_t)k * kv_dtype_size(w_type);
#pragma omp parallel for schedule(static)
        for (int32_t j = 0; j < count; j++) {
            size_t at = (size_t)j * (size_t)k;
            kv_widen(w_type, stored + at * kv_dtype_size(w_type), wide + at, (size_t)k);
        }
        multiply(m, count, k, a, wide, c + first, n);
    }
out:
    free(wide);
    return st;
}

const char *kv_blas_core(void) { return openblas_get_corename(); }

const char *kv_blas_better_core(void) {
    /* Kernel sets without AVX2 that the dynamic dispatch falls back to when it does not know the processor. */
    static const char *const fallback[] = {"Prescott", "Core2",       "Penryn", "Dunnington",
                                           "Nehalem",  "Sandybridge", "Generic"};
    if (getenv("OPENBLAS_CORETYPE") || kv_cpu_isa() == KV_ISA_GENERIC) return NULL;
    for (size_t i = 0; i < sizeof fallback / sizeof *fallback; i++)
        if (strcasecmp(kv_blas_core(), fallback[i]) == 0)
            return kv_cpu_isa() == KV_ISA_AVX512 ? "SkylakeX" : "Haswell";
    return NULL;
}
