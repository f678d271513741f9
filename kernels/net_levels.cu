// Gates and log scales of the memory (maths.md 6.1, 6.5), and the gradients of gates (6.7): sums over the rows of a chunk by a block
// with a thread per row, then over the chunks of a lane by one thread. All in double.
#include "kernels/net.cuh"

namespace {

constexpr int WARPS = KV_CHUNK / 32;

struct sum_of {
    __device__ double operator()(double a, double b) const { return a + b; }
};
struct largest_of {
    __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// op over the threads up to and with this one, in a block of KV_CHUNK threads.
template <class Op> __device__ double block_scan(double x, Op op) {
    __shared__ double part[WARPS];
    const int own = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const double y = __shfl_up_sync(~0u, x, d);
        if (own >= d) x = op(y, x);
    }
    if (own == 31) part[warp] = x;
    __syncthreads();
    for (int i = warp - 1; i >= 0; i--) x = op(part[i], x);
    __syncthreads();
    return x;
}

__device__ double log_sigmoid(double x) { return fmin(x, 0.0) - log1p(exp(-fabs(x))); }

struct gate_args {
    const float2 *pre;
    const float *b_i, *b_f; // of each lane, lanes n_param apart
    const int32_t *token;
    kv_gate *gate;
    double2 *total;
    int64_t n_param;
    int n_row;
    bool sigmoid;
};

// Gates of a chunk's rows; their sum of log sigmoid f and the largest log strength at its end.
__global__ void gate_kernel(gate_args a) {
    const int64_t row = (int64_t)blockIdx.x * KV_CHUNK + threadIdx.x, lane = row / a.n_row;
    kv_gate g = {-INFINITY, 0, 0, 0}; // a row without a token writes nothing and lets nothing fade
    if (a.token[row % a.n_row] >= 0) {
        const float2 pre = a.pre[row];
        const double ti = tanh(((double)pre.x + (double)a.b_i[lane * a.n_param]) / 15);
        const double tf = tanh(((double)pre.y + (double)a.b_f[lane * a.n_param]) / 15);
        const double i = 15 * ti, f = 15 * tf;
        g.in = a.sigmoid ? log_sigmoid(i) : i;
        g.keep = log_sigmoid(f);
        g.d_in = (1 - ti * ti) * (a.sigmoid ? 1 / (1 + exp(i)) : 1);
        g.d_keep = (1 - tf * tf) / (1 + exp(f));
    }
    a.gate[row] = g;
    const double b = block_scan(g.keep, sum_of()), top = block_scan(g.in - b, largest_of());
    if (threadIdx.x == KV_CHUNK - 1) a.total[blockIdx.x] = make_double2(b, b + top);
}

// Log scale at every chunk's start and what the chunk leaves of the memory; a block per lane.
__global__ void level_kernel(const double2 *total, const int32_t *edge, int n_chunk, double *level,
                             float *fade) {
    __shared__ double2 t[KV_CHUNK];
    __shared__ double before[KV_CHUNK],
        behind[KV_CHUNK]; // apart from t, so that reads of it need not wait
    __shared__ bool opens[KV_CHUNK];
    const int64_t lane = (int64_t)blockIdx.x * n_chunk;
    const int own = (int)threadIdx.x;
    double m = 0; // of thread 0
    for (int first = 0; first < n_chunk; first += KV_CHUNK) {
        const int count = min(KV_CHUNK, n_chunk - first);
        if (own < count) {
            t[own] = total[lane + first + own];
            opens[own] = edge[first + own] & 1;
        }
        __syncthreads();
        if (own == 0)
#pragma unroll 8
            for (int i = 0; i < count; i++) {
                m = opens[i] ? 0 : m;
                before[i] = m;
                m = fmax(t[i].x + m, t[i].y);
                behind[i] = m;
            }
        __syncthreads();
        if (own < count) {
            level[lane + first + own] = before[own];
            fade[lane + first + own] = (float)exp(t[own].x + before[own] - behind[own]);
        }
        __syncthreads();
    }
}

// Levels inside a chunk.
__global__ void row_kernel(const kv_gate *gate, const double *level, const int32_t *read, int n_row,
                           double scale, double2 *from, float4 *factor) {
    __shared__ double last_b, last_mu;
    const int64_t chunk = blockIdx.x, row = chunk * KV_CHUNK + threadIdx.x;
    const kv_gate g = gate[row];
    const double start = level[chunk], b = block_scan(g.keep, sum_of()),
                 mu = b + fmax(start, block_scan(g.in - b, largest_of()));
    if (threadIdx.x == KV_CHUNK - 1) {
        last_b = b;
        last_mu = mu;
    }
    __syncthreads();
    from[row] = make_double2(b - mu, g.in - b);
    const bool reads = read[row % n_row] >= 0;
    factor[row] =
        make_float4((float)exp(last_b - b + g.in - last_mu),
                    reads ? (float)(scale * exp(b + start - mu)) : 0.0f, (float)exp(-mu), 0.0f);
}

__global__ void chunk_sum_kernel(const double *difference, double *sum) {
    const double x = block_scan(difference[(int64_t)blockIdx.x * KV_CHUNK + threadIdx.x], sum_of());
    if (threadIdx.x == KV_CHUNK - 1) sum[blockIdx.x] = x;
}

// Sums of chunks become sums of all chunks behind within the document; a block per lane.
__global__ void later_kernel(const int32_t *edge, int n_chunk, double *sum) {
    __shared__ double x[KV_CHUNK], behind[KV_CHUNK];
    __shared__ bool closes[KV_CHUNK];
    const int64_t lane = (int64_t)blockIdx.x * n_chunk;
    const int own = (int)threadIdx.x;
    double running = 0; // of thread 0
    for (int end = n_chunk; end > 0; end -= KV_CHUNK) {
        const int count = min(KV_CHUNK, end), at = end - 1 - own;
        if (own < count) {
            x[own] = sum[lane + at];
            closes[own] = edge[at] & 2;
        }
        __syncthreads();
        if (own == 0)
#pragma unroll 8
            for (int i = 0; i < count; i++) {
                running = closes[i] ? 0 : running;
                behind[i] = running;
                running += x[i];
            }
        __syncthreads();
        if (own < count) sum[lane + at] = behind[own];
        __syncthreads();
    }
}

// d_gate.x holds k~.dk~
__global__ void gate_gradient_kernel(const double *difference, const double *later,
                                     const kv_gate *gate, float2 *d_gate) {
    const int64_t row = (int64_t)blockIdx.x * KV_CHUNK + KV_CHUNK - 1 - threadIdx.x;
    const double sum = later[blockIdx.x] + block_scan(difference[row], sum_of());
    const kv_gate g = gate[row];
    d_gate[row] = make_float2((float)(d_gate[row].x * g.d_in), (float)(sum * g.d_keep));
}

} // namespace

kv_status kv_net_levels(kv_gpu_net *net, const float *param) {
    const size_t chunks = (size_t)net->n_lane * (size_t)net->n_chunk, all = (size_t)net->rows();
    cudaStream_t stream = net->gpu->stream;
    KV_RETURN(net->reserve(NET_GATE, all * sizeof(kv_gate)));
    KV_RETURN(net->reserve(NET_TOTAL, chunks * sizeof(double2)));
    KV_RETURN(net->reserve(NET_LEVEL, chunks * sizeof(double)));
    KV_RETURN(net->reserve(NET_FADE, chunks * sizeof(float)));
    KV_RETURN(net->reserve(NET_FROM, all * sizeof(double2)));
    KV_RETURN(net->reserve(NET_SCALE, all * sizeof(float4)));
    const gate_args a = {net->at<float2>(NET_PRE),
                         param + net->layout.part[KV_NET_GATE_I_B].at,
                         param + net->layout.part[KV_NET_GATE_F_B].at,
                         net->at<int32_t>(NET_TOKEN),
                         net->at<kv_gate>(NET_GATE),
                         net->at<double2>(NET_TOTAL),
                         net->layout.n_param,
                         net->n_row,
                         net->spec.sigmoid_gate};
    gate_kernel<<<(unsigned)chunks, KV_CHUNK, 0, stream>>>(a);
    KV_CUDA(cudaGetLastError());
    level_kernel<<<(unsigned)net->n_lane, KV_CHUNK, 0, stream>>>(
        net->at<double2>(NET_TOTAL), net->at<int32_t>(NET_EDGE), net->n_chunk,
        net->at<double>(NET_LEVEL), net->at<float>(NET_FADE));
    KV_CUDA(cudaGetLastError());
    row_kernel<<<(unsigned)chunks, KV_CHUNK, 0, stream>>>(
        net->at<kv_gate>(NET_GATE), net->at<double>(NET_LEVEL), net->at<int32_t>(NET_READ),
        net->n_row, 1 / sqrt((double)net->spec.n_key), net->at<double2>(NET_FROM),
        net->at<float4>(NET_SCALE));
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status kv_net_gate_gradients(kv_gpu_net *net) {
    const size_t chunks = (size_t)net->n_lane * (size_t)net->n_chunk;
    cudaStream_t stream = net->gpu->stream;
    KV_RETURN(net->reserve(NET_LATER, chunks * sizeof(double)));
    chunk_sum_kernel<<<(unsigned)chunks, KV_CHUNK, 0, stream>>>(net->at<double>(NET_DIFFERENCE),
                                                                net->at<double>(NET_LATER));
    KV_CUDA(cudaGetLastError());
    later_kernel<<<(unsigned)net->n_lane, KV_CHUNK, 0, stream>>>(
        net->at<int32_t>(NET_EDGE), net->n_chunk, net->at<double>(NET_LATER));
    KV_CUDA(cudaGetLastError());
    gate_gradient_kernel<<<(unsigned)chunks, KV_CHUNK, 0, stream>>>(
        net->at<double>(NET_DIFFERENCE), net->at<double>(NET_LATER), net->at<kv_gate>(NET_GATE),
        net->at<float2>(NET_D_GATE));
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
