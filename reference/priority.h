/* Priorities that follow from the keys alone: policies knorm and keydiff (contract.md 2).
 *
 * Sums over channels and over tokens are formed in double, in order, and rounded to fp32 once: a device that keeps the order gets
 * the same bytes. */
#ifndef KV_PRIORITY_H
#define KV_PRIORITY_H

#include "policies/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One key k [d]: -|k|. */
float kv_norm_priority(const float *k, int32_t d);

/* sum [d] += k / |k|; a zero vector has no direction and adds nothing. */
void kv_direction_add(double *sum, const float *k, int32_t d);
/* -cos of k and the mean of n directions whose sum is given; 0 when either is a zero vector. */
float kv_cosine_priority(const float *k, const double *sum, int32_t n, int32_t d);

/* All tokens of a span: priority [n_kv_head][stride]. Cosines: token t is compared with the mean direction of the keys 0 to
 * min(t + lead, n_token - 1). */
kv_status kv_norm_priorities(const kv_span *span, float *priority);
kv_status kv_cosine_priorities(const kv_span *span, int32_t lead, float *priority);

#ifdef __cplusplus
}
#endif

#endif
