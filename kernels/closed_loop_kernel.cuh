// The kernel of the closed-loop replay (closed_loop.cu says what it does): one set of decisions per cluster, query after query.
#ifndef KV_KERNELS_CLOSED_LOOP_KERNEL_CUH
#define KV_KERNELS_CLOSED_LOOP_KERNEL_CUH

#include "kernels/closed_loop.cuh"

namespace closed_loop {

constexpr int SHARE = 8; // threads that share a key: 16 bytes each of 128

// Sums x[0..ROWS) over the eight threads that share a key. Each gets the total of one row; returns which.
template <int ROWS> __device__ int share_sum(float (&x)[ROWS], float *total) {
    const int lane = (int)threadIdx.x % 32;
    int row = 0, width = ROWS;
#pragma unroll
    for (int d = SHARE / 2; d > 0; d /= 2) {
        if (width > 1) {
            width /= 2;
            const bool upper = lane & d;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                if (i >= width) break;
                const float mine = upper ? x[width + i] : x[i], other = upper ? x[i] : x[width + i];
                x[i] = mine + __shfl_xor_sync(~0u, other, d);
            }
            row += upper ? width : 0;
        } else {
            x[0] += __shfl_xor_sync(~0u, x[0], d);
        }
    }
    *total = x[0];
    return row;
}
// ROWS: query heads that a thread works on at once, fp32 only.
template <class T, int D, int ROWS> struct loop {
    static constexpr int VECTOR = 16 / (int)sizeof(T);
    const loop_args &a;
    char *shared, *slots;
    int block, set, rows;

    __device__ T *keys() const { return reinterpret_cast<T *>(shared + a.at.keys); }
    // 16 bytes of a key that stays: halves of odd rows are exchanged, so that the rows of a matrix fragment meet different banks.
    __device__ T *chunk(int member, int slot, int i) const {
        const int place = sizeof(T) == 2 ? i ^ (slot & 1) << 2 : i;
        return keys() + (member * a.resident + slot) * D + place * VECTOR;
    }
    __device__ T *q(int u) const { // queries of position u, [rows][D]
        return reinterpret_cast<T *>(shared + a.at.q) + (size_t)(u & 1) * (size_t)(rows * D);
    }
    __device__ T *fresh(int u) const { // keys of position u, [members][D]
        return reinterpret_cast<T *>(shared + a.at.fresh) +
               (size_t)(u & 1) * (size_t)(a.members * D);
    }
    __device__ float *logit() const { return reinterpret_cast<float *>(slots + a.at.logit); }
    __device__ double *statistic() const { return reinterpret_cast<double *>(slots + a.at.a); }
    __device__ int *time() const { return reinterpret_cast<int *>(slots + a.at.time); }
    __device__ const T *document_key(int member, int t) const {
        const size_t head = (size_t)(set * a.members + member);
        return static_cast<const T *>(a.k) + (head * (size_t)a.n_token + (size_t)t) * D;
    }

    // Brings queries and keys of position u on their way.
    __device__ void fetch(int u) const {
        constexpr int per_row = D / VECTOR;
        const size_t head = (size_t)set * (size_t)rows;
        for (int i = (int)threadIdx.x; i < (rows + a.members) * per_row; i += THREADS) {
            const int r = i / per_row, c = i % per_row * VECTOR;
            if (r < rows)
                copy16(q(u) + r * D + c,
                       static_cast<const T *>(a.q) +
                           ((head + (size_t)r) * (size_t)a.n_token + (size_t)u) * D + c);
            else
                copy16(fresh(u) + (r - rows) * D + c, document_key(r - rows, u) + c);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Logits of slots [0, n): all rows. Slot `at` holds the newcomer, whose key is still in the stage. STREAM: some keys are read from
    // the document; without it every load is known to be from shared memory. fp32: eight threads share a key, fma.
    template <bool STREAM> __device__ void logits_fma(int u, int n, int at) const {
        constexpr int LOADS = D / SHARE / 4;
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, part = lane % SHARE;
        const int per_member = (a.group + ROWS - 1) / ROWS, n_work = a.members * per_member;
        const int team = max(1, WARPS / n_work),
                  n_team = WARPS / team; // warps that share a block of rows
        const int step = team * (32 / SHARE), start = warp % team * (32 / SHARE) + lane / SHARE;
        for (int work = warp / team; work < n_work && warp / team < n_team; work += n_team) {
            const int member = work / per_member, first = work % per_member * ROWS;
            float4 x[ROWS][LOADS];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < LOADS; c++) {
                    const int row = member * a.group + min(first + r, a.group - 1);
                    x[r][c] = reinterpret_cast<const float4 *>(q(u) + row * D)[c * SHARE + part];
                }
            // All threads of a warp stay in the loop: the sums are formed across threads.
            const int rounds = (n + step - 1) / step;
            for (int round = 0; round < rounds; round++) {
                const int slot = min(start + round * step, n - 1);
                const T *key =
                    slot == at ? fresh(u) + member * D : keys() + (member * a.resident + slot) * D;
                if (STREAM && slot != at && slot >= a.resident)
                    key = document_key(member, time()[slot]);
                float sum[ROWS] = {};
#pragma unroll
                for (int c = 0; c < LOADS; c++) {
                    const float4 y = reinterpret_cast<const float4 *>(key)[c * SHARE + part];
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        sum[r] = fmaf(x[r][c].x, y.x, sum[r]);
                        sum[r] = fmaf(x[r][c].y, y.y, sum[r]);
                        sum[r] = fmaf(x[r][c].z, y.z, sum[r]);
                        sum[r] = fmaf(x[r][c].w, y.w, sum[r]);
                    }
                }
                float total;
                const int r = share_sum<ROWS>(sum, &total);
                if (part % (SHARE / ROWS) == 0 && first + r < a.group && start + round * step < n)
                    logit()[(member * a.group + first + r) * a.pitch + slot] = capped(total);
            }
        }
    }

    // Half and bfloat16: matrix products, 16 slots by 8 heads. A thread holds, of rows lane/4 and lane/4 + 8 and of one head, 8 neighbouring
    // columns of every 32: they act as columns 2t, 2t+1, 2t+8, 2t+9 of two 16-wide steps, in keys and queries alike.
    template <bool STREAM> __device__ void logits_tensor(int u, int n, int at) const {
        constexpr int BLOCKS = D / 32;
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, row = lane / 4,
                  t = lane % 4;
        const int per_member = (a.group + 7) / 8, n_work = a.members * per_member;
        const int team = max(1, WARPS / n_work), n_team = WARPS / team;
        const int n_tile = (n + 15) / 16;
        for (int work = warp / team; work < n_work && warp / team < n_team; work += n_team) {
            const int member = work / per_member, first = work % per_member * 8;
            uint4 x[BLOCKS];
#pragma unroll
            for (int c = 0; c < BLOCKS; c++)
                x[c] = pack(q(u) + (member * a.group + min(first + row, a.group - 1)) * D + 32 * c +
                            8 * t);
            for (int tile = warp % team; tile < n_tile; tile += team) {
                uint4 y[2][BLOCKS];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int slot = min(16 * tile + row + 8 * r, n - 1);
                    const bool stays = slot != at;
                    const int flip = stays ? slot & 1 : 0; // as chunk() places it
                    const T *key =
                        stays ? keys() + (member * a.resident + slot) * D : fresh(u) + member * D;
                    if (STREAM && 16 * tile >= a.resident) {
                        if (stays) key = document_key(member, time()[slot]);
#pragma unroll
                        for (int c = 0; c < BLOCKS; c++) y[r][c] = pack(key + 32 * c + 8 * t);
                    } else {
#pragma unroll
                        for (int c = 0; c < BLOCKS; c++)
                            y[r][c] = pack(key + (32 * c + 8 * t ^ flip * 32));
                    }
                }
                float sum[4] = {};
#pragma unroll
                for (int c = 0; c < BLOCKS; c++) {
                    const uint32_t even[4] = {y[0][c].x, y[1][c].x, y[0][c].y, y[1][c].y};
                    const uint32_t odd[4] = {y[0][c].z, y[1][c].z, y[0][c].w, y[1][c].w};
                    portable::mma16(sum, even, x[c].x, x[c].y, T());
                    portable::mma16(sum, odd, x[c].z, x[c].w, T());
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int head = first + 2 * t + i % 2, slot = 16 * tile + row + i / 2 * 8;
                    if (head < a.group && slot < n)
                        logit()[(member * a.group + head) * a.pitch + slot] = capped(sum[i]);
                }
            }
        }
    }

    template <bool STREAM> __device__ void all_logits(int u, int n, int at) const {
        if constexpr (sizeof(T) == 2)
            logits_tensor<STREAM>(u, n, at);
        else
            logits_fma<STREAM>(u, n, at);
    }

    __device__ float capped(float product) const {
        product *= a.scale;
        return a.softcap > 0 ? a.softcap * tanhf(product / a.softcap) : product;
    }

    // Maximum and sum of slots [0, n) of the rows of this warp -> all blocks.
    __device__ void send_rows(int n, int per_row, row_part *parts, uint64_t *barrier) const {
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        for (int i = warp; i < rows * per_row; i += WARPS) {
            const int r = i / per_row, share = i % per_row;
            const float *l = logit() + r * a.pitch;
            float top = -INFINITY;
            for (int s = share * 32 + lane; s < n; s += per_row * 32) top = fmaxf(top, l[s]);
            top = top_of_warp(top);
            double sum = 0;
            for (int s = share * 32 + lane; s < n; s += per_row * 32)
                sum += (double)expf(l[s] - top);
            sum = sum_of_warp(sum);
            const __align__(16) row_part mine = {top, 0, sum};
            publish(parts + (r * a.n_block + block) * per_row + share, pack(&mine), barrier,
                    a.n_block);
        }
    }

    __device__ void total_rows(int per_row, const row_part *parts, row_total *total) const {
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        const int n = a.n_block * per_row;
        for (int r = warp; r < rows; r += WARPS) {
            const row_part *p = parts + r * n;
            float top = -INFINITY;
            for (int i = lane; i < n; i += 32) top = fmaxf(top, p[i].top);
            top = top_of_warp(top);
            double sum = 0;
            for (int i = lane; i < n; i += 32) sum += p[i].sum * (double)expf(p[i].top - top);
            sum = sum_of_warp(sum);
            if (lane == 0) total[r] = {1 / sum, top, (float)(sum * 0x1p-126)};
        }
    }

    // A of slots [0, n) after query u. Returns this thread's least A among positions <= limit; `named`: the slot of position `want`.
    __device__ candidate update(int u, int n, int at, int limit, int want, const row_total *total,
                                candidate *named) const {
        int split = 1; // neighbouring threads that share a slot, by rows
        while (split < 32 && 2 * split <= rows && 2 * split * a.n_slot <= THREADS) split *= 2;
        const int own = (int)threadIdx.x % split, step = THREADS / split;
        candidate least = {0, 0, -1};
        *named = least;
        const int rounds = (n + step - 1) / step;
        for (int round = 0; round < rounds; round++) {
            const int slot = (int)threadIdx.x / split + round * step;
            double x = 0;
            for (int r = own; r < rows && slot < n; r += split) {
                const row_total t = total[r];
                const float e = expf(logit()[r * a.pitch + slot] - t.top);
                const double p = (double)(e >= t.tiny ? e : 0.0f) * t.inverse;
                x = a.use_max ? (p > x || p != p ? p : x) : x + p;
            }
            for (int d = 1; d < split; d *= 2) {
                const double y = __shfl_xor_sync(~0u, x, d);
                x = a.use_max ? (y > x || y != y ? y : x) : x + y;
            }
            if (own != 0 || slot >= n) continue;
            if (slot == at) {
                time()[slot] = u;
                statistic()[slot] = 0;
            }
            const double now = a.decay * statistic()[slot] + a.factor * x;
            const candidate me = {now, time()[slot], slot * a.n_block + block};
            statistic()[slot] = now;
            if (me.time <= limit && now == now) least = better(least, me);
            if (me.time == want) *named = me;
        }
        return least;
    }

    __device__ void keep_fresh(int u, int at) const {
        constexpr int per_row = D / VECTOR;
        if (at < 0 || at >= a.resident) return;
        for (int i = (int)threadIdx.x; i < a.members * per_row; i += THREADS) {
            const int member = i / per_row, c = i % per_row;
            *reinterpret_cast<uint4 *>(chunk(member, at, c)) =
                pack(fresh(u) + member * D + c * VECTOR);
        }
    }

    // The first keys, when nothing is asked of them before the cache is full.
    __device__ void fill(int n_key) const {
        constexpr int per_row = D / VECTOR;
        const int n = (n_key - block + a.n_block - 1) / a.n_block;
        for (int s = (int)threadIdx.x; s < n; s += THREADS) {
            time()[s] = s * a.n_block + block;
            statistic()[s] = 0;
        }
        const int kept = min(n, a.resident);
        for (int i = (int)threadIdx.x; i < a.members * kept * per_row; i += THREADS) {
            const int member = i / per_row / kept, slot = i / per_row % kept, c = i % per_row;
            *reinterpret_cast<uint4 *>(chunk(member, slot, c)) =
                pack(document_key(member, slot * a.n_block + block) + c * VECTOR);
        }
    }

    __device__ void run() const {
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        const int per_row = max(1, WARPS / rows);
        row_part *parts = reinterpret_cast<row_part *>(shared + a.at.part);
        candidate *best = reinterpret_cast<candidate *>(shared + a.at.best);
        row_total *total = reinterpret_cast<row_total *>(shared + a.at.row);
        uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + a.at.barrier);
        const int n_part = rows * a.n_block * per_row, n_best = a.n_block * WARPS;
        const int kinds = a.forced ? 2 : 1;
        uint32_t parity[2] = {0, 0};
        int goes = 0; // global slot that the last query emptied
        const int u0 = a.decay == 0 ? min(a.budget, a.n_token - 1) : 0;
        fill(u0);
        fetch(u0);
        // What the last query evicts is never missed.
        for (int u = u0; u < a.n_token - 1; u++) {
            const int used = min(u, a.budget) + 1, n = (used - block + a.n_block - 1) / a.n_block;
            const int slot = u <= a.budget ? u : goes;
            const int at = slot % a.n_block == block ? slot / a.n_block : -1;
            asm volatile("cp.async.wait_group 0;" ::: "memory");
            __syncthreads();
            if (u + 1 < a.n_token) fetch(u + 1);
            announce(&barrier[0], n_part * 16, a.n_block);
            if (u >= a.budget) announce(&barrier[1], kinds * n_best * 16, a.n_block);
            if (a.resident < a.n_slot)
                all_logits<true>(u, n, at);
            else
                all_logits<false>(u, n, at);
            keep_fresh(u, at);
            __syncthreads();
            row_part *p = parts + (u & 1) * n_part;
            send_rows(n, per_row, p, &barrier[0]);
            receive(&barrier[0], parity[0], a.n_block);
            parity[0] ^= 1;
            total_rows(per_row, p, total);
            __syncthreads();
            const int want = a.forced ? a.forced[(size_t)set * (size_t)a.n_token + (size_t)u] : -1;
            candidate named;
            candidate least = update(u, n, at, u - a.protect, want, total, &named);
            if (u < a.budget) continue;
            candidate *b = best + (u & 1) * kinds * n_best;
            __align__(16) candidate mine = best_of_warp(least);
            publish(b + block * WARPS + warp, pack(&mine), &barrier[1], a.n_block);
            if (a.forced) {
                mine = best_of_warp(named);
                publish(b + n_best + block * WARPS + warp, pack(&mine), &barrier[1], a.n_block);
            }
            receive(&barrier[1], parity[1], a.n_block);
            parity[1] ^= 1;
            const auto collect = [&](const candidate *from) {
                candidate x = {0, 0, -1};
                for (int i = lane; i < n_best; i += 32) x = better(x, from[i]);
                return best_of_warp(x);
            };
            candidate victim = collect(b);
            if (a.forced) {
                const candidate given = collect(b + n_best);
                if (block == 0 && threadIdx.x == 0)
                    a.gap[(size_t)set * (size_t)a.n_token + (size_t)u] =
                        given.slot < 0 || victim.slot < 0 ? INFINITY
                        : given.a == victim.a             ? 0.0f
                                                          : (float)((given.a - victim.a) / given.a);
                victim = given;
            }
            if (victim.slot < 0) { // all blocks see the same
                if (threadIdx.x == 0) *a.failed = set + 1;
                break;
            }
            goes = victim.slot;
            if (block == 0 && (int)threadIdx.x < a.members)
                a.evict_at[(size_t)(set * a.members + (int)threadIdx.x) * (size_t)a.n_token +
                           (size_t)victim.time] = u + 1;
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
};

template <class T, int D, int ROWS>
__global__ void __launch_bounds__(THREADS, 1) loop_kernel(const __grid_constant__ loop_args a) {
    extern __shared__ __align__(16) char shared[];
    char *slots =
        a.scratch ? a.scratch + (size_t)blockIdx.x * (size_t)a.at.slot_bytes : shared + a.at.bytes;
    uint64_t *barrier = reinterpret_cast<uint64_t *>(shared + a.at.barrier);
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x < 2) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier + threadIdx.x))
                     : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#endif
    cluster_barrier();
    const loop<T, D, ROWS> l = {a,
                                shared,
                                slots,
                                block_of_cluster(a.n_block),
                                (int)blockIdx.x / a.n_block,
                                a.members * a.group};
    l.run();
    cluster_barrier(); // no block may leave while others write to it
}

} // namespace closed_loop

#endif
