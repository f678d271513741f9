// The scorer network of many KV heads ("lanes") on the device (reference/scorer_net.h): arrays of a forward and backward pass.
//
// Everything is laid out in rows. A lane begins with `slack` empty rows, then each document starts at a multiple of CHUNK rows; rows
// without a token are zero, write nothing into the memory and are never read for. With the slack the row that reads for token row
// r - delay lies in the lane too, so one strided batch of matrix products serves all chunks of all lanes.
// T: float (exact) or __nv_bfloat16 (operands of the products; sums, levels, memory and gradients stay fp32 or double).
#ifndef KV_KERNELS_NET_CUH
#define KV_KERNELS_NET_CUH

#include "kernels/blas.cuh"
#include "reference/scorer.h"

constexpr int KV_CHUNK = 128;

enum kv_net_array { // device arrays of a network
    NET_TOKEN,      // int32 [row] token of the row, -1: none
    NET_READ,    // int32 [row] token that the row reads for (it lies `delay` rows before), -1: none
    NET_EDGE,    // int32 [chunk] 1: opens a document, 2: closes one
    NET_X,       // T [lane][row][n_input]; with hidden input [group][row][n_input]
    NET_HIDDEN,  // T [group][row][n_hidden]
    NET_PARAM,   // T [lane][n_packed]
    NET_MLP,     // T [lane][row][n_mlp] before silu, without the bias; later its gradient
    NET_FEATURE, // T [lane][row][wide] before silu, without the bias; later its gradient
    NET_F,       // T [lane][row][wide] after silu
    NET_PROJECT, // T [lane][row][n_project]: q~, k~, v~, and 1 without a norm
    NET_PRE,     // float2 [lane][row] pre-activations of the gates without their biases
    NET_GATE,    // kv_gate [lane][row]
    NET_TOTAL, // double2 [lane][chunk]: sum of log sigmoid f, largest log strength at the chunk's end
    NET_LEVEL, // double [lane][chunk] log scale of the memory at the chunk's start
    NET_FADE,  // float [lane][chunk] what the chunk leaves of the memory
    NET_FROM,  // double2 [lane][row]: b - mu, i - b
    NET_SCALE, // float4 [lane][row]: log-scale factors fresh, carried, exp(-mu), divisor of the readout
    NET_SCALED,   // T [lane][row][n_key] k~ times fresh
    NET_QUERY,    // T [lane][row][n_key] q~ of the token read for, times carried
    NET_WEIGHTED, // T [lane][chunk][CHUNK][CHUNK] (q~.k~) times decay
    NET_UPDATE, // float [lane][chunk][n_key][n_augmented] what a chunk adds to the memory, or to its gradient
    NET_STATE, // T, same shape: the memory at the chunk's start
    NET_NUM,   // float [lane][row][n_augmented]
    // backward
    NET_DELTA,      // T [lane][row][n_augmented] gradient at num
    NET_DELTA_C,    // T, same shape, times carried
    NET_MIX,        // T [lane][chunk][CHUNK][CHUNK]
    NET_VALUE,      // T [lane][row][n_augmented] v~, 1 times fresh
    NET_D_STATE,    // T as NET_STATE: gradient of the memory at the chunk's end
    NET_D_PROJECT,  // float [lane][row][n_project]
    NET_D_NARROW,   // T, same shape
    NET_DIFFERENCE, // double [lane][row] q~.dq~ - k~.dk~; then its sum over the rows behind
    NET_LATER,      // double [lane][chunk]
    NET_D_GATE,     // float2 [lane][row]
    NET_D_F,        // float [lane][row][wide]
    NET_SEGMENT, // float [lane][segment][n_key][n_value] the memory at the start of a segment of chunks (fused_memory.cu)
    NET_D_SEGMENT, // float, same shape: its gradient at the segment's end
    NET_SPAN,      // float [lane][segment] what a segment leaves of the memory
    NET_PARTIAL,   // float, column sums of parts of the rows
    // fused memory (fused_memory.cuh)
    NET_LINES, // kv_chunk_lines [lane][chunk]
    NET_SLOPE, // T [lane][row][n_value] gradient at num for e = 1
    NET_HEAD,  // T [lane][row][n_value] silu(h)
    NET_ALONG, // float [lane][row] q~.dq~ for e = 1
    NET_UP,    // float [lane][row] e of the token that the row reads for, 0: none
    NET_ARRAYS
};

struct __align__(
    16) kv_gate { // i and log sigmoid(f) of a row, and their derivatives by the pre-activations
    double in, keep, d_in, d_keep;
};

// What the fused memory reads of a chunk's rows, as floats: log scales in base 2. The decay between a query and a key of the chunk is
// exp2(ahead + back); of the memory at the chunk's start a query reads exp2(ahead + start).
struct __align__(16) kv_chunk_lines {
    float ahead[KV_CHUNK]; // of a query: b - mu, and the scale n_key^-1/2; -inf: reads for no token
    float fade, start; // what the chunk leaves of the memory; the memory's log scale at its start
    int32_t opens, closes; // the chunk begins, ends a document
    float back[KV_CHUNK];  // of a key: i - b
    float fresh[KV_CHUNK]; // what a key's row adds to the memory at the chunk's end
    float floor[KV_CHUNK]; // exp(-mu)
};

struct kv_gpu_net {
    kv_gpu *gpu;
    const kv_blas *blas;
    kv_net_spec spec;
    kv_net_layout layout;
    bool exact;
    int32_t n_lane, group; // lanes that share a hidden state
    int64_t packed_at[KV_NET_PARTS], n_packed;
    int32_t n_token, n_row, n_chunk, slack; // of one lane, slack included; slack in rows
    kv_gpu_buffer *array[NET_ARRAYS];

    int32_t wide() const { return spec.n_feature ? spec.n_feature : spec.n_input; }
    int32_t n_augmented() const { return spec.n_value + !spec.norm; }
    int32_t n_used() const { return 2 * spec.n_key + spec.n_value; }
    // Without a norm the readout divides by a sum, which a value of 1 collects. Rows start on 16 bytes.
    int32_t n_project() const { return (n_used() + !spec.norm + 7) / 8 * 8; }
    int32_t delay() const { return spec.delay ? spec.window : 0; }
    int64_t rows() const { return (int64_t)n_lane * n_row; }
    size_t element() const { return exact ? 4 : 2; }
    template <class T> T *at(kv_net_array i) const { return reinterpret_cast<T *>(array[i]->data); }
    template <class T> T *part(kv_net_part p) const { return at<T>(NET_PARAM) + packed_at[p]; }
    kv_status reserve(kv_net_array i, size_t bytes); // grows the array when it is too small
};

// A matrix of a strided batch, row-major. `data` is of type T, or fp32 where `wide` says so.
struct kv_net_matrix {
    const void *data;
    int64_t ld, stride;
    bool transposed, wide;
};
// C[m][n] = op(A)[m][k] op(B)[k][n] (+ C). C is T or fp32 (wide).
kv_status kv_net_product(const kv_gpu_net *net, int m, int n, int64_t k, kv_net_matrix a,
                         kv_net_matrix b, bool add, kv_net_matrix c, int64_t count);

// What looks at one token alone (net_tokens.cu). rhat: own score of every token; e, grad as in kv_gpu_net_backward.
// Columns [first, first + width) of an input array from y [lanes][n_token][width]; zeros in rows without a token.
template <class T>
kv_status kv_net_gather(kv_gpu_net *net, const float *y, int64_t lanes, int width, int first,
                        int ld, kv_net_array to);
template <class T>
kv_status kv_net_tokens_forward(kv_gpu_net *net, const float *param, float *rhat);
template <class T>
kv_status kv_net_tokens_backward(kv_gpu_net *net, const float *param, const float *e, float *grad);
// Gates from their pre-activations, log scales of the memory, factors of the rows; and the gradients of the gates from NET_DIFFERENCE
// and k~.dk~ in NET_D_GATE (net_levels.cu).
// lines: NET_LINES instead of NET_FROM and NET_SCALE; zero: scores of tokens to be set to 0 with them, or null.
kv_status kv_net_levels(kv_gpu_net *net, const float *param, bool lines, float *zero);
kv_status kv_net_gate_gradients(kv_gpu_net *net);
// The memory (net_memory.cu): rhat += a . silu(h), or =.
template <class T>
kv_status kv_net_memory_forward(kv_gpu_net *net, const float *param, float *rhat);
template <class T>
kv_status kv_net_memory_backward(kv_gpu_net *net, const float *param, const float *e, float *grad);

// Kernels of a pass follow each other on the stream, and each waits inside for the one before (kv_follow): on Hopper the next one is
// brought to the multiprocessors while the last blocks of the one before still work.
template <class... P, class... A>
kv_status kv_net_launch(const kv_gpu *g, void (*kernel)(P...), dim3 grid, int threads,
                        size_t shared, A... arguments) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = dim3((unsigned)threads);
    c.dynamicSmemBytes = shared;
    c.stream = g->stream;
    c.attrs = &early;
    c.numAttrs = g->hopper ? 1 : 0;
    KV_CUDA(cudaLaunchKernelEx(&c, kernel, static_cast<P>(arguments)...));
    return KV_OK;
}
// Lets the next kernel of the stream come, and waits until all memory of the one before is written. First in every kernel that
// kv_net_launch starts, before anything is read from or written to device memory that another kernel touches.
__device__ __forceinline__ void kv_follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

template <class T> __device__ __forceinline__ float kv_wide(T x) { return (float)x; }
template <class T> __device__ __forceinline__ T kv_slim(float x) { return (T)x; }
__device__ __forceinline__ float kv_sigmoid(float z) { return 1.0f / (1.0f + expf(-z)); }
__device__ __forceinline__ float kv_silu(float z) { return z * kv_sigmoid(z); }
__device__ __forceinline__ float kv_silu_slope(float z) {
    const float s = kv_sigmoid(z);
    return s * (1.0f + z * (1.0f - s));
}
template <class F> __device__ __forceinline__ F kv_warp_sum(F x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// Column sums: out[lane][c] = sum over rows of value(lane, row, c), in a fixed order; out lies at `out` with `stride` between lanes.
constexpr int KV_SUM_PARTS = 64, KV_SUM_COLUMNS = 32, KV_SUM_ROWS = 8;
template <class F>
__global__ void kv_partial_sum_kernel(F value, int n_row, int width, float *partial) {
    __shared__ float sum[KV_SUM_ROWS][KV_SUM_COLUMNS];
    const int c = (int)(blockIdx.x * KV_SUM_COLUMNS + threadIdx.x), lane = (int)blockIdx.z;
    const int per_part = (n_row + KV_SUM_PARTS - 1) / KV_SUM_PARTS,
              first = (int)blockIdx.y * per_part, end = min(first + per_part, n_row);
    float own = 0;
    for (int r = first + (int)threadIdx.y; c < width && r < end; r += KV_SUM_ROWS)
        own += value(lane, r, c);
    sum[threadIdx.y][threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.y != 0 || c >= width) return;
    for (int i = 1; i < KV_SUM_ROWS; i++) own += sum[i][threadIdx.x];
    partial[((int64_t)lane * KV_SUM_PARTS + blockIdx.y) * width + c] = own;
}
static __global__ void kv_total_sum_kernel(const float *partial, int width, float *out,
                                           int64_t stride) {
    const int c = (int)(blockIdx.x * blockDim.x + threadIdx.x), lane = (int)blockIdx.y;
    if (c >= width) return;
    double sum = 0;
    for (int i = 0; i < KV_SUM_PARTS; i++)
        sum += (double)partial[((int64_t)lane * KV_SUM_PARTS + i) * width + c];
    out[lane * stride + c] = (float)sum;
}
template <class F>
kv_status kv_column_sums(kv_gpu_net *net, F value, int width, float *out, int64_t stride) {
    kv_gpu *g = net->gpu;
    KV_RETURN(net->reserve(NET_PARTIAL, (size_t)net->n_lane * KV_SUM_PARTS * (size_t)width * 4));
    const dim3 grid((unsigned)kv_div_up(width, KV_SUM_COLUMNS), KV_SUM_PARTS,
                    (unsigned)net->n_lane);
    kv_partial_sum_kernel<<<grid, dim3(KV_SUM_COLUMNS, KV_SUM_ROWS), 0, g->stream>>>(
        value, net->n_row, width, net->at<float>(NET_PARTIAL));
    KV_CUDA(cudaGetLastError());
    kv_total_sum_kernel<<<dim3((unsigned)kv_div_up(width, 128), (unsigned)net->n_lane), 128, 0,
                          g->stream>>>(net->at<float>(NET_PARTIAL), width, out, stride);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

#endif
