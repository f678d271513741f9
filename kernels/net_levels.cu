// Gates and log scales of the memory (maths.md 6.1, 6.5), and the gradients of gates (6.7): sums over the rows of a chunk by a block
// with a thread per row, then over the chunks of a lane. All in double.
#include "kernels/net.cuh"

namespace {

constexpr int WARPS = KV_CHUNK / 32;

__device__ double from_below(double x, int d) { return __shfl_up_sync(~0u, x, d); }
struct sum_of {
    __device__ double operator()(double a, double b) const { return a + b; }
};
struct largest_of {
    __device__ double operator()(double a, double b) const { return fmax(a, b); }
};
// m becomes max(m + add, least).
struct rise {
    double add, least;
    __device__ double operator()(double m) const { return fmax(m + add, least); }
};
__device__ rise from_below(rise x, int d) { return {from_below(x.add, d), from_below(x.least, d)}; }
struct rise_then {
    __device__ rise operator()(rise a, rise b) const { return {a.add + b.add, b(a.least)}; }
};
// A sum that begins anew at some threads.
struct part_sum {
    double sum;
    int first;
};
__device__ part_sum from_below(part_sum x, int d) {
    return {from_below(x.sum, d), __shfl_up_sync(~0u, x.first, d)};
}
struct part_sum_of {
    __device__ part_sum operator()(part_sum a, part_sum b) const {
        return {b.first ? b.sum : a.sum + b.sum, a.first | b.first};
    }
};

// op over the threads up to and with this one, in a block of KV_CHUNK threads.
template <class T, class Op> __device__ T block_scan(T x, Op op) {
    __shared__ T part[WARPS];
    const int own = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const T y = from_below(x, d);
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
    kv_follow();
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
    __shared__ double behind[KV_CHUNK];
    kv_follow();
    const int64_t lane = (int64_t)blockIdx.x * n_chunk;
    const int own = (int)threadIdx.x;
    double m = 0; // at the start of the first chunk
    for (int first = 0; first < n_chunk; first += KV_CHUNK) {
        const int count = min(KV_CHUNK, n_chunk - first);
        double2 t = make_double2(0, -INFINITY);
        bool opens = false;
        if (own < count) {
            t = total[lane + first + own];
            opens = edge[first + own] & 1;
        }
        const rise r = opens ? rise{-INFINITY, fmax(t.x, t.y)} : rise{t.x, t.y};
        behind[own] = block_scan(r, rise_then())(m);
        __syncthreads();
        if (own < count) {
            const double before = opens ? 0 : own ? behind[own - 1] : m;
            level[lane + first + own] = before;
            fade[lane + first + own] = (float)exp(t.x + before - behind[own]);
        }
        m = behind[KV_CHUNK - 1];
        __syncthreads();
    }
}

// Levels inside a chunk.
struct row_args {
    const kv_gate *gate;
    const double *level;
    const int32_t *token, *read, *edge;
    const float *fade;
    double2 *from;
    float4 *factor;
    kv_chunk_lines *lines;
    float *zero; // [lane][n_token], or null
    double scale;
    int n_row, n_token;
};
template <bool LINES> __global__ void row_kernel(row_args a) {
    __shared__ double last_b, last_mu;
    kv_follow();
    const int own = (int)threadIdx.x;
    const int64_t chunk = blockIdx.x, row = chunk * KV_CHUNK + own;
    const kv_gate g = a.gate[row];
    const double start = a.level[chunk], b = block_scan(g.keep, sum_of()),
                 mu = b + fmax(start, block_scan(g.in - b, largest_of()));
    if (own == KV_CHUNK - 1) {
        last_b = b;
        last_mu = mu;
    }
    __syncthreads();
    const bool reads = a.read[row % a.n_row] >= 0;
    const float fresh = (float)exp(last_b - b + g.in - last_mu);
    if (!LINES) {
        a.from[row] = make_double2(b - mu, g.in - b);
        a.factor[row] = make_float4(fresh, reads ? (float)(a.scale * exp(b + start - mu)) : 0.0f,
                                    (float)exp(-mu), 0.0f);
        return;
    }
    constexpr double LOG2E = 1.4426950408889634;
    kv_chunk_lines &x = a.lines[chunk];
    x.ahead[own] = reads ? (float)(LOG2E * (b - mu) + log2(a.scale)) : -INFINITY;
    x.back[own] = (float)(LOG2E * (g.in - b));
    x.fresh[own] = fresh;
    x.floor[own] = (float)exp(-mu);
    const int token = a.token[row % a.n_row];
    if (a.zero && token >= 0) a.zero[row / a.n_row * a.n_token + token] = 0;
    if (own != 0) return;
    const int edge = a.edge[chunk % (a.n_row / KV_CHUNK)];
    x.fade = a.fade[chunk];
    x.start = (float)(LOG2E * start);
    x.opens = edge & 1;
    x.closes = edge >> 1 & 1;
}

__global__ void chunk_sum_kernel(const double *difference, double *sum) {
    kv_follow();
    const double x = block_scan(difference[(int64_t)blockIdx.x * KV_CHUNK + threadIdx.x], sum_of());
    if (threadIdx.x == KV_CHUNK - 1) sum[blockIdx.x] = x;
}

// Sums of chunks become sums of all chunks behind within the document; a block per lane.
__global__ void later_kernel(const int32_t *edge, int n_chunk, double *sum) {
    __shared__ double behind[KV_CHUNK];
    kv_follow();
    const int64_t lane = (int64_t)blockIdx.x * n_chunk;
    const int own = (int)threadIdx.x;
    double running = 0; // behind the last chunk
    for (int end = n_chunk; end > 0; end -= KV_CHUNK) {
        const int count = min(KV_CHUNK, end), at = end - 1 - own;
        part_sum x = {};
        if (own < count) x = {sum[lane + at], edge[at] >> 1 & 1};
        const part_sum all = block_scan(x, part_sum_of());
        behind[own] = all.first ? all.sum : running + all.sum;
        __syncthreads();
        if (own < count) sum[lane + at] = x.first ? 0 : own ? behind[own - 1] : running;
        running = behind[KV_CHUNK - 1];
        __syncthreads();
    }
}

// d_gate.x holds k~.dk~
__global__ void gate_gradient_kernel(const double *difference, const double *later,
                                     const kv_gate *gate, float2 *d_gate) {
    kv_follow();
    const int64_t row = (int64_t)blockIdx.x * KV_CHUNK + KV_CHUNK - 1 - threadIdx.x;
    const double sum = later[blockIdx.x] + block_scan(difference[row], sum_of());
    const kv_gate g = gate[row];
    d_gate[row] = make_float2((float)(d_gate[row].x * g.d_in), (float)(sum * g.d_keep));
}

} // namespace

kv_status kv_net_levels(kv_gpu_net *net, const float *param, bool lines, float *zero) {
    const size_t chunks = (size_t)net->n_lane * (size_t)net->n_chunk, all = (size_t)net->rows();
    const kv_gpu *g = net->gpu;
    KV_RETURN(net->reserve(NET_GATE, all * sizeof(kv_gate)));
    KV_RETURN(net->reserve(NET_TOTAL, chunks * sizeof(double2)));
    KV_RETURN(net->reserve(NET_LEVEL, chunks * sizeof(double)));
    KV_RETURN(net->reserve(NET_FADE, chunks * sizeof(float)));
    KV_RETURN(net->reserve(NET_FROM, lines ? 0 : all * sizeof(double2)));
    KV_RETURN(net->reserve(NET_SCALE, lines ? 0 : all * sizeof(float4)));
    KV_RETURN(net->reserve(NET_LINES, lines ? chunks * sizeof(kv_chunk_lines) : 0));
    const gate_args a = {net->at<float2>(NET_PRE),
                         param + net->layout.part[KV_NET_GATE_I_B].at,
                         param + net->layout.part[KV_NET_GATE_F_B].at,
                         net->at<int32_t>(NET_TOKEN),
                         net->at<kv_gate>(NET_GATE),
                         net->at<double2>(NET_TOTAL),
                         net->layout.n_param,
                         net->n_row,
                         net->spec.sigmoid_gate};
    KV_RETURN(kv_net_launch(g, gate_kernel, dim3((unsigned)chunks), KV_CHUNK, 0, a));
    KV_RETURN(kv_net_launch(g, level_kernel, dim3((unsigned)net->n_lane), KV_CHUNK, 0,
                            net->at<double2>(NET_TOTAL), net->at<int32_t>(NET_EDGE), net->n_chunk,
                            net->at<double>(NET_LEVEL), net->at<float>(NET_FADE)));
    const row_args rows = {net->at<kv_gate>(NET_GATE),
                           net->at<double>(NET_LEVEL),
                           net->at<int32_t>(NET_TOKEN),
                           net->at<int32_t>(NET_READ),
                           net->at<int32_t>(NET_EDGE),
                           net->at<float>(NET_FADE),
                           net->at<double2>(NET_FROM),
                           net->at<float4>(NET_SCALE),
                           net->at<kv_chunk_lines>(NET_LINES),
                           zero,
                           1 / sqrt((double)net->spec.n_key),
                           net->n_row,
                           net->n_token};
    return kv_net_launch(g, lines ? row_kernel<true> : row_kernel<false>, dim3((unsigned)chunks),
                         KV_CHUNK, 0, rows);
}

kv_status kv_net_gate_gradients(kv_gpu_net *net) {
    const size_t chunks = (size_t)net->n_lane * (size_t)net->n_chunk;
    const kv_gpu *g = net->gpu;
    KV_RETURN(net->reserve(NET_LATER, chunks * sizeof(double)));
    KV_RETURN(kv_net_launch(g, chunk_sum_kernel, dim3((unsigned)chunks), KV_CHUNK, 0,
                            net->at<double>(NET_DIFFERENCE), net->at<double>(NET_LATER)));
    KV_RETURN(kv_net_launch(g, later_kernel, dim3((unsigned)net->n_lane), KV_CHUNK, 0,
                            net->at<int32_t>(NET_EDGE), net->n_chunk, net->at<double>(NET_LATER)));
    return kv_net_launch(g, gate_gradient_kernel, dim3((unsigned)chunks), KV_CHUNK, 0,
                         net->at<double>(NET_DIFFERENCE), net->at<double>(NET_LATER),
                         net->at<kv_gate>(NET_GATE), net->at<float2>(NET_D_GATE));
}
