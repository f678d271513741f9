// oracle_step (kv_oracle_step_mass): the retained mass of every query when it may choose its k best long-range keys anew.
//
// Batches of queries, small enough for their rows to stay in L2. First the group mean of the softmax over all keys, [head][row][key] in
// fp32: mma.sync, one block per 64 x 64 cells, query heads of the group one after the other. Then one block per row: the k-th largest
// probability by three histograms of its bits (those of a nonnegative float order like the float), and one more pass for the sum.
// Floors for 32/8 heads, d 128, 16384 tokens, a layer: products 5 ms at the rate of mma.sync, 17 GB through L2 for either kernel.
#include <algorithm>

#include "kernels/block_sum.cuh"
#include "kernels/portable.cuh"
#include "kernels/rows.cuh"

namespace {

constexpr int THREADS = 256, TILE = portable::COLUMNS, BINS = 2048, LEVELS = 3;
constexpr size_t BATCH_BYTES = (size_t)34 << 20;

struct step_args {
    const float *lse; // [n_q_head][n_token]
    float *mean;      // [n_kv_head][rows][pitch], rows: queries first .. first + rows - 1
    double *mass;     // [n_kv_head][n_token]
    int n_token, group, n_kv_head, first, rows, pitch;
    int sinks, window, budget;
    float scale, softcap;
};

// blockIdx = (tile of keys, tile of queries, KV head).
template <class T, int D>
__global__ __launch_bounds__(portable::THREADS) void mean_kernel(const T *q, const T *k,
                                                                 step_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    constexpr int tile = tile_elements<T>(D), stride = row_stride<T>(D);
    T *sq = reinterpret_cast<T *>(shared), *sk = sq + tile;
    const int t0 = (int)blockIdx.x * TILE, u0 = a.first + (int)blockIdx.y * ROWS,
              kv = (int)blockIdx.z;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, u = u0 + warp * 16 + lane / 4;
    const size_t plane = (size_t)a.n_token * D;
    const auto row = [&](int from) {
        return [=](int r) { return from + r < a.n_token ? from + r : -1; };
    };
    if (t0 > u0 + ROWS - 1) return; // the future
    float sum[TILE / 2] = {};
    load_rows<T, D>(sk, k + (size_t)kv * plane, row(t0));
    for (int g = 0; g < a.group; g++) {
        const int head = kv * a.group + g;
        load_rows<T, D>(sq, q + (size_t)head * plane, row(u0));
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        float x[TILE / 2], norm[2];
        product<T, D>(x, sq + warp * 16 * stride, sk);
        to_logits(x, a.scale, a.softcap);
#pragma unroll
        for (int r = 0; r < 2; r++)
            norm[r] = u + 8 * r < a.n_token
                          ? a.lse[(size_t)head * (size_t)a.n_token + (size_t)(u + 8 * r)]
                          : 0;
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) sum[i] += kv_exp2((x[i] - norm[i / 2 % 2]) * KV_LOG2E);
        __syncthreads(); // sq is read by all
    }
#pragma unroll
    for (int i = 0; i < TILE / 2; i += 2) {
        const int query = u + 8 * (i / 2 % 2), t = t0 + i / 4 * 8 + 2 * (lane % 4);
        if (query >= a.n_token || query >= a.first + a.rows) continue;
        float *out =
            a.mean + ((size_t)kv * (size_t)a.rows + (size_t)(query - a.first)) * (size_t)a.pitch;
        const float by = 1.0f / (float)a.group;
        *reinterpret_cast<float2 *>(out + t) = make_float2(sum[i] * by, sum[i + 1] * by);
    }
}

// Largest bin whose elements and those of the bins above are at least k, and what is left of k inside it. All threads get both.
__device__ void find_bin(const int *count, int *chosen, int &bin, int &k) {
    // Eight bins a thread from the top; thread 0 has the highest.
    constexpr int EACH = BINS / THREADS;
    __shared__ int warp_sum[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
              top = BINS - 1 - EACH * (int)threadIdx.x;
    int own = 0;
    for (int i = 0; i < EACH; i++) own += count[top - i];
    int upto = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int y = __shfl_up_sync(~0u, upto, d);
        if (lane >= d) upto += y;
    }
    if (lane == 31) warp_sum[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; w++) upto += warp_sum[w];
    int before = upto - own;
    if (before < k && k <= upto)
        for (int i = 0; i < EACH; i++) {
            const int here = count[top - i];
            if (before < k && k <= before + here) {
                chosen[0] = top - i;
                chosen[1] = k - before;
            }
            before += here;
        }
    __syncthreads();
    bin = chosen[0];
    k = chosen[1];
    __syncthreads();
}

// blockIdx = (row, KV head).
__global__ __launch_bounds__(THREADS) void top_kernel(step_args a) {
    __shared__ int count[BINS], chosen[2];
    __shared__ double partial[32];
    const int u = a.first + (int)blockIdx.x, kv = (int)blockIdx.y;
    const float *p = a.mean + ((size_t)kv * (size_t)a.rows + (size_t)blockIdx.x) * (size_t)a.pitch;
    const int s = a.sinks, w = a.window, end = u - w + 1; // E(u) = [s, end)
    int k = a.budget - s - w;
    double sum = 0;
    for (int t = (int)threadIdx.x; t < s; t += THREADS) sum += (double)p[t];
    for (int t = end + (int)threadIdx.x; t <= u; t += THREADS) sum += (double)p[t];
    uint32_t least = 0, known = 0; // bits of the k-th largest, and which of them are known
#ifdef KV_BREAK_STEP
    k = max(0, k - 1);
#endif
    const bool choose = k > 0;
    for (int level = 0; choose && level < LEVELS; level++) {
        const int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
        const uint32_t mask = level == 2 ? 0x3ff : 0x7ff;
        for (int i = (int)threadIdx.x; i < BINS; i += THREADS) count[i] = 0;
        __syncthreads();
        for (int t = s + (int)threadIdx.x; t < end; t += THREADS) {
            const uint32_t bits = __float_as_uint(p[t]);
            if ((bits & known) == least) atomicAdd(&count[bits >> shift & mask], 1);
        }
        __syncthreads();
        int bin;
        find_bin(count, chosen, bin, k);
        least |= (uint32_t)bin << shift;
        known |= mask << shift;
    }
    for (int t = s + (int)threadIdx.x; choose && t < end; t += THREADS)
        if (__float_as_uint(p[t]) > least) sum += (double)p[t];
    sum = kv_block_sum(sum, partial);
    if (threadIdx.x == 0)
        a.mass[(size_t)kv * (size_t)a.n_token + (size_t)u] =
            sum + (choose ? k * (double)__uint_as_float(least) : 0);
}

// Queries below the budget keep everything.
__global__ void ones_kernel(double *mass, int n_token, int until) {
    const int u = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (u < until) mass[(size_t)blockIdx.y * (size_t)n_token + (size_t)u] = 1;
}

template <class T, int D> kv_status run_batch(const kv_gpu_span *s, const step_args &a) {
    kv_gpu *g = s->gpu;
    const size_t bytes = 2 * (size_t)portable::tile_elements<T>(D) * sizeof(T);
    KV_RETURN(kv_allow_shared(g, mean_kernel<T, D>, bytes));
    mean_kernel<T, D><<<dim3((unsigned)kv_div_up(a.first + a.rows, TILE),
                             (unsigned)kv_div_up(a.rows, portable::ROWS), (unsigned)a.n_kv_head),
                        portable::THREADS, bytes, g->stream>>>(
        kv_data<T>((const kv_gpu_buffer *)s->q), kv_data<T>((const kv_gpu_buffer *)s->k), a);
    KV_CUDA(cudaGetLastError());
    top_kernel<<<dim3((unsigned)a.rows, (unsigned)a.n_kv_head), THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T> kv_status run_size(const kv_gpu_span *s, const step_args &a) {
    return s->head_dim == 64 ? run_batch<T, 64>(s, a) : run_batch<T, 128>(s, a);
}

kv_status run_type(const kv_gpu_span *s, const step_args &a) {
    if (s->type == KV_F16) return run_size<__half>(s, a);
    if (s->type == KV_BF16) return run_size<__nv_bfloat16>(s, a);
    return run_size<float>(s, a);
}

} // namespace

kv_status kv_gpu_step_mass(const kv_gpu_span *s, const kv_run *run, const kv_gpu_buffer *lse,
                           kv_gpu_buffer *mass) {
    kv_gpu *g = s->gpu;
    const int32_t n = s->n_token, until = std::min(n, run->budget);
    KV_RETURN(kv_buffer_check(lse, "lse", (size_t)s->n_q_head * (size_t)n, sizeof(float)));
    KV_RETURN(kv_buffer_check(mass, "mass", (size_t)s->n_kv_head * (size_t)n, sizeof(double)));
    step_args a = {};
    a.lse = kv_data<float>(lse);
    a.mass = kv_data<double>(mass);
    a.n_token = n;
    a.n_kv_head = s->n_kv_head;
    a.group = s->n_q_head / s->n_kv_head;
    a.pitch = kv_div_up(n, TILE) * TILE;
    a.sinks = run->sinks;
    a.window = run->window;
    a.budget = run->budget;
    a.scale = s->scale;
    a.softcap = s->softcap;
    if (until > 0)
        ones_kernel<<<dim3((unsigned)kv_div_up(until, THREADS), (unsigned)s->n_kv_head), THREADS, 0,
                      g->stream>>>(a.mass, n, until);
    KV_CUDA(cudaGetLastError());
    if (until == n) return KV_OK;
    const size_t row = (size_t)s->n_kv_head * (size_t)a.pitch * sizeof(float);
    const int most =
        std::max(1, (int)std::min<size_t>(BATCH_BYTES / row, (size_t)n) / portable::ROWS) *
        portable::ROWS;
    kv_scratch mean;
    KV_RETURN(mean.reserve(g, (size_t)std::min(most, n - until) * row));
    a.mean = mean.as<float>();
    for (a.first = until; a.first < n; a.first += most) {
        a.rows = std::min(most, n - a.first);
        KV_RETURN(run_type(s, a));
    }
    return KV_OK;
}
