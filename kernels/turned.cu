// Attention under evict_at with every key turned to its place in the cache (streaming pos=cache; kv_masked_request.rerotate).
//
// Rotations compose: against its recorded logit, key t of query u is turned by delta = (position of u - position of t) - (kept keys
// behind t). Keys with delta 0 (for streaming all but the sinks) take their logit from the tensor cores; the others are computed
// again one by one, from the query and key tiles and a table of angles. Lists are in order of time and walked from their end, so
// that the number of keys behind is known. mma.sync on every GPU: what binds is as in attend_portable while few keys are turned.
#include <algorithm>

#include "kernels/attend_portable.cuh"

namespace {

using namespace attend;

constexpr size_t TABLE_BYTES = (size_t)1 << 30;
constexpr int THREADS = portable::THREADS, TILE = portable::COLUMNS;

struct turned_args {
    attend_args attend;  // block: of an ordered plan
    const int *position; // [n_token], NULL: 0..n_token-1
    const float2 *angle; // [..][half] cos and sin, of delta = low, low + 1, ...
    int half, low;
};

struct seen_key { // visible from `born` up to but excluding `gone`
    int born, gone, place, unused;
};

__device__ __forceinline__ int place_of(const turned_args &a, int t) {
    return a.position ? a.position[t] : t;
}

// Column of element i of a thread in the accumulator layout (rows.cuh).
__device__ __forceinline__ int column_of(int i, int lane) {
    return i / 4 * 8 + 2 * (lane % 4) + i % 2;
}
__device__ __forceinline__ uint32_t quad_or(uint32_t x) {
    x |= __shfl_xor_sync(~0u, x, 1);
    return x | __shfl_xor_sync(~0u, x, 2);
}

// q.k with k turned back by the angle: [half] cos and sin.
template <class T>
__device__ float turned_product(const T *q, const T *k, const float2 *angle, int half) {
    float even = 0, odd = 0;
#pragma unroll 1
    for (int c = 0; c < half; c++) {
        const float x = (float)q[c], y = (float)q[c + half], v = (float)k[c],
                    w = (float)k[c + half];
        const float2 by = angle[c];
        even = fmaf(by.x, fmaf(x, v, y * w), even);
        odd = fmaf(by.y, y * v - x * w, odd);
    }
    return even + odd;
}

// One block per (64 queries, query head).
template <class T, int D>
__global__ __launch_bounds__(THREADS, 1) void turned_kernel(const T *q, const T *k, const T *v,
                                                            turned_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    __shared__ alignas(16) seen_key seen[2][TILE];
    const attend_args &b = a.attend;
    const query_block<T, D> own(shared, q, k, v, b);
    constexpr int tile = own.tile, stage_count = own.stages, pitch = row_stride<T>(D);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, u = own.u, tiles = own.tiles;
    const T *sq = own.sq, *sk = own.sk, *sv = own.sv;
    auto load_keys = [&](int j) {
        own.load(j);
        if (threadIdx.x >= TILE) return;
        const int t = own.key(j, (int)threadIdx.x);
        const int2 limit = own.keys.limits(t);
        seen[j % stage_count][threadIdx.x] =
            seen_key{limit.x, limit.y, t < 0 ? 0 : place_of(a, t), 0};
    };
    if (stage_count == 2 && tiles > 0) load_keys(tiles - 1);
    copy_commit();
    attend_row row[2] = {start(KV_LOG2E), start(KV_LOG2E)};
    int behind[2] = {0, 0}; // keys that the rows keep in the tiles behind
    const int place[2] = {u < b.n_token ? place_of(a, u) : 0,
                          u + 8 < b.n_token ? place_of(a, u + 8) : 0};
    float o[D / 2] = {};
    for (int j = tiles - 1; j >= 0; j--) {
        const int ahead = stage_count == 2 ? j - 1 : j, stage = j % stage_count;
        if (ahead >= 0) load_keys(ahead);
        copy_commit();
        copy_wait<stage_count - 1>();
        __syncthreads();
        float x[TILE / 2];
        product<T, D>(x, sq + warp * 16 * pitch, sk + stage * tile);
        uint32_t held[2][2] =
            {};          // keys of the tile that the rows see: the thread's own, one bit each
        uint64_t all[2]; // and those of the whole row
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int r = i / 2 % 2, column = column_of(i, lane), query = u + 8 * r;
            const seen_key key = seen[stage][column];
            if (query < b.n_token && key.born <= query && query < key.gone)
                held[r][i / 16] |= 1u << column % 32;
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
            all[r] = (uint64_t)quad_or(held[r][1]) << 32 | quad_or(held[r][0]);
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int r = i / 2 % 2, column = column_of(i, lane);
            if (!(held[r][i / 16] >> column % 32 & 1)) continue;
#ifdef KV_BREAK_TURN
            const int after = behind[r] + __popcll(all[r] >> column);
#else
            const int after = behind[r] + __popcll(all[r] >> column >> 1);
#endif
            const int delta = place[r] - seen[stage][column].place - after;
            if (delta != 0)
                x[i] = turned_product(sq + (warp * 16 + lane / 4 + 8 * r) * pitch,
                                      sk + stage * tile + column * pitch,
                                      a.angle + (size_t)(delta - a.low) * (size_t)a.half, a.half);
        }
        to_logits(x, b.scale, b.softcap);
#pragma unroll
        for (int i = 0; i < TILE / 2; i++)
            if (!(held[i / 2 % 2][i / 16] >> column_of(i, lane) % 32 & 1)) x[i] = -INFINITY;
        behind[0] += __popcll(all[0]);
        behind[1] += __popcll(all[1]);
        weigh(x, row[0], 0, KV_LOG2E, KV_NEAR, 0);
        weigh(x, row[1], 1, KV_LOG2E, KV_NEAR, 0);
        fade_rows(o, row[0].fade, row[1].fade);
        accumulate<T, D>(o, x, sv + stage * tile, true);
        __syncthreads();
    }
    finish(row[0], o, 0, b, own.head, u);
    finish(row[1], o, 1, b, own.head, u + 8);
}

// cos and sin of (low + i) * inv_freq, rounded from double as on the CPU.
__global__ void angle_kernel(const double *inv_freq, int half, int low, int64_t count,
                             float2 *angle) {
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (i >= count) return;
    double s, c;
    sincos((double)(low + i / half) * inv_freq[i % half], &s, &c);
    angle[i] = make_float2((float)c, (float)s);
}

// Every delta that can occur lies in [*low, *high]: between 0 and u - t keys are kept behind t.
void bound_deltas(const int32_t *position, int32_t n, int64_t *low, int64_t *high) {
    *low = 0;
    *high = position ? 0 : n - 1;
    int64_t ahead = INT64_MIN, least = INT64_MAX; // max of position - t, min of position, so far
    for (int64_t t = 0; position && t < n; t++) {
        ahead = std::max(ahead, position[t] - t);
        least = std::min<int64_t>(least, position[t]);
        *low = std::min(*low, position[t] - t - ahead);
        *high = std::max(*high, position[t] - least);
    }
}

template <class T, int D> kv_status launch(const kv_gpu_span *s, const turned_args &a) {
    return portable::launch_rows<T, D>(s, 2, turned_kernel<T, D>, kv_data<T>(s->q),
                                       kv_data<T>(s->k), kv_data<T>(s->v), a);
}

template <class T> kv_status launch_size(const kv_gpu_span *s, const turned_args &a) {
    return s->head_dim == 64 ? launch<T, 64>(s, a) : launch<T, 128>(s, a);
}

kv_status run(const kv_gpu_span *s, const kv_gpu_plan *plan, const int32_t *position,
              const double *inv_freq, float *o, float *lse) {
    kv_gpu *g = s->gpu;
    const int32_t n = s->n_token, half = s->head_dim_in / 2;
    kv_scratch places, frequencies, angles;
    int64_t low, high;
    bound_deltas(position, n, &low, &high);
    const int64_t count = (high - low + 1) * half;
    if ((size_t)count * sizeof(float2) > TABLE_BYTES)
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "pos=cache: positions lie up to %lld apart, whose angles take more than %zu "
                       "bytes on the GPU; run with --device cpu",
                       (long long)(high - low), TABLE_BYTES);
    KV_RETURN(frequencies.reserve(g, (size_t)half * sizeof(double)));
    KV_RETURN(kv_gpu_put(frequencies.buffer, inv_freq, (size_t)half * sizeof(double)));
    KV_RETURN(angles.reserve(g, (size_t)count * sizeof(float2)));
    angle_kernel<<<(unsigned)((count + 255) / 256), 256, 0, g->stream>>>(
        frequencies.as<double>(), half, (int)low, count, angles.as<float2>());
    KV_CUDA(cudaGetLastError());
    KV_RETURN(places.reserve(g, (size_t)n * sizeof(int32_t)));
    if (position) KV_RETURN(kv_gpu_put(places.buffer, position, (size_t)n * sizeof(int32_t)));
    turned_args a = {};
    a.attend.n_token = n;
    a.attend.n_q_head = s->n_q_head;
    a.attend.n_kv_head = s->n_kv_head;
    a.attend.n_block = plan->n_block;
    a.attend.head_dim_out = s->head_dim_in;
    a.attend.scale = s->scale;
    a.attend.softcap = s->softcap;
    a.attend.block = kv_data<kept_block>((const kv_gpu_buffer *)plan->block);
    a.attend.list = kv_data<int>((const kv_gpu_buffer *)plan->list);
    a.attend.evict_at = kv_data<int>((const kv_gpu_buffer *)plan->evict_at);
    a.attend.o = o;
    a.attend.lse = lse;
    a.position = position ? places.as<int>() : nullptr;
    a.angle = angles.as<float2>();
    a.half = half;
    a.low = (int)low;
    if (s->type == KV_F16) return launch_size<__half>(s, a);
    if (s->type == KV_BF16) return launch_size<__nv_bfloat16>(s, a);
    return launch_size<float>(s, a);
}

} // namespace

kv_status kv_gpu_attend_turned(const kv_gpu_span *s, const kv_gpu_buffer *evict_at,
                               const int32_t *position, const double *inv_freq, kv_gpu_buffer *o,
                               kv_gpu_buffer *lse) {
    const size_t cells = (size_t)s->n_q_head * (size_t)s->n_token;
    KV_RETURN(kv_buffer_check(o, "o", cells * (size_t)s->head_dim_in, sizeof(float)));
    KV_RETURN(kv_buffer_check(lse, "lse", cells, sizeof(float)));
    if (!s->v) return KV_FAIL(KV_E_USAGE, "kv_gpu_attend_turned: the span was uploaded without v");
    if (!inv_freq || s->head_dim_in % 2)
        return KV_FAIL(KV_E_DATA,
                       "head size %d: re-rotating keys (pos=cache) needs an even head size and the "
                       "RoPE frequencies of the trace (/model/inv_freq or rope_theta)",
                       s->head_dim_in);
    kv_gpu_plan *plan = nullptr;
    KV_RETURN(kv_plan_ordered_new(s->gpu, s->n_kv_head, s->n_token, evict_at, &plan));
    const kv_status st = run(s, plan, position, inv_freq, kv_data<float>(o), kv_data<float>(lse));
    kv_gpu_plan_free(plan);
    return st;
}
