/* Body of one build of the product (gemm.h). The includer defines
 *   REAL, GEMM_NAME       element type, name of the function
 *   VEC, LANES            vector type and its elements
 *   LOAD STORE SPREAD FMA(a, b, c) = a*b + c
 *   ROWS, WIDTH           register tile: ROWS x (WIDTH vectors)
 *
 * B is packed into column panels as wide as the tile; A is read in place. Sums run over k in order: a second block of k continues
 * from the stored C, which loses nothing. */
#include "reference/gemm.h"

enum { TILE = WIDTH * LANES, BLOCK_K = 512 };

/* acc[r][:] += sum_p a[r][p] panel[p][:] for `rows` rows (a compile-time constant at every call). */
static inline __attribute__((always_inline)) void tile_rows(const int rows, int32_t k,
                                                            const REAL *a, int64_t row_step,
                                                            int64_t k_step, const REAL *panel,
                                                            REAL *c, int64_t ldc, bool load) {
    VEC acc[ROWS][WIDTH];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDTH; j++)
            acc[r][j] = load ? LOAD(c + r * ldc + j * LANES) : SPREAD((REAL)0);
    for (int32_t p = 0; p < k; p++, a += k_step, panel += TILE) {
        VEC b[WIDTH];
        for (int j = 0; j < WIDTH; j++) b[j] = LOAD(panel + j * LANES);
        for (int r = 0; r < rows; r++) {
            VEC x = SPREAD(a[r * row_step]);
            for (int j = 0; j < WIDTH; j++) acc[r][j] = FMA(x, b[j], acc[r][j]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < WIDTH; j++) STORE(c + r * ldc + j * LANES, acc[r][j]);
}

/* Columns of B in [first, first + cols) as [k][TILE], zero beyond cols. */
static void pack(bool transposed, int32_t k, int32_t cols, const REAL *b, int64_t ldb,
                 REAL *panel) {
    if (transposed) {
        for (int32_t j = 0; j < TILE; j++)
            for (int32_t p = 0; p < k; p++)
                panel[(int64_t)p * TILE + j] = j < cols ? b[j * ldb + p] : (REAL)0;
        return;
    }
    for (int32_t p = 0; p < k; p++)
        for (int32_t j = 0; j < TILE; j++)
            panel[(int64_t)p * TILE + j] = j < cols ? b[p * ldb + j] : (REAL)0;
}

static void panel_rows(int32_t m, int32_t k, const REAL *a, int64_t row_step, int64_t k_step,
                       const REAL *panel, REAL *c, int64_t ldc, bool load) {
    int32_t i = 0;
    for (; i + ROWS <= m; i += ROWS)
        tile_rows(ROWS, k, a + i * row_step, row_step, k_step, panel, c + i * ldc, ldc, load);
    for (; i < m; i++)
        tile_rows(1, k, a + i * row_step, row_step, k_step, panel, c + i * ldc, ldc, load);
}

/* The last, narrow panel goes through a full-width strip, ROWS rows at a time. */
static void narrow_rows(int32_t m, int32_t cols, int32_t k, const REAL *a, int64_t row_step,
                        int64_t k_step, const REAL *panel, REAL *c, int64_t ldc, bool load) {
    REAL strip[ROWS * TILE] __attribute__((aligned(64))) = {0};
    for (int32_t i = 0; i < m; i += ROWS) {
        int32_t rows = m - i < ROWS ? m - i : ROWS;
        for (int32_t r = 0; load && r < rows; r++)
            for (int32_t j = 0; j < cols; j++) strip[r * TILE + j] = c[(i + r) * ldc + j];
        panel_rows(rows, k, a + i * row_step, row_step, k_step, panel, strip, TILE, load);
        for (int32_t r = 0; r < rows; r++)
            for (int32_t j = 0; j < cols; j++) c[(i + r) * ldc + j] = strip[r * TILE + j];
    }
}

void GEMM_NAME(kv_gemm_form form, int32_t m, int32_t n, int32_t k, const REAL *a, int64_t lda,
               const REAL *b, int64_t ldb, bool accumulate, REAL *c, int64_t ldc) {
    REAL panel[BLOCK_K * TILE] __attribute__((aligned(64)));
    int64_t row_step = form == KV_TN ? 1 : lda, k_step = form == KV_TN ? lda : 1;
    for (int32_t p = 0; p < k; p += BLOCK_K) {
        int32_t depth = k - p < BLOCK_K ? k - p : BLOCK_K;
        bool load = accumulate || p > 0;
        for (int32_t j = 0; j < n; j += TILE) {
            int32_t cols = n - j < TILE ? n - j : TILE;
            bool transposed = form == KV_NT;
            pack(transposed, depth, cols, transposed ? b + j * ldb + p : b + p * ldb + j, ldb,
                 panel);
            if (cols == TILE)
                panel_rows(m, depth, a + p * k_step, row_step, k_step, panel, c + j, ldc, load);
            else
                narrow_rows(m, cols, depth, a + p * k_step, row_step, k_step, panel, c + j, ldc,
                            load);
        }
    }
}
