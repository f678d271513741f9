// The mLSTM scorer (kv_mlstm_scores; maths.md 6.2-6.5): projections by cuBLAS, then the memory chunk by chunk.
//
// Levels (sums of log gates, running maxima) are double; a chunk's own contribution to the memory needs no other chunk, so all chunks
// work at once: contributions, one scan that turns them into the memory at each chunk's start, outputs. Arithmetic is fp32 and every
// difference of levels is formed before it is rounded, so the result is the step form's to fp32 rounding.
#include <algorithm>

#include "kernels/scorer.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int CHUNK = 64,
              PITCH = CHUNK + 4; // PITCH: of transposed tiles, rows start in different banks
constexpr int SIDE = 4;          // a thread's piece of a product is SIDE x SIDE

__host__ __device__ constexpr int padded(int n) { return (n + SIDE - 1) / SIDE * SIDE; }

struct memory_args {
    const float *project; // [n_head][n_token][2*n_key + n_value]: q~, k~, v~
    const double2 *gate;  // [n_head][n_token]: i, log sigmoid(f)
    const float *readout; // [n_value] of each head, heads n_param apart
    double *level;        // [n_head][n_chunk] log scale at the chunk's start
    float *fade;          // [n_head][n_chunk] factor of the memory over the chunk
    float *state;         // [n_head][n_chunk][n_key][n_augmented]
    float *rhat;          // [n_head][n_token]
    int64_t n_param;
    // n_augmented: n_value, and the normaliser without a norm
    int n_token, n_chunk, n_key, n_value, n_augmented, delay;
    bool norm, add;
};

__device__ double log_sigmoid(double x) { return fmin(x, 0.0) - log1p(exp(-fabs(x))); }

// f = silu(z + bias) in place
__global__ void feature_kernel(float *z, const float *bias, int64_t n_param, int n_token, int width,
                               int64_t count) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        z[i] = kv_silu(z[i] + bias[i / ((int64_t)n_token * width) * n_param + i % width]);
}

struct gate_args {
    // [n_token][width] of each head, heads x_head apart; two parts as in kv_scorer_source
    const float *x;
    kv_scorer_source source;
    const float *w, *bias_i, *bias_f; // w [width][2]
    double2 *gate;
    int64_t n_param, rows;
    int n_token;
    bool sigmoid;
};

// Gates of a token, by a warp.
__global__ void gate_kernel(gate_args a) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows) return;
    const int64_t head = row / a.n_token, t = row % a.n_token;
    const float *w = a.w + head * a.n_param;
    float pre_i = 0, pre_f = 0;
    for (int p = 0; p < a.source.n_part; p++) {
        const int width = a.source.width[p];
        const float *x = a.source.part[p] + head * a.source.head[p] + t * width;
        for (int c = (int)threadIdx.x % 32; c < width; c += 32) {
            pre_i = fmaf(x[c], w[2 * c], pre_i);
            pre_f = fmaf(x[c], w[2 * c + 1], pre_f);
        }
        w += 2 * width;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        pre_i += __shfl_xor_sync(~0u, pre_i, d);
        pre_f += __shfl_xor_sync(~0u, pre_f, d);
    }
    if (threadIdx.x % 32) return;
    const double i = 15 * tanh(((double)pre_i + (double)a.bias_i[head * a.n_param]) / 15);
    const double f = 15 * tanh(((double)pre_f + (double)a.bias_f[head * a.n_param]) / 15);
    a.gate[row] = make_double2(a.sigmoid ? log_sigmoid(i) : i, log_sigmoid(f));
}

// Level of every chunk's start, and how much of the memory survives a chunk. One block per head.
__global__ void level_kernel(memory_args a) {
    const int head = (int)blockIdx.x;
    const double2 *gate = a.gate + (int64_t)head * a.n_token;
    double *level = a.level + (int64_t)head * a.n_chunk; // first the largest of a_j, then M
    float *fade = a.fade + (int64_t)head * a.n_chunk;
    __shared__ double total[THREADS], best[THREADS], shared_m;
    if (threadIdx.x == 0) shared_m = 0;
    for (int first = 0; first < a.n_chunk; first += THREADS) {
        const int c = first + (int)threadIdx.x;
        double b = 0, top = -INFINITY; // top: of i_j - b_j
        for (int j = c * CHUNK; c < a.n_chunk && j < min((c + 1) * CHUNK, a.n_token); j++) {
            const double2 g = gate[j];
            b += g.y;
            top = fmax(top, g.x - b);
        }
        total[threadIdx.x] = b;
        best[threadIdx.x] = b + top;
        __syncthreads();
        if (threadIdx.x == 0) {
            double m = shared_m;
            for (int i = 0; i < min(THREADS, a.n_chunk - first); i++) {
                const double next = fmax(total[i] + m, best[i]);
                level[first + i] = m;
                fade[first + i] = (float)exp(total[i] + m - next);
                m = next;
            }
            shared_m = m;
        }
        __syncthreads();
    }
}

// Levels inside a chunk, shared by its threads: b_j, i_j, mu_j (maths.md 6.5).
struct chunk_levels {
    double b[CHUNK], in[CHUNK], mu[CHUNK];
};

__device__ void load_levels(const memory_args &a, int head, int chunk, chunk_levels *s) {
    const int j = (int)threadIdx.x, t = chunk * CHUNK + j;
    __shared__ double keep[CHUNK];
    if (j < CHUNK) {
        // Behind the document nothing is written and nothing fades.
        const double2 g =
            t < a.n_token ? a.gate[(int64_t)head * a.n_token + t] : make_double2(-INFINITY, 0.0);
        s->in[j] = g.x;
        keep[j] = g.y;
    }
    __syncthreads();
    if (j < CHUNK) {
        double b = 0, best = a.level[(int64_t)head * a.n_chunk + chunk];
        for (int i = 0; i <= j; i++) {
            b += keep[i];
            best = fmax(best, s->in[i] - b);
        }
        s->b[j] = b;
        s->mu[j] = b + best;
    }
    __syncthreads();
}

// Rows [first, first + CHUNK) of one projection into shared memory: as they are (row stride `pitch`), or transposed (PITCH). Zeros
// outside [0, n_token) and in the padding columns; column `one` is 1.
template <bool TRANSPOSED>
__device__ void load_rows(const memory_args &a, int head, int first, int column, int width, int one,
                          int pitch, float *to) {
    const int row = 2 * a.n_key + a.n_value;
    const float *x = a.project + (int64_t)head * a.n_token * row + column;
    const int wide = TRANSPOSED ? padded(width) : pitch;
    for (int i = (int)threadIdx.x; i < CHUNK * wide; i += THREADS) {
        const int j = i / wide, c = i % wide, t = first + j;
        float y = 0;
        if (t >= 0 && t < a.n_token) y = c < width ? x[(int64_t)t * row + c] : c == one ? 1 : 0;
        to[TRANSPOSED ? c * PITCH + j : j * pitch + c] = y;
    }
}

// sum[i][j] += sum over k < n of x[k][4 m + i] y[k][4 c + j], row strides px and py.
__device__ __forceinline__ void multiply(const float *x, int px, int m, const float *y, int py,
                                         int c, int n, float (&sum)[SIDE][SIDE]) {
    for (int k = 0; k < n; k++) {
        const float4 p = *reinterpret_cast<const float4 *>(x + k * px + SIDE * m);
        const float4 q = *reinterpret_cast<const float4 *>(y + k * py + SIDE * c);
        const float u[SIDE] = {p.x, p.y, p.z, p.w}, w[SIDE] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < SIDE; i++)
#pragma unroll
            for (int j = 0; j < SIDE; j++) sum[i][j] = fmaf(u[i], w[j], sum[i][j]);
    }
}

// What a chunk adds to the memory, at the log scale of its end.
__global__ void __launch_bounds__(THREADS) contribution_kernel(memory_args a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ chunk_levels s;
    const int chunk = (int)blockIdx.x, head = (int)blockIdx.y;
    const int wide_k = padded(a.n_key), wide_v = padded(a.n_augmented);
    float *key = shared, *value = key + CHUNK * wide_k; // [CHUNK][wide_k], [CHUNK][wide_v]
    load_levels(a, head, chunk, &s);
    load_rows<false>(a, head, chunk * CHUNK, a.n_key, a.n_key, -1, wide_k, key);
    load_rows<false>(a, head, chunk * CHUNK, 2 * a.n_key, a.n_value, a.n_value, wide_v, value);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < CHUNK * wide_k; i += THREADS) {
        const int j = i / wide_k;
        // a_j - M_c; the chunk's end is the last row, also when rows are missing: they do not fade
        key[i] *= expf((float)(s.b[CHUNK - 1] - s.b[j] + s.in[j] - s.mu[CHUNK - 1]));
    }
    __syncthreads();
    float *out = a.state + ((int64_t)head * a.n_chunk + chunk) * a.n_key * a.n_augmented;
    for (int i = (int)threadIdx.x; i < wide_k / SIDE * (wide_v / SIDE); i += THREADS) {
        const int m = i / (wide_v / SIDE), c = i % (wide_v / SIDE);
        float sum[SIDE][SIDE] = {};
        multiply(key, wide_k, m, value, wide_v, c, CHUNK, sum);
#pragma unroll
        for (int p = 0; p < SIDE; p++)
#pragma unroll
            for (int q = 0; q < SIDE; q++)
                if (SIDE * m + p < a.n_key && SIDE * c + q < a.n_augmented)
                    out[(SIDE * m + p) * a.n_augmented + SIDE * c + q] = sum[p][q];
    }
}

// Contributions become the memory at each chunk's start; a thread per element.
__global__ void scan_kernel(memory_args a) {
    constexpr int AHEAD = 8;
    const int size = a.n_key * a.n_augmented, head = (int)blockIdx.y;
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    float *x = a.state + (int64_t)head * a.n_chunk * size + i, memory = 0;
    const float *fade = a.fade + (int64_t)head * a.n_chunk;
    for (int first = 0; first < a.n_chunk; first += AHEAD) {
        float fresh[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (first + j < a.n_chunk) fresh[j] = x[(int64_t)(first + j) * size];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (first + j < a.n_chunk) {
                x[(int64_t)(first + j) * size] = memory;
                memory = fmaf(fade[first + j], memory, fresh[j]);
            }
    }
}

// Scores of the tokens that the chunk's rows read for: row of position p reads for token p - delay.
__global__ void __launch_bounds__(THREADS, 1) output_kernel(memory_args a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ chunk_levels s;
    const int chunk = (int)blockIdx.x, head = (int)blockIdx.y, first = chunk * CHUNK;
    if (first + CHUNK <= a.delay) return; // no row reads
    const int rows_k = padded(a.n_key), wide_v = padded(a.n_augmented);
    float *query = shared;                    // [rows_k][PITCH]
    float *key = query + rows_k * PITCH;      // [rows_k][PITCH]
    float *value = key + rows_k * PITCH;      // [CHUNK][wide_v]
    float *memory = value + CHUNK * wide_v;   // [rows_k][wide_v]
    float *weight = memory + rows_k * wide_v; // [CHUNK][PITCH], transposed: [key][query]
    float *num = weight + CHUNK * PITCH;      // [CHUNK][wide_v]
    const double level = a.level[(int64_t)head * a.n_chunk + chunk];
    const float scale = (float)(1 / sqrt((double)a.n_key));
    load_levels(a, head, chunk, &s);
    load_rows<true>(a, head, first - a.delay, 0, a.n_key, -1, 0, query);
    load_rows<true>(a, head, first, a.n_key, a.n_key, -1, 0, key);
    load_rows<false>(a, head, first, 2 * a.n_key, a.n_value, a.n_value, wide_v, value);
    const float *state = a.state + ((int64_t)head * a.n_chunk + chunk) * a.n_key * a.n_augmented;
    for (int i = (int)threadIdx.x; i < rows_k * wide_v; i += THREADS) {
        const int r = i / wide_v, c = i % wide_v;
        memory[i] = r < a.n_key && c < a.n_augmented ? state[r * a.n_augmented + c] : 0;
    }
    __syncthreads();
    constexpr int across = CHUNK / SIDE;
    for (int i = (int)threadIdx.x; i < across * across; i += THREADS) {
        const int m = i / across, c = i % across;
        float sum[SIDE][SIDE] = {};
        if (c <= m) multiply(query, PITCH, m, key, PITCH, c, a.n_key, sum);
#pragma unroll
        for (int p = 0; p < SIDE; p++)
#pragma unroll
            for (int q = 0; q < SIDE; q++) {
                const int j = SIDE * m + p, from = SIDE * c + q; // query row, key row
                const float d =
                    from <= j ? expf((float)(s.b[j] - s.mu[j] - s.b[from] + s.in[from])) : 0.0f;
                weight[from * PITCH + j] = scale * d * sum[p][q];
            }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < across * (wide_v / SIDE); i += THREADS) {
        const int m = i / (wide_v / SIDE), c = i % (wide_v / SIDE);
        float sum[SIDE][SIDE] = {};
        multiply(query, PITCH, m, memory, wide_v, c, a.n_key, sum);
#pragma unroll
        for (int p = 0; p < SIDE; p++) {
            const int j = SIDE * m + p;
            const float carried = scale * expf((float)(s.b[j] + level - s.mu[j]));
#pragma unroll
            for (int q = 0; q < SIDE; q++) sum[p][q] *= carried;
        }
        multiply(weight, PITCH, m, value, wide_v, c, CHUNK, sum);
#pragma unroll
        for (int p = 0; p < SIDE; p++)
#pragma unroll
            for (int q = 0; q < SIDE; q++) num[(SIDE * m + p) * wide_v + SIDE * c + q] = sum[p][q];
    }
    __syncthreads();
    const float *readout = a.readout + head * a.n_param;
    for (int j = (int)threadIdx.x / 32; j < CHUNK; j += WARPS) {
        const int t = first + j - a.delay, lane = (int)threadIdx.x % 32;
        if (t < 0 || first + j >= a.n_token) continue;
        const float *x = num + j * wide_v;
        double size = 0;
        for (int c = lane; c < a.n_value; c += 32) size += (double)x[c] * (double)x[c];
#pragma unroll
        for (int d = 16; d > 0; d /= 2) size += __shfl_xor_sync(~0u, size, d);
        const double floor = exp(-s.mu[j]);
        const double by = a.norm ? sqrt(size / a.n_value + 1e-6 * floor * floor)
                                 : fmax(fabs((double)x[a.n_value]), floor);
        float score = 0;
        for (int c = lane; c < a.n_value; c += 32)
            score = fmaf(readout[c], kv_silu((float)((double)x[c] / by)), score);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) score += __shfl_xor_sync(~0u, score, d);
#ifdef KV_BREAK_MLSTM
        score *= chunk % 2 ? 1.001f : 1.0f;
#endif
        float *to = &a.rhat[(int64_t)head * a.n_token + t];
        if (lane == 0) *to = a.add ? *to + score : score;
    }
}

kv_status run_memory(kv_gpu *g, const memory_args &a, int n_head) {
    const int rows_k = padded(a.n_key), wide_v = padded(a.n_augmented);
    const size_t contribution = (size_t)CHUNK * (size_t)(rows_k + wide_v) * sizeof(float);
    const size_t output =
        ((size_t)2 * (size_t)(rows_k * PITCH) + (size_t)2 * (size_t)(CHUNK * wide_v) +
         (size_t)(rows_k * wide_v) + (size_t)CHUNK * PITCH) *
        sizeof(float);
    const dim3 grid((unsigned)a.n_chunk, (unsigned)n_head);
    const int size = a.n_key * a.n_augmented;
    level_kernel<<<(unsigned)n_head, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_allow_shared(g, contribution_kernel, contribution));
    contribution_kernel<<<grid, THREADS, contribution, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    scan_kernel<<<dim3((unsigned)kv_div_up(size, 128), (unsigned)n_head), 128, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_allow_shared(g, output_kernel, output));
    output_kernel<<<grid, THREADS, output, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

} // namespace

kv_status kv_mlstm_device(kv_gpu *g, const kv_scorer *s, const float *param,
                          const kv_scorer_input *in, float *rhat) {
    const kv_net_spec *spec = &s->spec;
    const auto part = [&](kv_net_part p) { return param + s->layout.part[p].at; };
    const int64_t n_param = s->layout.n_param, rows = (int64_t)in->n_head * in->n_token;
    const int wide = spec->n_feature ? spec->n_feature : spec->n_input,
              n_project = 2 * spec->n_key + spec->n_value;
    const int n_chunk = kv_div_up(in->n_token, CHUNK), augmented = spec->n_value + !spec->norm;
    kv_scratch feature, project, gate, level, fade, state;
    kv_scorer_source x = kv_scorer_x(spec, in);
    if (spec->n_feature) {
        KV_RETURN(feature.reserve(g, (size_t)rows * (size_t)wide * sizeof(float)));
        KV_RETURN(kv_scorer_product(g, &x, in->n_head, in->n_token, part(KV_NET_FEATURE_W), n_param,
                                    wide, feature.as<float>()));
        feature_kernel<<<(unsigned)std::min<int64_t>((rows * wide + 255) / 256, 4096), 256, 0,
                         g->stream>>>(feature.as<float>(), part(KV_NET_FEATURE_B), n_param,
                                      in->n_token, wide, rows * wide);
        KV_CUDA(cudaGetLastError());
        x = {};
        x.part[0] = feature.as<float>();
        x.head[0] = (int64_t)in->n_token * wide;
        x.width[0] = wide;
        x.n_part = 1;
    }
    KV_RETURN(project.reserve(g, (size_t)rows * (size_t)n_project * sizeof(float)));
    KV_RETURN(kv_scorer_product(g, &x, in->n_head, in->n_token, part(KV_NET_PHI_Q), n_param,
                                n_project, project.as<float>()));
    KV_RETURN(gate.reserve(g, (size_t)rows * sizeof(double2)));
    gate_args ga = {};
    ga.source = x;
    if (spec->hidden_gate) {
        ga.source = {};
        ga.source.part[0] = in->hidden;
        ga.source.width[0] = spec->n_hidden;
        ga.source.n_part = 1;
    }
    ga.w = part(KV_NET_GATE_I_W);
    ga.bias_i = part(KV_NET_GATE_I_B);
    ga.bias_f = part(KV_NET_GATE_F_B);
    ga.gate = gate.as<double2>();
    ga.n_param = n_param;
    ga.rows = rows;
    ga.n_token = in->n_token;
    ga.sigmoid = spec->sigmoid_gate;
    gate_kernel<<<(unsigned)((rows + WARPS - 1) / WARPS), THREADS, 0, g->stream>>>(ga);
    KV_CUDA(cudaGetLastError());
    const size_t chunks = (size_t)in->n_head * (size_t)n_chunk;
    KV_RETURN(level.reserve(g, chunks * sizeof(double)));
    KV_RETURN(fade.reserve(g, chunks * sizeof(float)));
    KV_RETURN(state.reserve(g, chunks * (size_t)spec->n_key * (size_t)augmented * sizeof(float)));
    memory_args a = {};
    a.project = project.as<float>();
    a.gate = gate.as<double2>();
    a.readout = part(KV_NET_READOUT);
    a.level = level.as<double>();
    a.fade = fade.as<float>();
    a.state = state.as<float>();
    a.rhat = rhat;
    a.n_param = n_param;
    a.n_token = in->n_token;
    a.n_chunk = n_chunk;
    a.n_key = spec->n_key;
    a.n_value = spec->n_value;
    a.n_augmented = augmented;
    a.delay = spec->delay ? spec->window : 0;
    a.norm = spec->norm;
    a.add = spec->n_mlp > 0;
    // Tokens whose window never passes are not read for: their score is the token's own.
    if (!a.add) KV_CUDA(cudaMemsetAsync(rhat, 0, (size_t)rows * sizeof(float), g->stream));
    return run_memory(g, a, in->n_head);
}
