// Column sums of the dense sweep: for every key the sum over later queries u >= t + window of p(u->t)^power, or the maximum
// (kv_dense_compute's columns, maths.md 2.3, 2.6), with a dense or a sparse normaliser.
//
// Keys are the stationary side, so a thread sums its columns without touching other lanes until the end; one fp32 partial sum per
// tile of 128 queries goes into a double. Three forms, chosen by what fp32 can hold:
//   SUM      power 1..2 over a dense normaliser: exp2(power (l - lse)) directly; p^power below 2^-126 vanishes beside eps
//   MAXIMUM  largest log2 p
//   SHIFTED  any power, p may exceed 1: a MAXIMUM pass gives each key's offset, then exp2(power (log2 p - offset))
#include <cmath>

#include "kernels/hopper.cuh"
#include "kernels/portable.cuh"
#include "kernels/rows.cuh"

namespace {

enum column_form { SUM, MAXIMUM, SHIFTED };

constexpr int TILE = 128, UNITS = 4, STAGES = 3, NORMS = STAGES + 1;
constexpr int THREADS = 128 * (UNITS + 1);

struct column_args {
    int n_token, n_padded, n_q_head, n_kv_head, window;
    float unit; // raw logit -> binary exponent, times the power in SUM
    float power, scale, softcap;
    // [n_q_head][n_padded] minus the normaliser as binary exponent (times the power in SUM), -inf behind the end
    const float *norm;
    float *top; // [n_q_head][n_token] largest log2 p: written by MAXIMUM, read by SHIFTED
    double *column;
    int *next;
};

// Row state of one thread: a double sum, or a maximum.
struct column_row {
    double sum;
    float max, offset;
};

__device__ __forceinline__ int column_of(int i) { return i / 4 * 8 + i % 2; }

// norm: shared memory, the tile's first query; query: of the thread's element 0; t: key of row 0.
template <column_form FORM, bool MASK, int N>
__device__ __forceinline__ void add_tile(const float (&x)[N], column_row (&row)[2],
                                         const column_args &a, const float *norm, int query,
                                         int t) {
    float part[2][2] = {};
#ifdef KV_BREAK_COLUMN
    t++;
#endif
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        const float2 shift = *reinterpret_cast<const float2 *>(norm + 8 * j);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2;
            const bool seen = !MASK || query + column_of(4 * j + i) >= t + 8 * r + a.window;
            float y = fmaf(x[4 * j + i], a.unit, i % 2 ? shift.y : shift.x);
            if constexpr (FORM == MAXIMUM) {
                row[r].max = fmaxf(row[r].max, seen ? y : -INFINITY);
            } else {
                if constexpr (FORM == SHIFTED)
                    y = y < -126.0f ? -INFINITY : fmaf(y, a.power, -row[r].offset);
                const float p = kv_exp2(y);
                part[r][i % 2] += seen ? p : 0.0f;
            }
        }
    }
    if constexpr (FORM != MAXIMUM) {
#pragma unroll
        for (int r = 0; r < 2; r++) row[r].sum += (double)(part[r][0] + part[r][1]);
    }
}

template <column_form FORM>
__device__ __forceinline__ column_row start(const column_args &a, int head, int t) {
    column_row row = {0.0, -INFINITY, 0.0f};
    if (FORM == SHIFTED && t < a.n_token) {
        const float top = a.top[(size_t)head * (size_t)a.n_token + (size_t)t];
        row.offset = top < -126.0f ? 0.0f : top * a.power;
    }
    return row;
}

template <column_form FORM>
__device__ __forceinline__ void finish(const column_row &row, const column_args &a, int head,
                                       int t) {
    const float max = kv_quad_max(row.max);
    const double sum = kv_quad_sum(row.sum);
    if (threadIdx.x % 4 || t >= a.n_token) return;
    const size_t i = (size_t)head * (size_t)a.n_token + (size_t)t;
    if (FORM == SUM) a.column[i] = sum;
    if (FORM == SHIFTED) a.column[i] = sum * exp2((double)row.offset);
    if (FORM == MAXIMUM) {
        a.top[i] = max;
        a.column[i] = max < -126.0f ? 0.0 : exp2((double)max);
    }
}

// norm [heads][padded] = -lse * factor in binary exponents, -inf behind the last query: such columns add nothing.
__global__ void norm_kernel(const float *lse, float *norm, int n, int padded, double factor) {
    const int u = (int)(blockIdx.x * blockDim.x + threadIdx.x), head = (int)blockIdx.y;
    if (u >= padded) return;
    norm[(size_t)head * (size_t)padded + (size_t)u] =
        u < n ? (float)(-factor / KV_LN2 * (double)lse[(size_t)head * (size_t)n + (size_t)u])
              : -INFINITY;
}

// ---- mma.sync: one block per (64 keys, query head) ----

template <class T, int D, column_form FORM>
__global__ __launch_bounds__(portable::THREADS, 2) void column_portable(const T *q, const T *k,
                                                                        column_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    constexpr int tile = tile_elements<T>(D), stage_count = stages<T>();
    T *sk = reinterpret_cast<T *>(shared), *sq = sk + tile;
    __shared__ alignas(16) float norm[2][COLUMNS];
    const int t0 = (int)blockIdx.x * ROWS, head = (int)blockIdx.y;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t plane = (size_t)a.n_token * D;
    q += (size_t)head * plane;
    k += (size_t)(head / (a.n_q_head / a.n_kv_head)) * plane;
    const float *lse = a.norm + (size_t)head * (size_t)a.n_padded;
    const int t = t0 + warp * 16 + lane / 4, first = (t0 + a.window) / COLUMNS;
    const int tiles = (a.n_token + COLUMNS - 1) / COLUMNS;
    auto inside = [&](int from) {
        return [from, &a](int r) { return from + r < a.n_token ? from + r : -1; };
    };
    auto load_queries = [&](int j) {
        const int stage = j % stage_count;
        load_rows<T, D>(sq + stage * tile, q, inside(j * COLUMNS));
        if (threadIdx.x < COLUMNS / 4)
            copy16(norm[stage] + 4 * threadIdx.x, lse + j * COLUMNS + 4 * threadIdx.x, true);
    };
    load_rows<T, D>(sk, k, inside(t0));
    if (stage_count == 2 && first < tiles) load_queries(first);
    copy_commit();
    column_row row[2] = {start<FORM>(a, head, t), start<FORM>(a, head, t + 8)};
    for (int j = first; j < tiles; j++) {
        const int ahead = stage_count == 2 ? j + 1 : j;
        if (ahead < tiles) load_queries(ahead);
        copy_commit();
        copy_wait<stage_count - 1>();
        __syncthreads();
        float x[COLUMNS / 2];
        product<T, D>(x, sk + warp * 16 * row_stride<T>(D), sq + j % stage_count * tile);
        to_logits(x, a.scale, a.softcap);
        add_tile<FORM, true>(x, row, a, norm[j % stage_count] + 2 * (lane % 4),
                             j * COLUMNS + 2 * (lane % 4), t);
        __syncthreads();
    }
    finish<FORM>(row[0], a, head, t);
    finish<FORM>(row[1], a, head, t + 8);
}

// ---- wgmma: as in lse.cu, with 256 keys of one query head per item and a stream of queries ----

template <int D> struct column_shared {
    alignas(1024) uint16_t k[2][UNITS][64 * D];
    alignas(1024) uint16_t q[STAGES][TILE * D];
    alignas(16) float norm[NORMS][TILE];
    uint64_t k_full[2], k_empty[2], q_full[STAGES], q_empty[STAGES];
    int item[2];
};

// Chunks of 256 keys that some query sees, longest first, one query head after the other: its queries stay in L2.
__host__ __device__ __forceinline__ int chunk_count(const column_args &a) {
    const int keys = a.n_token - a.window;
    return keys > 0 ? (keys + 64 * UNITS - 1) / (64 * UNITS) : 0;
}

template <class T, int D, column_form FORM>
__global__ __launch_bounds__(THREADS,
                             1) void column_hopper(const __grid_constant__ CUtensorMap q_map,
                                                   const __grid_constant__ CUtensorMap k_map,
                                                   const column_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    column_shared<D> &s = *reinterpret_cast<column_shared<D> *>(raw);
    const int group = a.n_q_head / a.n_kv_head, chunks = chunk_count(a);
    const int items = chunks * a.n_q_head, tiles = (a.n_token + TILE - 1) / TILE;
    const int team = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            barrier_init(&s.k_full[i], 1), barrier_init(&s.k_empty[i], 4 * UNITS);
        for (int i = 0; i < STAGES; i++)
            barrier_init(&s.q_full[i], 1), barrier_init(&s.q_empty[i], 4 * UNITS);
        barrier_init_fence();
    }
    __syncthreads();
    ring<2> kr;
    ring<STAGES> qr;
    ring<NORMS> nr;
    if (team == UNITS) {
        registers_shrink<32>();
        if (threadIdx.x % 128 != 0) return;
        for (;; kr.next()) {
            const int i = atomicAdd(a.next, 1);
            barrier_wait(&s.k_empty[kr.slot], kr.parity ^ 1);
            s.item[kr.slot] = i;
            if (i >= items) {
                barrier_arrive(&s.k_full[kr.slot]);
                barrier_wait(&s.k_empty[kr.slot], kr.parity); // all have seen the end
                break;
            }
            const int head = i / chunks, t0 = i % chunks * 64 * UNITS;
            barrier_expect(&s.k_full[kr.slot], UNITS * 64 * D * 2);
            for (int v = 0; v < UNITS; v++)
                load_tile(s.k[kr.slot][v], &k_map, t0 + 64 * v, head / group, &s.k_full[kr.slot]);
            for (int j = (t0 + a.window) / TILE; j < tiles; j++, qr.next(), nr.next()) {
                // Who has multiplied with the tile that this one replaces is done with the normalisers of the tile before it.
                barrier_wait(&s.q_empty[qr.slot], qr.parity ^ 1);
                barrier_expect(&s.q_full[qr.slot], TILE * D * 2 + TILE * 4);
                load_tile(s.q[qr.slot], &q_map, j * TILE, head, &s.q_full[qr.slot]);
                load_bytes(s.norm[nr.slot],
                           a.norm + (size_t)head * (size_t)a.n_padded + (size_t)(j * TILE),
                           TILE * 4, &s.q_full[qr.slot]);
            }
        }
    } else {
        registers_grow<112>();
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * 16 + lane / 4;
        if (team == UNITS - 1) turn_pass(1);
        for (;; kr.next()) {
            barrier_wait(&s.k_full[kr.slot], kr.parity);
            // Only the lane that says when the slot is free reads it.
            const int i = uniform(lane == 0 ? s.item[kr.slot] : 0);
            if (i >= items) break;
            const int chunk = i % chunks * 64 * UNITS, head = i / chunks;
            const int t0 = chunk + team * 64,
                      t = t0 + line; // first key of this warpgroup, key of row 0
            const uint64_t keys = tile_k_major(s.k[kr.slot][team]);
            column_row row[2] = {start<FORM>(a, head, t), start<FORM>(a, head, t + 8)};
            for (int j = (chunk + a.window) / TILE; j < tiles; j++, qr.next(), nr.next()) {
                float x[64];
                barrier_wait(&s.q_full[qr.slot], qr.parity);
                turn_wait(team + 1);
                tile_product<T, D>(x, keys, tile_k_major(s.q[qr.slot]));
                turn_pass((team + 1) % UNITS + 1);
                mma_wait<0>();
                pin(x);
                __syncwarp();
                if (lane == 0) barrier_arrive(&s.q_empty[qr.slot]);
                const int first = j * TILE, query = first + 2 * (lane % 4);
                const float *norm = s.norm[nr.slot] + 2 * (lane % 4);
                if (first >= t0 + 63 + a.window)
                    add_tile<FORM, false>(x, row, a, norm, query, t);
                else if (first + TILE - 1 >= t0 + a.window)
                    add_tile<FORM, true>(x, row, a, norm, query, t);
            }
            if (lane == 0) barrier_arrive(&s.k_empty[kr.slot]);
            finish<FORM>(row[0], a, head, t);
            finish<FORM>(row[1], a, head, t + 8);
        }
        if (lane == 0) barrier_arrive(&s.k_empty[kr.slot]);
    }
#endif
}

template <class T, int D, column_form FORM> kv_status launch(const kv_gpu_span *s, column_args a) {
    kv_gpu *g = s->gpu;
    if constexpr (sizeof(T) == 2) {
        if (g->hopper && s->softcap == 0 && s->scale > 0) {
            const int items = chunk_count(a) * a.n_q_head;
            if (items == 0) return KV_OK;
            CUtensorMap q_map, k_map;
            kv_scratch next;
            const size_t bytes = sizeof(column_shared<D>);
            KV_RETURN(kv_tile_map(s, s->q, s->n_q_head, TILE, &q_map));
            KV_RETURN(kv_tile_map(s, s->k, s->n_kv_head, 64, &k_map));
            KV_RETURN(next.reserve_zeros(g, sizeof(int)));
            a.next = next.as<int>();
            KV_RETURN(kv_allow_shared(g, column_hopper<T, D, FORM>, bytes));
            column_hopper<T, D, FORM>
                <<<min(g->sm_count, items), THREADS, bytes, g->stream>>>(q_map, k_map, a);
            KV_CUDA(cudaGetLastError());
            return KV_OK;
        }
    }
    a.unit = FORM == SUM ? a.power * KV_LOG2E : KV_LOG2E;
    return portable::launch_rows<T, D>(s, 1, column_portable<T, D, FORM>, kv_data<T>(s->q),
                                       kv_data<T>(s->k), a);
}

template <column_form FORM, class T>
kv_status launch_size(const kv_gpu_span *s, const column_args &a) {
    return s->head_dim == 64 ? launch<T, 64, FORM>(s, a) : launch<T, 128, FORM>(s, a);
}
template <column_form FORM> kv_status launch_type(const kv_gpu_span *s, const column_args &a) {
    if (s->type == KV_F16) return launch_size<FORM, __half>(s, a);
    if (s->type == KV_BF16) return launch_size<FORM, __nv_bfloat16>(s, a);
    return launch_size<FORM, float>(s, a);
}

// m reduced over the group, divided by the number of later queries, to r = log(eps + m) (kv_target_mass, kv_target_log).
__global__ void target_kernel(const double *column, float *r, int n, int group, int window,
                              bool maximum, bool mean, double eps) {
    const int t = (int)(blockIdx.x * blockDim.x + threadIdx.x), kv = (int)blockIdx.y;
    if (t >= n) return;
    double m = 0;
    for (int i = 0; i < group; i++) {
        const double x = column[((size_t)kv * (size_t)group + (size_t)i) * (size_t)n + (size_t)t];
        m = mean ? m + x : fmax(m, x);
    }
    if (mean) m /= group;
    if (!maximum) m /= max(1, n - t - window);
    r[(size_t)kv * (size_t)n + (size_t)t] = (float)log(eps + m);
}

} // namespace

kv_status kv_gpu_column(const kv_gpu_span *s, int32_t window, double power,
                        const kv_gpu_buffer *lse, bool sparse, kv_gpu_buffer *column) {
    kv_gpu *g = s->gpu;
    const size_t cells = (size_t)s->n_q_head * (size_t)s->n_token;
    const bool maximum = std::isinf(power),
               direct = !maximum && !sparse && power >= 1 && power <= 2;
    if (window < 1 || !(power > 0))
        return KV_FAIL(KV_E_USAGE, "kv_gpu_column: window %d, power %g; both must be positive",
                       window, power);
    KV_RETURN(kv_buffer_check(lse, "lse", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(column, "column", cells, sizeof(double)));
    column_args a = {};
    a.n_token = s->n_token;
    a.n_padded = kv_div_up(s->n_token, TILE) * TILE;
    a.n_q_head = s->n_q_head;
    a.n_kv_head = s->n_kv_head;
    a.window = window;
    a.power = maximum ? 1.0f : (float)power;
    a.scale = s->scale;
    a.softcap = s->softcap;
    a.unit = s->scale * KV_LOG2E * (direct ? a.power : 1.0f);
    a.column = kv_data<double>(column);
    kv_scratch norm, top;
    KV_RETURN(norm.reserve(g, (size_t)s->n_q_head * (size_t)a.n_padded * sizeof(float)));
    a.norm = norm.as<float>();
    norm_kernel<<<dim3((unsigned)kv_div_up(a.n_padded, 256), (unsigned)s->n_q_head), 256, 0,
                  g->stream>>>(kv_data<float>(lse), norm.as<float>(), a.n_token, a.n_padded,
                               direct ? power : 1.0);
    KV_CUDA(cudaGetLastError());
    // Keys that no query sees are left out by the passes below.
    KV_CUDA(cudaMemsetAsync(column->data, 0, cells * sizeof(double), g->stream));
    if (direct) return launch_type<SUM>(s, a);
    KV_RETURN(top.reserve(g, cells * sizeof(float)));
    a.top = top.as<float>();
    KV_CUDA(cudaMemsetAsync(top.buffer->data, 0xff, cells * sizeof(float), g->stream));
    KV_RETURN(launch_type<MAXIMUM>(s, a));
    return maximum ? KV_OK : launch_type<SHIFTED>(s, a);
}

kv_status kv_gpu_target(const kv_gpu_span *s, int32_t window, bool maximum, bool mean, double eps,
                        const kv_gpu_buffer *column, kv_gpu_buffer *r) {
    KV_RETURN(kv_buffer_check(column, "column", (size_t)s->n_q_head * (size_t)s->n_token, 8));
    KV_RETURN(kv_buffer_check(r, "r", (size_t)s->n_kv_head * (size_t)s->n_token, 4));
    target_kernel<<<dim3((unsigned)kv_div_up(s->n_token, 256), (unsigned)s->n_kv_head), 256, 0,
                    s->gpu->stream>>>(kv_data<double>(column), kv_data<float>(r), s->n_token,
                                      s->n_q_head / s->n_kv_head, window, maximum, mean, eps);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
