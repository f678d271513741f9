// Ranks and cutoffs on device arrays: what rank.cu, select.cu and select_short.cu offer to other kernels.
#ifndef KV_KERNELS_SELECT_CUH
#define KV_KERNELS_SELECT_CUH

#include "kernels/device.cuh"

// kv_rank of every head: priority, rank, at [n_head][n]. Where a NaN goes is not specified.
kv_status kv_rank_device(kv_gpu *g, int32_t n_head, int32_t n, const float *priority, int32_t *rank,
                         int32_t *at);
// kv_cutoff_pointer of every head: evict_at [n_head][n]; tau [n_head][n] or NULL.
kv_status kv_cutoff_device(kv_gpu *g, int32_t n_head, int32_t n, const kv_run *run,
                           const int32_t *rank, const int32_t *at, int32_t *evict_at, int32_t *tau);
// kv_select of every head in one launch: when a block holds a document and tokens have to leave.
bool kv_select_is_short(const kv_gpu *g, int32_t n, const kv_run *run);
kv_status kv_select_short(kv_gpu *g, int32_t n_head, int32_t n, const kv_run *run,
                          const float *priority, int32_t *evict_at);

#endif
