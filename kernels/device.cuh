// Inside of the GPU handles: device, stream, memory, launch helpers. Included by kernels/*.cu only.
#ifndef KV_KERNELS_DEVICE_CUH
#define KV_KERNELS_DEVICE_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/kernels.h"

enum { KV_TICKS = 16 };

struct kv_gpu {
    int device, sm_count, cc_major, cc_minor;
    size_t shared_limit; // bytes of shared memory one block may ask for
    bool hopper, guard;
    int loop_blocks; // kv_gpu_use_loop_blocks
    cudaStream_t stream;
    cudaEvent_t tick[KV_TICKS];
};

struct kv_gpu_buffer {
    kv_gpu *gpu;
    char *raw; // what was allocated; data lies behind a border when guarded
    char *data;
    size_t bytes;
};

// q [n_q_head][n_token][head_dim], k, v [n_kv_head][n_token][head_dim], head_dim padded to 64 or 128.
struct kv_gpu_span {
    kv_gpu *gpu;
    int32_t n_token, n_q_head, n_kv_head, head_dim;
    int32_t head_dim_in; // before padding: what o has
    float scale, softcap;
    kv_dtype type;
    kv_gpu_buffer *q, *k, *v;
};

kv_status kv_cuda_fail(cudaError_t error, const char *what, const char *file, int line);

// Host code of kernels returns early; device memory is owned by kv_scratch, so nothing leaks.
#define KV_CUDA(call) \
    do { \
        const cudaError_t error_ = (call); \
        if (error_ != cudaSuccess) return kv_cuda_fail(error_, #call, __FILE__, __LINE__); \
    } while (0)
#define KV_RETURN(expression) \
    do { \
        const kv_status status_ = (expression); \
        if (status_ != KV_OK) return status_; \
    } while (0)

// Device memory for the length of one host function; stream-ordered, so freeing does not wait.
struct kv_scratch {
    kv_gpu_buffer *buffer = nullptr;
    kv_status reserve(kv_gpu *g, size_t bytes) { return kv_gpu_new(g, bytes, &buffer); }
    kv_status reserve_zeros(kv_gpu *g, size_t bytes) {
        KV_RETURN(reserve(g, bytes));
        KV_CUDA(cudaMemsetAsync(buffer->data, 0, bytes, g->stream));
        return KV_OK;
    }
    template <class T> T *as() const { return reinterpret_cast<T *>(buffer->data); }
    ~kv_scratch() { (void)kv_gpu_free(buffer); }
};

template <class T> static inline T *kv_data(kv_gpu_buffer *b) {
    return b ? reinterpret_cast<T *>(b->data) : nullptr;
}
template <class T> static inline const T *kv_data(const kv_gpu_buffer *b) {
    return b ? reinterpret_cast<const T *>(b->data) : nullptr;
}

// KV_E_USAGE when `b` is given and holds fewer than `count` elements of `size` bytes.
kv_status kv_buffer_check(const kv_gpu_buffer *b, const char *name, size_t count, size_t size);

// Raises the shared-memory limit of a kernel; call before the launch.
template <class F> static kv_status kv_allow_shared(const kv_gpu *g, F *kernel, size_t bytes) {
    if (bytes > g->shared_limit)
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "a kernel needs %zu bytes of shared memory, this GPU gives a block %zu",
                       bytes, g->shared_limit);
    KV_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    return KV_OK;
}

// Tensor map of heads of row-major tiles: box `rows` x head_dim, in halves of 64 columns, 128-byte swizzle, zeros outside
// [0, n_token). Shared layout of a tile: [head_dim/64][rows][64]. half and bfloat16 only.
kv_status kv_tile_map(const kv_gpu_span *s, const kv_gpu_buffer *data, int32_t n_head, int32_t rows,
                      CUtensorMap *out);
// The same of any 2-byte matrices [n_head][n_row][columns], rows `ld` and heads `head_stride` elements apart (multiples of 8, data on
// 16 bytes), in boxes of rows x box_columns; columns are multiples of 64.
kv_status kv_tile_map_of(const void *data, kv_dtype type, int64_t n_row, int64_t ld,
                         int32_t columns, int64_t n_head, int64_t head_stride, int32_t rows,
                         int32_t box_columns, CUtensorMap *out);

static inline int32_t kv_div_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

#endif
