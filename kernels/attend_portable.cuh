// Attention forward by mma.sync: one block per (64 queries, query head).
#ifndef KV_KERNELS_ATTEND_PORTABLE_CUH
#define KV_KERNELS_ATTEND_PORTABLE_CUH

#include "kernels/attend.cuh"
#include "kernels/portable.cuh"

namespace attend {

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

} // namespace attend

#endif
