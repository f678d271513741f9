/* Bursts of multiply-adds on every instruction set of this processor; the best one is the ceiling. */
#include "experiments/ceiling.h"

#include <time.h>

#include "reference/attention_kernel.h"

enum {
    BURSTS = 6,
    STEPS = 600000
}; /* a burst of some 8 ms: long against the clock's steps, short against a time slice */

static double thread_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double burst(const kv_attention_kernel *kernel) {
    double rate = 0;
#pragma omp parallel reduction(+ : rate)
    {
        double flop;
        const double begin = thread_seconds();
        volatile float sink = kernel->peak(STEPS, &flop);
        (void)sink;
        rate += flop / (thread_seconds() - begin);
    }
    return rate * 1e-9;
}

double kv_ceiling(kv_isa *isa) {
    static const kv_attention_kernel *const kernel[] = {
        [KV_ISA_GENERIC] = &kv_attention_generic,
        [KV_ISA_AVX2] = &kv_attention_avx2,
        [KV_ISA_AVX512] = &kv_attention_avx512,
    };
    static double best;
    static int best_threads;
    static kv_isa best_isa;
    const kv_isa top = kv_cpu_isa_best();
    if (best_threads != kv_threads()) best = 0;
    best_threads = kv_threads();
    /* the narrower form may run at a higher clock; older forms cannot win */
    for (int i = top > KV_ISA_AVX2 ? KV_ISA_AVX2 : (int)top; i <= (int)top; i++)
        for (int n = 0; n < BURSTS; n++) {
            const double rate = burst(kernel[i]);
            if (rate <= best) continue;
            best = rate;
            best_isa = (kv_isa)i;
        }
    if (isa) *isa = best_isa;
    return best;
}
