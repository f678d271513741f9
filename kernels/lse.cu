// Dense log-sum-exp of every query, with the mass and the largest probability of the long range E(u) (kv_dense_compute's rows).
//
// Queries are the stationary side. A thread sums the terms of its 32 columns of a row relative to an exponent of its own; nothing
// crosses lanes until the end. That exponent is no running maximum: it moves only when a tile's sum gets large, and the tile, whose
// logits are still there, is then summed again. The largest long-range logit and its key are looked for only in tiles with a pair of
// terms that could hold it.
#include <climits>

#include "kernels/hopper.cuh"
#include "kernels/portable.cuh"
#include "kernels/rows.cuh"

namespace {

struct lse_args {
    int n_token, n_q_head, n_kv_head, sinks, window;
    float unit; // raw logit -> binary exponent
    float scale, softcap;
    float *lse, *long_mass, *top_p;
    int *top_t;
    int *next; // work counter
};

// One row of one thread.
struct lse_row {
    float shift;     // binary exponent that every term is relative to; terms stay below LIMIT
    float near, far; // sums over keys outside and inside E(u)
    float top, bar;  // largest logit over E(u), the quad's; terms below bar are no larger
    int at;          // key of top if this thread holds it
};

constexpr float LIMIT = 0x1p15f; // of a sum: exponents that are larger lose bits
constexpr float SMALLEST = 0x1p-126f;

__device__ __forceinline__ lse_row start(float unit) {
    return lse_row{KV_LOW * unit, 0, 0, -INFINITY, SMALLEST, INT_MAX};
}

// Key column of element i of a thread, relative to the thread's first.
__device__ __forceinline__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

// Of the terms of a tile, for each row of a thread: their sum, and the largest sum of two neighbours. Bits of floats that are not
// negative compare as integers, three at a time.
struct tile_sum {
    float sum[2] = {0, 0};
    uint32_t pair[2] = {0, 0};
};

template <bool EVENTS, int N>
__device__ __forceinline__ void add_terms(const float (&x)[N], const lse_row (&row)[2], float unit,
                                          tile_sum &t) {
#pragma unroll
    for (int j = 0; j < N / 4; j += 2)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float pair[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = 4 * (j + i) + 2 * r;
                pair[i] = kv_exp2(fmaf(x[at], unit, -row[r].shift)) +
                          kv_exp2(fmaf(x[at + 1], unit, -row[r].shift));
            }
            t.sum[r] += pair[0] + pair[1];
            if (EVENTS)
                t.pair[r] =
                    __vimax3_u32(t.pair[r], __float_as_uint(pair[0]), __float_as_uint(pair[1]));
        }
}

__device__ __forceinline__ float bar_of(const lse_row &s, float unit) {
    return fmaxf(kv_exp2(fmaf(s.top, unit, -s.shift)) * 0.99999f, SMALLEST);
}

// Raises the shifts to the tile's maxima and forms its terms again.
template <bool EVENTS, int N>
__device__ __forceinline__ void raise(const float (&x)[N], lse_row (&row)[2], float unit,
                                      tile_sum &t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        lse_row &s = row[r];
        const float shift = fmaxf(s.shift, kv_row_max(x, r) * unit),
                    fade = kv_exp2(s.shift - shift);
        s.shift = shift;
        s.near *= fade;
        s.far *= fade;
        if (EVENTS) s.bar = bar_of(s, unit);
    }
    t = tile_sum();
    add_terms<EVENTS>(x, row, unit, t);
}

// A tile that lies in every E(u) and whose pairs pass the bar: is one of its logits the row's largest?
template <int N>
__device__ __forceinline__ void look(const float (&x)[N], lse_row &s, int r, float unit, int key) {
    const float best = kv_quad_max(kv_row_max(x, r));
    if (!__any_sync(~0u, best > s.top)) return;
    int at = INT_MAX;
#pragma unroll
    for (int j = N / 4 - 1; j >= 0; j--) {
        if (x[4 * j + 2 * r + 1] == best) at = key + column_of(4 * j + 1);
        if (x[4 * j + 2 * r] == best) at = key + column_of(4 * j);
    }
    if (best > s.top) s.top = best, s.at = at;
    s.bar = bar_of(s, unit);
}

// Adds a tile whose invisible keys are -INFINITY. key: of the thread's element 0; u: query of row 0.
template <bool EVENTS, int N>
__device__ __forceinline__ void add_tile(const float (&x)[N], lse_row (&row)[2], float unit,
                                         int key, int u, kv_zone zone, int sinks, int window) {
    tile_sum t;
    add_terms<EVENTS>(x, row, unit, t);
    const bool high = fmaxf(t.sum[0], t.sum[1]) >= LIMIT;
    const bool far = EVENTS && zone == KV_FAR;
    const bool passes = far && (t.pair[0] >= __float_as_uint(row[0].bar) ||
                                t.pair[1] >= __float_as_uint(row[1].bar));
    if (__any_sync(~0u, high || passes)) {
        if (__any_sync(~0u, high)) raise<EVENTS>(x, row, unit, t);
        if (far)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (__any_sync(~0u, t.pair[r] >= __float_as_uint(row[r].bar)))
                    look(x, row[r], r, unit, key);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        lse_row &s = row[r];
        if (far) {
            s.far += t.sum[r];
            continue;
        }
        s.near += t.sum[r];
        if (!EVENTS || zone != KV_MIXED) continue;
        const int from = sinks - key, to = u + 8 * r - window - key; // columns inside E(u)
        float best = -INFINITY, inside = 0;
        int at = INT_MAX;
#pragma unroll
        for (int j = 0; j < N / 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int column = column_of(4 * j + c);
                const float y = x[4 * j + 2 * r + c];
                if (column < from || column > to) continue;
                inside += kv_exp2(fmaf(y, unit, -s.shift));
                if (y > best) best = y, at = key + column;
            }
        s.far += inside;
        s.near -= inside;
        const float top = kv_quad_max(best);
        if (top > s.top) s.top = top, s.at = best == top ? at : INT_MAX;
        s.bar = bar_of(s, unit);
    }
}

// Joins the four threads of a row and writes it.
template <bool EVENTS>
__device__ __forceinline__ void finish(const lse_row &s, const lse_args &a, int head, int u) {
    const float shift = kv_quad_max(s.shift), fade = kv_exp2(s.shift - shift);
    const float near = kv_quad_sum(s.near * fade), far = kv_quad_sum(s.far * fade);
    const int at = kv_quad_min(s.at);
    if (threadIdx.x % 4 || u >= a.n_token) return;
    const size_t i = (size_t)head * (size_t)a.n_token + (size_t)u;
    const float sum = near + far;
    a.lse[i] = (float)(((double)shift + log2((double)sum)) * KV_LN2);
    if (!EVENTS) return;
    const float p = kv_exp2(fmaf(s.top, a.unit, -shift)) / sum;
    a.long_mass[i] = far / sum;
    // Where all of E(u) underflows, every p is 0 and the smallest key is the largest.
    a.top_p[i] = p >= 0x1p-126f ? p : 0;
    a.top_t[i] = u - a.window < a.sinks ? -1 : p >= 0x1p-126f ? at : a.sinks;
}

template <int N> __device__ __forceinline__ void hide_future(float (&x)[N], int key, int u) {
#ifdef KV_BREAK_LSE
    u--;
#endif
#pragma unroll
    for (int i = 0; i < N; i++)
        if (key + column_of(i) > u + (i & 2) * 4) x[i] = -INFINITY;
}

// ---- mma.sync: one block per (64 queries, head) ----

template <class T, int D, bool EVENTS>
__global__ __launch_bounds__(portable::THREADS, 2) void lse_portable(const T *q, const T *k,
                                                                     lse_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    constexpr int tile = tile_elements<T>(D), stage_count = stages<T>();
    T *sq = reinterpret_cast<T *>(shared), *sk = sq + tile;
    const int block = (int)(gridDim.x - 1 - blockIdx.x), head = (int)blockIdx.y;
    const int u0 = block * ROWS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const size_t plane = (size_t)a.n_token * D;
    q += (size_t)head * plane;
    k += (size_t)(head / (a.n_q_head / a.n_kv_head)) * plane;
    const int u = u0 + warp * 16 + lane / 4;
    auto inside = [&](int first) {
        return [first, &a](int r) { return first + r < a.n_token ? first + r : -1; };
    };
    load_rows<T, D>(sq, q, inside(u0));
    if (stage_count == 2) load_rows<T, D>(sk, k, inside(0));
    copy_commit();
    lse_row row[2] = {start(KV_LOG2E), start(KV_LOG2E)};
    for (int j = 0; j <= block; j++) {
        const int ahead = stage_count == 2 ? j + 1 : j;
        if (ahead <= block)
            load_rows<T, D>(sk + ahead % stage_count * tile, k, inside(ahead * COLUMNS));
        copy_commit();
        copy_wait<stage_count - 1>();
        __syncthreads();
        float x[COLUMNS / 2];
        product<T, D>(x, sq + warp * 16 * row_stride<T>(D), sk + j % stage_count * tile);
        __syncthreads();
        to_logits(x, a.scale, a.softcap);
        const int key = j * COLUMNS + 2 * (lane % 4);
        if (j == block) hide_future(x, key, u);
        add_tile<EVENTS>(x, row, KV_LOG2E, key, u,
                         kv_zone_of(j * COLUMNS, COLUMNS, u0, ROWS, a.sinks, a.window), a.sinks,
                         a.window);
    }
    finish<EVENTS>(row[0], a, head, u);
    finish<EVENTS>(row[1], a, head, u + 8);
}

// ---- wgmma: persistent blocks of four consumer warpgroups and a producer ----
//
// A unit is (64 queries, query head). An item is four consecutive units of one KV head (query head fastest), so heads of a group
// share the stream of keys. Each consumer warpgroup owns one unit: its product, then its exponentials, while the other three are at
// theirs. Products go by turns: without order all four would now and then multiply at once and then all wait for exponentials.

constexpr int UNITS = 4, TILE = 128, STAGES = 3, THREADS = 128 * (UNITS + 1);

template <int D> struct lse_shared {
    alignas(1024) uint16_t q[2][UNITS][64 * D];
    alignas(1024) uint16_t k[STAGES][TILE * D];
    uint64_t q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES];
    int item[2];
};

struct lse_item {
    int kv, first_unit, n_tile;
};

// Items of one KV head in descending length, one KV head after the other: its keys stay in L2.
__device__ __forceinline__ lse_item item_of(int i, const lse_args &a) {
    const int group = a.n_q_head / a.n_kv_head, units = (a.n_token + 63) / 64 * group;
    const int chunks = (units + UNITS - 1) / UNITS;
    const int chunk = chunks - 1 - i % chunks, last = min(chunk * UNITS + UNITS, units) - 1;
    return lse_item{i / chunks, chunk * UNITS, last / group / 2 + 1};
}
__host__ __device__ __forceinline__ int item_count(const lse_args &a) {
    const int group = a.n_q_head / a.n_kv_head, units = (a.n_token + 63) / 64 * group;
    return (units + UNITS - 1) / UNITS * a.n_kv_head;
}

template <class T, int D, bool EVENTS>
__global__ __launch_bounds__(THREADS, 1) void lse_hopper(const __grid_constant__ CUtensorMap q_map,
                                                         const __grid_constant__ CUtensorMap k_map,
                                                         const lse_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    lse_shared<D> &s = *reinterpret_cast<lse_shared<D> *>(raw);
    const int group = a.n_q_head / a.n_kv_head, units = (a.n_token + 63) / 64 * group;
    const int items = item_count(a), team = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++)
            barrier_init(&s.q_full[i], 1), barrier_init(&s.q_empty[i], 4 * UNITS);
        for (int i = 0; i < STAGES; i++)
            barrier_init(&s.k_full[i], 1), barrier_init(&s.k_empty[i], 4 * UNITS);
        barrier_init_fence();
    }
    __syncthreads();
    ring<2> qr;
    ring<STAGES> kr;
    if (team == UNITS) {
        registers_shrink<32>();
        if (threadIdx.x % 128 != 0) return;
        for (;; qr.next()) {
            const int i = atomicAdd(a.next, 1);
            barrier_wait(&s.q_empty[qr.slot], qr.parity ^ 1);
            s.item[qr.slot] = i;
            if (i >= items) {
                barrier_arrive(&s.q_full[qr.slot]);
                barrier_wait(&s.q_empty[qr.slot], qr.parity); // all have seen the end
                break;
            }
            const lse_item m = item_of(i, a);
            const int valid = min(UNITS, units - m.first_unit);
            barrier_expect(&s.q_full[qr.slot], (uint32_t)(valid * 64 * D * 2));
            for (int v = 0; v < valid; v++) {
                const int unit = m.first_unit + v;
                load_tile(s.q[qr.slot][v], &q_map, unit / group * 64, m.kv * group + unit % group,
                          &s.q_full[qr.slot]);
            }
            for (int j = 0; j < m.n_tile; j++, kr.next()) {
                barrier_wait(&s.k_empty[kr.slot], kr.parity ^ 1);
                barrier_expect(&s.k_full[kr.slot], TILE * D * 2);
                load_tile(s.k[kr.slot], &k_map, j * TILE, m.kv, &s.k_full[kr.slot]);
            }
        }
    } else {
        registers_grow<112>();
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % 4 * 16 + lane / 4;
        const int column = 2 * (lane % 4);
        if (team == UNITS - 1) turn_pass(1);
        for (;; qr.next()) {
            barrier_wait(&s.q_full[qr.slot], qr.parity);
            // Only the lane that says when the slot is free reads it.
            const int i = uniform(lane == 0 ? s.item[qr.slot] : 0);
            if (i >= items) break;
            const lse_item m = item_of(i, a);
            const int unit = m.first_unit + team, n_tile = uniform(m.n_tile);
            // A unit behind the last works on nothing: every tile lies behind its last query, -1.
            const int u0 = unit < units ? unit / group * 64 : -64, u = u0 + line;
            const uint64_t query = tile_k_major(s.q[qr.slot][team]);
            lse_row row[2] = {start(a.unit), start(a.unit)};
            for (int j = 0; j < n_tile; j++, kr.next()) {
                float x[64];
                barrier_wait(&s.k_full[kr.slot], kr.parity);
                turn_wait(team + 1);
                tile_product<T, D>(x, query, tile_k_major(s.k[kr.slot]));
                turn_pass((team + 1) % UNITS + 1);
                mma_wait<0>();
                pin(x);
                if (lane == 0) barrier_arrive(&s.k_empty[kr.slot]);
                const int first = j * TILE, key = first + column;
                if (first > u0 + 63) continue;
                if (first + TILE - 1 > u0) hide_future(x, key, u);
                add_tile<EVENTS>(x, row, a.unit, key, u,
                                 kv_zone_of(first, TILE, u0, 64, a.sinks, a.window), a.sinks,
                                 a.window);
            }
            if (lane == 0) barrier_arrive(&s.q_empty[qr.slot]);
            if (u0 < 0) continue;
            const int head = m.kv * group + unit % group;
            finish<EVENTS>(row[0], a, head, u);
            finish<EVENTS>(row[1], a, head, u + 8);
        }
        if (lane == 0) barrier_arrive(&s.q_empty[qr.slot]);
    }
#endif
}

template <class T, int D, bool EVENTS> kv_status launch(const kv_gpu_span *s, lse_args a) {
    kv_gpu *g = s->gpu;
    if constexpr (sizeof(T) == 2) {
        if (g->hopper && s->softcap == 0 && s->scale > 0) {
            CUtensorMap q_map, k_map;
            kv_scratch next;
            const size_t bytes = sizeof(lse_shared<D>);
            KV_RETURN(kv_tile_map(s, s->q, s->n_q_head, 64, &q_map));
            KV_RETURN(kv_tile_map(s, s->k, s->n_kv_head, TILE, &k_map));
            KV_RETURN(next.reserve_zeros(g, sizeof(int)));
            a.next = next.as<int>();
            KV_RETURN(kv_allow_shared(g, lse_hopper<T, D, EVENTS>, bytes));
            lse_hopper<T, D, EVENTS>
                <<<min(g->sm_count, item_count(a)), THREADS, bytes, g->stream>>>(q_map, k_map, a);
            KV_CUDA(cudaGetLastError());
            return KV_OK;
        }
    }
    a.unit = KV_LOG2E; // its logits are scaled
    return portable::launch_rows<T, D>(s, 1, lse_portable<T, D, EVENTS>, kv_data<T>(s->q),
                                       kv_data<T>(s->k), a);
}

template <class T, int D> kv_status launch_events(const kv_gpu_span *s, const lse_args &a) {
    return a.top_t ? launch<T, D, true>(s, a) : launch<T, D, false>(s, a);
}
template <class T> kv_status launch_size(const kv_gpu_span *s, const lse_args &a) {
    return s->head_dim == 64 ? launch_events<T, 64>(s, a) : launch_events<T, 128>(s, a);
}

} // namespace

kv_status kv_gpu_lse(const kv_gpu_span *s, int32_t sinks, int32_t window, kv_gpu_buffer *lse,
                     kv_gpu_buffer *long_mass, kv_gpu_buffer *top_p, kv_gpu_buffer *top_t) {
    const size_t cells = (size_t)s->n_q_head * (size_t)s->n_token;
    const kv_gpu_buffer *all[4] = {lse, long_mass, top_p, top_t};
    for (const kv_gpu_buffer *b : all) KV_RETURN(kv_buffer_check(b, "lse", cells, 4));
    if (!lse || !long_mass != !top_t || !top_p != !top_t)
        return KV_FAIL(KV_E_USAGE, "kv_gpu_lse: lse is missing, or only some of the events");
    lse_args a = {};
    a.n_token = s->n_token;
    a.n_q_head = s->n_q_head;
    a.n_kv_head = s->n_kv_head;
    a.sinks = sinks;
    a.window = window;
    a.scale = s->scale;
    a.softcap = s->softcap;
    a.unit = s->scale * KV_LOG2E;
    a.lse = kv_data<float>(lse);
    a.long_mass = kv_data<float>(long_mass);
    a.top_p = kv_data<float>(top_p);
    a.top_t = kv_data<int>(top_t);
    if (s->type == KV_F16) return launch_size<__half>(s, a);
    if (s->type == KV_BF16) return launch_size<__nv_bfloat16>(s, a);
    return launch_size<float>(s, a);
}
