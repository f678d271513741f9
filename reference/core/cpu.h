/* What this processor can do; decides which build of a kernel runs (files *_avx2.c and *_avx512.c are compiled for it). */
#ifndef KV_CORE_CPU_H
#define KV_CORE_CPU_H

#include <stddef.h>

typedef enum kv_isa { KV_ISA_GENERIC, KV_ISA_AVX2, KV_ISA_AVX512 } kv_isa;

kv_isa
kv_cpu_isa(void); /* best supported set; KV_ISA=generic|avx2|avx512 lowers it (tests, bisecting) */
kv_isa kv_cpu_isa_best(void); /* whatever KV_ISA says */
const char *kv_isa_name(kv_isa isa);
const char *kv_cpu_model(void); /* "AMD EPYC …" from /proc/cpuinfo, "unknown" otherwise */
size_t kv_cpu_l2_bytes(void);   /* per core; 512 KiB when the system does not tell */

/* Threads used by parallel loops. Results never depend on it. 0 restores the default (all cores or OMP_NUM_THREADS). */
void kv_threads_set(int n);
int kv_threads(void);

#endif
