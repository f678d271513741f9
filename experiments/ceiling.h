/* The fp32 ceiling that CPU benchmarks divide by. */
#ifndef KV_EXPERIMENTS_CEILING_H
#define KV_EXPERIMENTS_CEILING_H

#include "reference/core/cpu.h"

/* GFLOP/s of fused multiply-adds that stay in registers, kv_threads() threads at the same time: the best burst that this process has
 * seen so far on the instruction set that does best (*isa, NULL: not wanted), KV_ISA or not. A burst is timed by each thread's own
 * clock, so other programs on the machine do not lower the ceiling. Every call runs some more bursts (about 0.1 s). */
double kv_ceiling(kv_isa *isa);

#endif
