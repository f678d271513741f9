// Attention forward: dense causal (kv_attend) or under evict_at by gathered key lists (kv_masked_compute), with output and
// log-sum-exps over all visible keys and over those of the long range.
//
// Work follows the lists of kept.cu, not the triangle: blocks of 64 queries share one list, keys that all of them see need no mask.
// Probabilities carry a common factor 2^7..2^15, so that half precision loses nothing to its subnormals; the factor leaves with
// the division by the sum. A row's shift moves only when its maximum has grown by 2^8.
#include <climits>

#include "kernels/hopper.cuh"
#include "kernels/kept.cuh"
#include "kernels/portable.cuh"
#include "kernels/rows.cuh"

namespace {

constexpr float LIFT = 7.0f, SLACK = 8.0f; // binary exponents
constexpr int TILE = 64, STAGES = 4;

struct attend_args {
    int n_token, n_q_head, n_kv_head, n_block, head_dim_out, sinks, window;
    float unit, scale, softcap;
    const kept_block *block; // NULL: dense causal
    const int *list, *evict_at;
    float *o, *lse, *lse_long;
    int *next;
};

// The keys of one block: how many, and how many of the first need no mask.
struct key_list {
    const int *list; // NULL: key i is i
    const int *until;
    int count, far, open; // all; inside every E(u); visible to all queries
    __device__ __forceinline__ int key(int i) const {
        return i >= count ? -1 : list ? __ldg(list + i) : i;
    }
    // Whether a tile of keys [from, to) needs a look at each key: hidden ones, or some inside and some outside E.
    __device__ __forceinline__ bool mixed(int from, int to) const {
        return to > open || (from < far && to > far);
    }
    __device__ __forceinline__ int2 limits(int key) const { // visible from, up to but excluding
        return key < 0 ? make_int2(INT_MAX, 0) : make_int2(key, list ? __ldg(until + key) : INT_MAX);
    }
};

__device__ __forceinline__ key_list keys_of(const attend_args &a, int kv, int block) {
    if (!a.block)
        return key_list{nullptr, nullptr, min((block + 1) * KV_BLOCK, a.n_token), 0,
                        block * KV_BLOCK + 1};
    const kept_block b = a.block[(size_t)kv * (size_t)a.n_block + (size_t)block];
    return key_list{a.list + b.first, a.evict_at + (size_t)kv * (size_t)a.n_token,
                    b.far + b.near + b.part, b.far, b.far + b.near};
}

struct attend_row {
    float shift, fade; // fade: what sums and output are multiplied with before the next tile joins them
    float near, far;
};

// Hides what rows u and u + 8 do not see; inside[r]: which of its elements lie in E, one bit each. limit: shared memory, [columns].
template <int N>
__device__ __forceinline__ void hide(float (&x)[N], uint32_t (&inside)[2], const int2 *limit, int u,
                                     const attend_args &a) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(limit);
    inside[0] = inside[1] = 0;
#ifdef KV_BREAK_ATTEND
    u++;
#endif
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        int t[2], gone[2];
        // Volatile: the compiler would load all limits ahead and run out of registers.
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(t[0]), "=r"(gone[0]), "=r"(t[1]), "=r"(gone[1])
                     : "r"(at + 64 * j)
                     : "memory");
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2, c = i % 2, query = u + 8 * r;
            if (t[c] > query || query >= gone[c]) x[4 * j + i] = -INFINITY;
            if (t[c] >= a.sinks && t[c] <= query - a.window) inside[r] |= 1u << (2 * j + c);
        }
    }
}

// Turns logits of row r into probabilities times 2^(exponent - shift) and adds them to the sums. `inside`: as from hide, used when
// the tile is mixed.
template <int N>
__device__ __forceinline__ void weigh(float (&x)[N], attend_row &s, int r, float unit,
                                      kv_zone zone, uint32_t inside) {
    const float top = kv_quad_max(kv_row_max(x, r)) * unit - LIFT;
    s.fade = 1.0f;
    if (__any_sync(~0u, top > s.shift + SLACK)) {
        const float shift = fmaxf(s.shift, top);
        s.fade = kv_exp2(s.shift - shift);
        s.shift = shift;
        s.near *= s.fade;
        s.far *= s.fade;
    }
    float a = 0, b = 0;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        a += x[4 * j + 2 * r] = kv_exp2(fmaf(x[4 * j + 2 * r], unit, -s.shift));
        b += x[4 * j + 2 * r + 1] = kv_exp2(fmaf(x[4 * j + 2 * r + 1], unit, -s.shift));
    }
    a += b;
    if (zone == KV_FAR)
        s.far += a;
    else
        s.near += a;
    if (zone == KV_MIXED) {
        float in = 0;
#pragma unroll
        for (int j = 0; j < N / 4; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (inside >> (2 * j + c) & 1) in += x[4 * j + 2 * r + c];
        s.far += in;
        s.near -= in;
    }
}

template <int N>
__device__ __forceinline__ void finish(const attend_row &s, const float (&o)[N], int r,
                                       const attend_args &a, int head, int u) {
    const float far = kv_quad_sum(s.far), sum = kv_quad_sum(s.near) + far;
    if (u >= a.n_token) return;
    const size_t i = (size_t)head * (size_t)a.n_token + (size_t)u;
    const int t = threadIdx.x % 4, d = a.head_dim_out;
    if (t == 0 && a.lse)
        a.lse[i] = sum > 0 ? (float)(((double)s.shift + log2((double)sum)) * KV_LN2) : -INFINITY;
    if (t == 0 && a.lse_long)
        a.lse_long[i] =
            far > 0 ? (float)(((double)s.shift + log2((double)far)) * KV_LN2) : -INFINITY;
    if (!a.o) return;
    const float scale = sum > 0 ? 1.0f / sum : 0.0f;
    float *row = a.o + i * (size_t)d + 2 * t;
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        const float p = o[4 * j + 2 * r] * scale, q = o[4 * j + 2 * r + 1] * scale;
        const int c = 8 * j + 2 * t;
        if (d % 2 == 0) {
            if (c < d) *reinterpret_cast<float2 *>(row + 8 * j) = make_float2(p, q);
        } else {
            if (c < d) row[8 * j] = p;
            if (c + 1 < d) row[8 * j + 1] = q;
        }
    }
}

template <int N> __device__ __forceinline__ void fade_rows(float (&o)[N], float f0, float f1) {
    if (!__any_sync(~0u, f0 != 1.0f || f1 != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < N; i++) o[i] *= i & 2 ? f1 : f0;
}

__device__ __forceinline__ attend_row start(float unit) {
    return attend_row{KV_LOW * unit, 1.0f, 0, 0};
}

// ---- mma.sync: one block per (64 queries, query head) ----

template <class T, int D>
__global__ __launch_bounds__(portable::THREADS, 1) void
attend_portable(const T *q, const T *k, const T *v, bool exact, attend_args a) {
    using namespace portable;
    extern __shared__ __align__(16) char shared[];
    constexpr int tile = tile_elements<T>(D), stage_count = stages<T>();
    T *sq = reinterpret_cast<T *>(shared), *sk = sq + tile, *sv = sk + stage_count * tile;
    __shared__ alignas(16) int2 limit[2][COLUMNS];
    const int block = (int)(gridDim.x - 1 - blockIdx.x), head = (int)blockIdx.y;
    const int kv = head / (a.n_q_head / a.n_kv_head);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int u0 = block * ROWS, u = u0 + warp * 16 + lane / 4;
    const size_t plane = (size_t)a.n_token * D;
    const key_list keys = keys_of(a, kv, block);
    const int tiles = (keys.count + COLUMNS - 1) / COLUMNS;
    auto load_keys = [&](int j) {
        const int stage = j % stage_count;
        auto row = [&](int r) { return keys.key(j * COLUMNS + r); };
        load_rows<T, D>(sk + stage * tile, k + (size_t)kv * plane, row);
        load_rows<T, D>(sv + stage * tile, v + (size_t)kv * plane, row);
        if (threadIdx.x < COLUMNS)
            limit[stage][threadIdx.x] = keys.limits(row((int)threadIdx.x));
    };
    load_rows<T, D>(sq, q + (size_t)head * plane,
                    [&](int r) { return u0 + r < a.n_token ? u0 + r : -1; });
    if (stage_count == 2 && tiles > 0) load_keys(0);
    copy_commit();
    attend_row row[2] = {start(KV_LOG2E), start(KV_LOG2E)};
    float o[D / 2] = {};
    for (int j = 0; j < tiles; j++) {
        const int ahead = stage_count == 2 ? j + 1 : j, stage = j % stage_count;
        if (ahead < tiles) load_keys(ahead);
        copy_commit();
        copy_wait<stage_count - 1>();
        __syncthreads();
        float x[COLUMNS / 2];
        product<T, D>(x, sq + warp * 16 * row_stride<T>(D), sk + stage * tile);
        to_logits(x, a.scale, a.softcap);
        uint32_t inside[2];
        hide(x, inside, limit[stage] + 2 * (lane % 4), u, a);
        weigh(x, row[0], 0, KV_LOG2E, KV_MIXED, inside[0]);
        weigh(x, row[1], 1, KV_LOG2E, KV_MIXED, inside[1]);
        fade_rows(o, row[0].fade, row[1].fade);
        accumulate<T, D>(o, x, sv + stage * tile, exact);
        __syncthreads();
    }
    finish(row[0], o, 0, a, head, u);
    finish(row[1], o, 1, a, head, u + 8);
}

// ---- wgmma: persistent blocks of one gathering and two consumer warpgroups ----
//
// An item is (KV head, 64 queries, up to four query heads of the group): 256 rows share what is gathered, else L2 would bind. Each
// consumer warpgroup takes two of the heads in turn. The gathering warpgroup copies the listed rows of K and V into swizzled
// tiles. One warpgroup's exponentials run beside the other's products.

constexpr int HEADS = 4;

template <int D> struct attend_shared {
    alignas(1024) uint16_t q[HEADS][64 * D];
    alignas(1024) uint16_t k[STAGES][TILE * D], v[STAGES][TILE * D];
    alignas(16) int2 limit[STAGES][TILE];
    uint64_t q_full, q_empty;
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    int item;
};

struct attend_item {
    int kv, block, head, heads; // first query head and how many
};

__host__ __device__ __forceinline__ int parts_of(const attend_args &a) {
    return (a.n_q_head / a.n_kv_head + HEADS - 1) / HEADS;
}

// Parts of a group follow each other, long lists first, one KV head after the other: lists and keys stay in L2.
__device__ __forceinline__ attend_item item_of(int i, const attend_args &a) {
    const int group = a.n_q_head / a.n_kv_head, parts = parts_of(a);
    const int kv = i / (a.n_block * parts), rest = i % (a.n_block * parts);
    const int first = rest % parts * HEADS;
    return attend_item{kv, a.n_block - 1 - rest / parts, kv * group + first,
                       min(HEADS, group - first)};
}

template <class T, int D, bool EXACT>
__global__ __launch_bounds__(384, 1) void attend_hopper(const __grid_constant__ CUtensorMap q_map,
                                                        const T *k, const T *v,
                                                        const attend_args a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using namespace hopper;
    extern __shared__ __align__(1024) char raw[];
    attend_shared<D> &s = *reinterpret_cast<attend_shared<D> *>(raw);
    const int team = uniform(threadIdx.x / 128), items = a.n_kv_head * a.n_block * parts_of(a);
    if (threadIdx.x == 0) {
        barrier_init(&s.q_full, 1);
        barrier_init(&s.q_empty, 8);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.k_full[i], 256); // each gathering thread: its copies, its ordinary writes
            barrier_init(&s.v_full[i], 128);
            barrier_init(&s.k_empty[i], 8);
            barrier_init(&s.v_empty[i], 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (team == 0) {
        registers_shrink<40>();
        constexpr int chunks = D / 8, rows = 32 / chunks; // 16-byte chunks of a row, rows per instruction
        ring<1> qr;
        ring<STAGES> kr;
        const int chunk = lane % chunks;
        for (;; qr.next()) {
            if (threadIdx.x == 0) {
                const int i = atomicAdd(a.next, 1);
                barrier_wait(&s.q_empty, qr.parity ^ 1);
                s.item = i < items ? i : -1;
                if (i < items) {
                    const attend_item m = item_of(i, a);
                    barrier_expect(&s.q_full, (uint32_t)(m.heads * 64 * D * 2));
                    for (int h = 0; h < m.heads; h++)
                        load_tile(s.q[h], &q_map, m.block * KV_BLOCK, m.head + h, &s.q_full);
                } else {
                    barrier_arrive(&s.q_full);
                }
            }
            asm volatile("bar.sync 1, 128;" ::: "memory");
            const int i = s.item;
            if (i < 0) break;
            const attend_item m = item_of(i, a);
            const key_list keys = keys_of(a, m.kv, m.block);
            const size_t plane = (size_t)m.kv * (size_t)a.n_token * D + (size_t)chunk * 8;
            const int tiles = max(1, (keys.count + TILE - 1) / TILE);
            constexpr int share = TILE / 4; // rows of a warp
            const int mine = warp * share + lane % share;
            int key = keys.key(mine), next = -1;
            for (int j = 0; j < tiles; j++, kr.next()) {
                if (j + 1 < tiles) next = keys.key((j + 1) * TILE + mine);
                auto gather = [&](uint16_t *to, const T *from) {
#pragma unroll
                    for (int r = 0; r < share; r += rows) {
                        const int line = warp * share + r + lane / chunks;
                        const int t = __shfl_sync(~0u, key, r + lane / chunks);
                        portable::copy16((char *)to + chunk / 8 * (TILE * 128) + line * 128 +
                                             ((chunk % 8 ^ line % 8) << 4),
                                         from + plane + (size_t)max(t, 0) * D, t >= 0);
                    }
                };
                barrier_wait(&s.k_empty[kr.slot], kr.parity ^ 1);
                gather(s.k[kr.slot], k);
                barrier_arrive_after_copies(&s.k_full[kr.slot]);
                if (lane < share && keys.mixed(j * TILE, (j + 1) * TILE))
                    s.limit[kr.slot][mine] = keys.limits(key);
                barrier_arrive(&s.k_full[kr.slot]);
                barrier_wait(&s.v_empty[kr.slot], kr.parity ^ 1);
                gather(s.v[kr.slot], v);
                barrier_arrive_after_copies(&s.v_full[kr.slot]);
                key = next;
            }
            asm volatile("bar.sync 1, 128;" ::: "memory"); // s.item has been read by all
        }
        portable::copy_wait<0>();
    } else {
        registers_grow<232>();
        ring<1> qr;
        ring<STAGES> kr;
        for (;; qr.next()) {
            barrier_wait(&s.q_full, qr.parity);
            const int i = uniform(s.item);
            if (i < 0) break;
            const attend_item m = item_of(i, a);
            key_list keys = keys_of(a, m.kv, m.block);
            const int tiles = uniform(max(1, (keys.count + TILE - 1) / TILE));
            keys.far = uniform(keys.far);
            keys.open = uniform(keys.open);
            const int u = m.block * KV_BLOCK + warp * 16 + lane / 4;
            attend_row row[2][2] = {{start(a.unit), start(a.unit)}, {start(a.unit), start(a.unit)}};
            float o0[D / 2] = {}, o1[D / 2] = {};
            const bool first = team - 1 < m.heads, second = team + 1 < m.heads;
            float x[TILE / 2];
            uint32_t p[TILE / 4], rest[EXACT ? TILE / 4 : 1];
            auto zone_of_tile = [&](int j) {
                if (keys.mixed(j * TILE, (j + 1) * TILE)) return KV_MIXED;
                return (j + 1) * TILE <= keys.far ? KV_FAR : KV_NEAR;
            };
            // x = logits of head h and the tile at kr; issues, does not wait.
            auto logits = [&](int h) {
                tile_product<T, D, TILE>(x, tile_k_major(s.q[2 * h + team - 1]),
                                         tile_k_major(s.k[kr.slot]));
            };
            auto weights = [&](int h, kv_zone zone, uint32_t slot) {
                uint32_t inside[2] = {};
                if (zone == KV_MIXED) hide(x, inside, s.limit[slot] + 2 * (lane % 4), u, a);
                weigh(x, row[h][0], 0, a.unit, zone, inside[0]);
                weigh(x, row[h][1], 1, a.unit, zone, inside[1]);
            };
            auto pack_weights = [&]() {
#pragma unroll
                for (int c = 0; c < TILE / 4; c++) {
                    p[c] = portable::pack(x[2 * c], x[2 * c + 1], T());
                    if constexpr (EXACT)
                        rest[c] = portable::pack_rest(x[2 * c], x[2 * c + 1], p[c], T());
                }
            };
            auto values = [&](float(&o)[D / 2], uint32_t slot) { // issues o += P V
                const uint64_t vd = tile_n_major(s.v[slot], TILE * 128);
                mma_begin();
#pragma unroll
                for (int c = 0; c < TILE / 16; c++) {
                    mma<T, D>::rs(o, p + 4 * c, vd + step_n_major(c), 1);
                    if constexpr (EXACT) mma<T, D>::rs(o, rest + 4 * c, vd + step_n_major(c), 1);
                }
                mma_commit();
            };
            auto wait_keys = [&]() {
                barrier_wait(&s.k_full[kr.slot], kr.parity);
                proxy_fence();
            };
            auto wait_values = [&](uint32_t slot, uint32_t parity) {
                barrier_wait(&s.v_full[slot], parity);
                proxy_fence();
            };
            if (second) {
                // While one head's products run, the other head's exponentials are formed.
                wait_keys();
                logits(0);
                mma_wait<0>();
                pin(x);
                weights(0, zone_of_tile(0), kr.slot);
                pack_weights();
                for (int j = 0; j < tiles; j++) {
                    const kv_zone zone = zone_of_tile(j);
                    const uint32_t slot = kr.slot, parity = kr.parity;
                    logits(1);
                    wait_values(slot, parity);
                    values(o0, slot);
                    mma_wait<1>();
                    pin(x);
                    weights(1, zone, slot);
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&s.k_empty[slot]);
                    mma_wait<0>();
                    pin(o0);
                    fade_rows(o1, row[1][0].fade, row[1][1].fade);
                    pack_weights();
                    kr.next();
                    if (j + 1 < tiles) wait_keys();
                    logits(0); // behind the last tile: stale keys, not used
                    values(o1, slot);
                    mma_wait<1>();
                    pin(x);
                    if (j + 1 < tiles)
                        weights(0, zone_of_tile(j + 1), kr.slot);
                    else
                        row[0][0].fade = row[0][1].fade = 1.0f;
                    mma_wait<0>();
                    pin(o1);
                    if (lane == 0) barrier_arrive(&s.v_empty[slot]);
                    fade_rows(o0, row[0][0].fade, row[0][1].fade);
                    pack_weights();
                }
            } else {
                for (int j = 0; j < tiles; j++, kr.next()) {
                    wait_keys();
                    if (first) {
                        logits(0);
                        mma_wait<0>();
                        pin(x);
                        weights(0, zone_of_tile(j), kr.slot);
                        fade_rows(o0, row[0][0].fade, row[0][1].fade);
                        pack_weights();
                        wait_values(kr.slot, kr.parity);
                        values(o0, kr.slot);
                        mma_wait<0>();
                        pin(o0);
                    }
                    __syncwarp();
                    if (lane == 0) {
                        barrier_arrive(&s.k_empty[kr.slot]);
                        barrier_arrive(&s.v_empty[kr.slot]);
                    }
                }
            }
            if (lane == 0) barrier_arrive(&s.q_empty);
            if (first) {
                finish(row[0][0], o0, 0, a, m.head + team - 1, u);
                finish(row[0][1], o0, 1, a, m.head + team - 1, u + 8);
            }
            if (second) {
                finish(row[1][0], o1, 0, a, m.head + team + 1, u);
                finish(row[1][1], o1, 1, a, m.head + team + 1, u + 8);
            }
        }
    }
#endif
}

template <class T, int D, bool EXACT>
kv_status launch_hopper(const kv_gpu_span *s, attend_args a) {
    kv_gpu *g = s->gpu;
    CUtensorMap q_map;
    kv_scratch next;
    const size_t bytes = sizeof(attend_shared<D>);
    const int items = a.n_kv_head * a.n_block * parts_of(a);
    KV_RETURN(kv_tile_map(s, s->q, s->n_q_head, 64, &q_map));
    KV_RETURN(next.reserve(g, sizeof(int)));
    KV_CUDA(cudaMemsetAsync(next.buffer->data, 0, sizeof(int), g->stream));
    a.next = next.as<int>();
    KV_RETURN(kv_allow_shared(g, attend_hopper<T, D, EXACT>, bytes));
    attend_hopper<T, D, EXACT><<<min(g->sm_count, items), 384, bytes, g->stream>>>(
        q_map, kv_data<T>(s->k), kv_data<T>(s->v), a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T, int D>
kv_status launch(const kv_gpu_span *s, bool exact, const attend_args &a) {
    if constexpr (sizeof(T) == 2) {
        if (s->gpu->hopper && s->softcap == 0 && s->scale > 0)
            return exact ? launch_hopper<T, D, true>(s, a) : launch_hopper<T, D, false>(s, a);
    }
    const size_t bytes =
        (size_t)(1 + 2 * portable::stages<T>()) * portable::tile_elements<T>(D) * sizeof(T);
    KV_RETURN(kv_allow_shared(s->gpu, attend_portable<T, D>, bytes));
    attend_portable<T, D>
        <<<dim3((unsigned)a.n_block, (unsigned)a.n_q_head), portable::THREADS, bytes,
           s->gpu->stream>>>(kv_data<T>(s->q), kv_data<T>(s->k), kv_data<T>(s->v), exact, a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T> kv_status launch_size(const kv_gpu_span *s, bool exact, const attend_args &a) {
    return s->head_dim == 64 ? launch<T, 64>(s, exact, a) : launch<T, 128>(s, exact, a);
}

} // namespace

kv_status kv_gpu_attend(const kv_gpu_span *s, const kv_gpu_plan *plan, bool exact,
                        kv_gpu_buffer *o, kv_gpu_buffer *lse, kv_gpu_buffer *lse_long) {
    const size_t cells = (size_t)s->n_q_head * (size_t)s->n_token;
    KV_RETURN(kv_buffer_check(o, "o", cells * (size_t)s->head_dim_in, sizeof(float)));
    KV_RETURN(kv_buffer_check(lse, "lse", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(lse_long, "lse_long", cells, sizeof(float)));
    if (!s->v) return KV_FAIL(KV_E_USAGE, "kv_gpu_attend: the span was uploaded without v");
    if (plan && (plan->n_kv_head != s->n_kv_head || plan->n_token != s->n_token))
        return KV_FAIL(KV_E_USAGE, "kv_gpu_attend: plan of %d heads, %d tokens; span of %d, %d",
                       plan->n_kv_head, plan->n_token, s->n_kv_head, s->n_token);
    if (lse_long && !plan)
        return KV_FAIL(KV_E_USAGE, "kv_gpu_attend: lse_long needs a plan");
    attend_args a = {};
    a.n_token = s->n_token;
    a.n_q_head = s->n_q_head;
    a.n_kv_head = s->n_kv_head;
    a.n_block = kv_div_up(s->n_token, KV_BLOCK);
    a.head_dim_out = s->head_dim_in;
    a.unit = s->scale * KV_LOG2E;
    a.scale = s->scale;
    a.softcap = s->softcap;
    if (plan) {
        a.block = kv_data<kept_block>(plan->block);
        a.list = kv_data<int>(plan->list);
        a.evict_at = kv_data<int>(plan->evict_at);
        a.sinks = plan->sinks;
        a.window = plan->window;
    }
    a.o = kv_data<float>(o);
    a.lse = kv_data<float>(lse);
    a.lse_long = kv_data<float>(lse_long);
    if (s->type == KV_F16) return launch_size<__half>(s, exact, a);
    if (s->type == KV_BF16) return launch_size<__nv_bfloat16>(s, exact, a);
    return launch_size<float>(s, exact, a);
}
