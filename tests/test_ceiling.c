/* The ceiling of the CPU benchmarks is a ceiling: register tiles of the attention kernels on cached data stay below it, and come near
 * it. Optimised builds only. */
#include <criterion/criterion.h>
#include <math.h>
#include <time.h>

#include "experiments/ceiling.h"
#include "reference/attention_kernel.h"

#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__)
static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Best GFLOP/s of one thread's logits: 24 queries against a chunk of 64 keys that stay in the first-level cache. */
static double logits_rate(const kv_attention_kernel *kernel) {
    enum { DIM = 128, KEYS = 64, ROUNDS = 2000, TRIES = 20 };
    static float q[KV_PANEL_ROWS * DIM] __attribute__((aligned(64))),
        k[KEYS * DIM] __attribute__((aligned(64))),
        l[KV_PANEL_ROWS * KV_CHUNK_KEYS] __attribute__((aligned(64)));
    float row_max[KV_PANEL_ROWS];
    double best = 0;
    for (int try = 0; try < TRIES; try++) {
        const double begin = thread_seconds();
        for (int i = 0; i < ROUNDS; i++)
            kernel->logits(q, k, DIM, KV_PANEL_ROWS / KV_TILE_ROWS, KEYS, 1, l, row_max);
        best = fmax(best,
                    2.0 * KV_PANEL_ROWS * KEYS * DIM * ROUNDS / (thread_seconds() - begin) * 1e-9);
    }
    return best;
}

Test(ceiling, kernels_stay_below_and_come_near) {
    kv_threads_set(1);
    double top = 0;
    for (int i = 0; i < 4; i++) top = kv_ceiling(NULL);
    const double rate = logits_rate(kv_attention_kernel_get());
    cr_expect_leq(rate, 1.01 * top, "logits %.1f GFLOP/s, ceiling %.1f", rate, top);
    if (kv_cpu_isa() == kv_cpu_isa_best() && kv_cpu_isa() != KV_ISA_GENERIC)
        cr_expect_geq(rate, .5 * top, "logits %.1f GFLOP/s, ceiling %.1f", rate, top);
}
#else
Test(ceiling, kernels_stay_below_and_come_near) { cr_expect_gt(kv_ceiling(NULL), 0); }
#endif
