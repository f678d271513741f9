// Attention forward by wgmma: persistent blocks of one gathering and two consumer warpgroups.
//
// An item is (KV head, 64 queries, up to four query heads of the group): 256 rows share what is gathered, else L2 would bind. Each
// consumer warpgroup takes two of the heads in turn. The gathering warpgroup copies the listed rows of K and V into swizzled
// tiles. One warpgroup's exponentials run beside the other's products.
#ifndef KV_KERNELS_ATTEND_HOPPER_CUH
#define KV_KERNELS_ATTEND_HOPPER_CUH

#include <type_traits>

#include "kernels/attend.cuh"
#include "kernels/hopper.cuh"
#include "kernels/portable.cuh"

namespace attend {

constexpr int TILE = 64, STAGES = 3;
constexpr int HEADS = 4;

template <int D> struct attend_shared {
    alignas(1024) uint16_t q[2][HEADS][64 * D];
    alignas(1024) uint16_t k[STAGES][TILE * D], v[STAGES][TILE * D];
    alignas(16) int2 limit[STAGES][TILE];
    uint64_t q_full[2], q_empty[2];
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    int item[2];
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
        for (int i = 0; i < 2; i++) barrier_init(&s.q_full[i], 1), barrier_init(&s.q_empty[i], 8);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.k_full[i], 128); // each gathering thread
            barrier_init(&s.v_full[i], 128);
            barrier_init(&s.k_empty[i], 256); // each consumer: all read limits, not only products
            barrier_init(&s.v_empty[i], 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (team == 0) {
        registers_shrink<40>();
        constexpr int chunks = D / 8,
                      rows = 32 / chunks; // 16-byte chunks of a row, rows per instruction
        ring<2> qr;
        ring<STAGES> kr;
        const int chunk = lane % chunks;
        for (;; qr.next()) {
            if (threadIdx.x == 0) {
                const int i = atomicAdd(a.next, 1);
                barrier_wait(&s.q_empty[qr.slot], qr.parity ^ 1);
                s.item[qr.slot] = i;
                if (i < items) {
                    const attend_item m = item_of(i, a);
                    barrier_expect(&s.q_full[qr.slot], (uint32_t)(m.heads * 64 * D * 2));
                    for (int h = 0; h < m.heads; h++)
                        load_tile(s.q[qr.slot][h], &q_map, m.block * KV_BLOCK, m.head + h,
                                  &s.q_full[qr.slot]);
                } else {
                    barrier_arrive(&s.q_full[qr.slot]);
                }
            }
            asm volatile("bar.sync 1, 128;" ::: "memory");
            const int i = s.item[qr.slot];
            if (i >= items) break;
            const attend_item m = item_of(i, a);
            const key_list keys = keys_of(a, m.kv, m.block);
            const size_t plane = (size_t)m.kv * (size_t)a.n_token * D + (size_t)chunk * 8;
            const int tiles = max(1, (keys.count + TILE - 1) / TILE);
            constexpr int share = TILE / 4; // rows of a warp
            const int mine = warp * share + lane % share;
            int key = keys.key(mine), next = -1;
            uint32_t previous = 0; // slot of the tile before
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
                // Tells of its copies when they have landed, one array behind the copies that it issues.
                auto landed = [&](auto pending, uint64_t *full) {
                    portable::copy_wait<decltype(pending)::value>();
                    proxy_fence();
                    barrier_arrive(full);
                };
                barrier_wait(&s.k_empty[kr.slot], kr.parity ^ 1);
                gather(s.k[kr.slot], k);
                portable::copy_commit();
                if (lane < share && keys.mixed(j * TILE, (j + 1) * TILE))
                    s.limit[kr.slot][mine] = keys.limits(key);
                if (j > 0) landed(std::integral_constant<int, 1>(), &s.v_full[previous]);
                barrier_wait(&s.v_empty[kr.slot], kr.parity ^ 1);
                gather(s.v[kr.slot], v);
                portable::copy_commit();
                landed(std::integral_constant<int, 1>(), &s.k_full[kr.slot]);
                previous = kr.slot;
                if (j + 1 == tiles) landed(std::integral_constant<int, 0>(), &s.v_full[previous]);
                key = next;
            }
        }
        if (threadIdx.x == 0) barrier_wait(&s.q_empty[qr.slot], qr.parity); // all have seen the end
    } else {
        registers_grow<232>();
        ring<2> qr;
        ring<STAGES> kr;
        for (;; qr.next()) {
            barrier_wait(&s.q_full[qr.slot], qr.parity);
            // Only the lane that says when the slot is free reads it.
            const int i = uniform(lane == 0 ? s.item[qr.slot] : 0);
            if (i >= items) break;
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
            // of each head, or of one
            uint32_t p[EXACT ? 1 : 2][TILE / 4], rest[EXACT ? TILE / 4 : 1];
            auto zone_of_tile = [&](int j) {
                if (keys.mixed(j * TILE, (j + 1) * TILE)) return KV_MIXED;
                return (j + 1) * TILE <= keys.far ? KV_FAR : KV_NEAR;
            };
            // x = logits of head h and the tile at kr; issues, does not wait.
            auto logits = [&](int h) {
                tile_product<T, D, TILE>(x, tile_k_major(s.q[qr.slot][2 * h + team - 1]),
                                         tile_k_major(s.k[kr.slot]));
            };
            // Weights of head h from x; o: its output, of which no product runs. EXACT leaves packing and fading to `settle`, because its
            // packed weights are still being read.
            auto weights = [&](int h, float(&o)[D / 2], kv_zone zone, uint32_t slot) {
                uint32_t inside[2] = {};
                if (zone == KV_MIXED) hide(x, inside, s.limit[slot] + 2 * (lane % 4), u, a);
                if constexpr (EXACT) {
                    weigh(x, row[h][0], 0, a.unit, zone, inside[0]);
                    weigh(x, row[h][1], 1, a.unit, zone, inside[1]);
                } else {
                    weigh_packed<T>(x, p[h], row[h], o, a.unit, zone, inside);
                }
            };
            auto settle = [&](int h, float(&o)[D / 2]) {
                if constexpr (EXACT) {
                    fade_rows(o, row[h][0].fade, row[h][1].fade);
#pragma unroll
                    for (int c = 0; c < TILE / 4; c++) {
                        p[0][c] = portable::pack(x[2 * c], x[2 * c + 1], T());
                        rest[c] = portable::pack_rest(x[2 * c], x[2 * c + 1], p[0][c], T());
                    }
                }
            };
            auto values = [&](int h, float(&o)[D / 2], uint32_t slot) { // issues o += P V
                const uint64_t vd = tile_n_major(s.v[slot], TILE * 128);
                mma_begin();
#pragma unroll
                for (int c = 0; c < TILE / 16; c++) {
                    mma<T, D>::rs(o, p[EXACT ? 0 : h] + 4 * c, vd + step_n_major(c), 1);
                    if constexpr (EXACT) mma<T, D>::rs(o, rest + 4 * c, vd + step_n_major(c), 1);
                }
                mma_commit();
            };
            auto wait_keys = [&]() { barrier_wait(&s.k_full[kr.slot], kr.parity); };
            auto wait_values = [&](uint32_t slot, uint32_t parity) {
                barrier_wait(&s.v_full[slot], parity);
            };
            if (second) {
                // While one head's products run, the other head's exponentials are formed.
                wait_keys();
                logits(0);
                mma_wait<0>();
                pin(x);
                weights(0, o0, zone_of_tile(0), kr.slot);
                settle(0, o0);
                for (int j = 0; j < tiles; j++) {
                    const kv_zone zone = zone_of_tile(j);
                    const uint32_t slot = kr.slot;
                    wait_values(slot, kr.parity);
                    logits(1);
                    values(0, o0, slot);
                    mma_wait<1>();
                    pin(x);
                    weights(1, o1, zone, slot);
                    if constexpr (EXACT)
                        pin(x);
                    else
                        pin(p[1]);
                    // Limits have been used.
                    barrier_arrive(&s.k_empty[slot]);
                    mma_wait<0>();
                    pin(o0);
                    settle(1, o1);
                    kr.next();
                    if (j + 1 < tiles) wait_keys();
                    logits(0); // behind the last tile: stale keys, not used
                    values(1, o1, slot);
                    mma_wait<1>();
                    pin(x);
                    if (j + 1 < tiles)
                        weights(0, o0, zone_of_tile(j + 1), kr.slot);
                    else
                        row[0][0].fade = row[0][1].fade = 1.0f;
                    mma_wait<0>();
                    pin(o1);
                    if (lane == 0) barrier_arrive(&s.v_empty[slot]);
                    settle(0, o0);
                }
            } else {
                for (int j = 0; j < tiles; j++, kr.next()) {
                    wait_keys();
                    if (first) {
                        logits(0);
                        mma_wait<0>();
                        pin(x);
                        weights(0, o0, zone_of_tile(j), kr.slot);
                        settle(0, o0);
                        wait_values(kr.slot, kr.parity);
                        values(0, o0, kr.slot);
                        mma_wait<0>();
                        pin(o0);
                    }
                    barrier_arrive(&s.k_empty[kr.slot]);
                    if (lane == 0) barrier_arrive(&s.v_empty[kr.slot]);
                }
            }
            if (lane == 0) barrier_arrive(&s.q_empty[qr.slot]);
            if (first) {
                finish(row[0][0], o0, 0, a, m.head + team - 1, u);
                finish(row[0][1], o0, 1, a, m.head + team - 1, u + 8);
            }
            if (second) {
                finish(row[1][0], o1, 0, a, m.head + team + 1, u);
                finish(row[1][1], o1, 1, a, m.head + team + 1, u + 8);
            }
        }
        if (lane == 0) barrier_arrive(&s.q_empty[qr.slot]);
    }
#endif
}

} // namespace attend

#endif
