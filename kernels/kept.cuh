// Key lists of masked attention: what a plan holds. Built by kept.cu, read by attend.cuh.
#ifndef KV_KERNELS_KEPT_CUH
#define KV_KERNELS_KEPT_CUH

#include "kernels/device.cuh"

constexpr int KV_BLOCK = 64; // queries that share a list

// The list of one block: `far` keys that every query of the block sees inside its E(u), then `near` keys that every query sees
// outside its E(u), then `part` keys that need a look at each query. Each class in ascending order; all keys of an ordered plan
// are in `part`.
struct kept_block {
    int64_t first; // in the list array
    int far, near, part;
};

struct kv_gpu_plan {
    kv_gpu *gpu;
    int32_t n_kv_head, n_token, n_block, sinks, window;
    bool ordered;
    kv_gpu_buffer *block;    // kept_block [n_kv_head][n_block]
    kv_gpu_buffer *list;     // int32 keys
    kv_gpu_buffer *evict_at; // int32 [n_kv_head][n_token], a copy
};

// A plan whose lists are in order of time, without classes.
kv_status kv_plan_ordered_new(kv_gpu *g, int32_t n_kv_head, int32_t n_token,
                              const kv_gpu_buffer *evict_at, kv_gpu_plan **out);

#endif
