/* CPU features, model name, cache size, thread count. */
#define _POSIX_C_SOURCE 200809L
#include "reference/core/cpu.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const isa_name[] = {"generic", "avx2", "avx512"};

kv_isa kv_cpu_isa_best(void) {
    kv_isa best = KV_ISA_GENERIC;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = KV_ISA_AVX2;
    if (best == KV_ISA_AVX2 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        best = KV_ISA_AVX512;
#endif
    return best;
}

static kv_isa detect(void) {
    kv_isa best = kv_cpu_isa_best();
    const char *wanted = getenv("KV_ISA");
    for (int i = 0; wanted && i <= (int)best; i++)
        if (strcmp(wanted, isa_name[i]) == 0) best = (kv_isa)i;
    return best;
}

kv_isa kv_cpu_isa(void) {
    static int known = -1;
    if (known < 0) known = (int)detect();
    return (kv_isa)known;
}

const char *kv_isa_name(kv_isa isa) { return isa_name[isa]; }

const char *kv_cpu_model(void) {
    static char model[128];
    if (model[0]) return model;
    snprintf(model, sizeof model, "unknown");
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        snprintf(model, sizeof model, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (f) fclose(f);
    return model;
}

size_t kv_cpu_l2_bytes(void) {
    long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return bytes > 0 ? (size_t)bytes : 512u << 10;
}

void kv_threads_set(int n) {
    static int initial;
    if (!initial) initial = omp_get_max_threads();
    omp_set_num_threads(n > 0 ? n : initial);
}

int kv_threads(void) { return omp_get_max_threads(); }
