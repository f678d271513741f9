// Closed-loop replay of tova, h2o and cumulative (kv_replay_attention; contract.md 1, 2): the whole document in one launch.
//
// A set of decisions (one KV head, or the heads of a layer) belongs to one cluster of blocks. Global slot g lives in block g % n_block
// and keeps its place while its key changes. Keys stay in shared memory as far as it reaches; the others are read where the document
// has them, by the position that the slot holds. Per query:
//     logits of the block's slots against all query heads of the set          mma.sync, 16 slots by 8 heads; fp32 keys by fma
//     (maximum, sum) of each row  -> every block of the cluster               exchange 1, through distributed shared memory
//     p = exp(l - max) / sum, statistic A, least A with its position          one thread per slot
//     (A, position, slot) of each warp -> every block of the cluster          exchange 2; all agree on the victim
//     the victim's slot takes the next key
// Both exchanges carry their data on one mbarrier per block, so a query costs two one-way trips and no cluster barrier. Their
// buffers alternate: a block is never more than one exchange ahead, because each needs a part from every block.
//
// Products of half and bfloat16 are exact, sums of logits fp32, exponentials fp32, their sums and the statistic double, as on the
// CPU; only the order of the sums differs, so decisions agree except where two A are closer than rounding. Lockstep mode follows given victims and reports how far each was from the least A.
#include <algorithm>
#include <climits>

#include "kernels/portable.cuh"

namespace {

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int SHARE = 8; // threads that share a key: 16 bytes each of 128

struct layout { // byte offsets; the slot arrays follow `slots` in shared memory or in scratch
    int keys, q, fresh, part, best, row, barrier, bytes;
    int logit, a, time, slot_bytes;
};

struct loop_args {
    const void *q, *k; // [n_q_head][n_token][D], [n_kv_head][n_token][D]
    int32_t *evict_at; // [n_kv_head][n_token]
    const int32_t
        *forced;   // [n_set][n_token] position that leaves after query u; null: the least A leaves
    float *gap;    // [n_set][n_token] (A of the forced - least A) / A of the forced
    int *failed;   // a set whose statistic is not a number
    char *scratch; // slot arrays of every block; null: shared memory
    int n_token, n_block, members, group, budget, protect;
    int n_slot;   // per block
    int resident; // slots per block whose keys stay in shared memory
    int pitch;    // floats between two rows of logits
    float scale, softcap;
    double factor, decay;
    bool use_max;
    layout at;
};

struct row_part { // of one row, over the slots of one warp
    float top;
    uint32_t pad;
    double sum;
};
struct row_total {
    double inverse;
    float top, tiny;
};
struct candidate {
    double a;
    int time, slot; // slot -1: none
};

__device__ uint32_t address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes, equal in all lanes, to the same place in every block of the cluster; counted on each block's barrier.
__device__ void publish(void *to, uint4 x, uint64_t *barrier, int n_block) {
    const int lane = (int)threadIdx.x % 32;
    if (n_block == 1) {
        if (lane == 0) *static_cast<uint4 *>(to) = x;
        return;
    }
#if __CUDA_ARCH__ >= 900
    if (lane < n_block) {
        uint32_t there, bell;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(to)), "r"(lane));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bell) : "r"(address(barrier)), "r"(lane));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                     "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                     "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(bell)
                     : "memory");
    }
#endif
}

// One thread announces how many bytes the exchange brings.
__device__ void announce(uint64_t *barrier, int bytes, int n_block) {
#if __CUDA_ARCH__ >= 900
    if (n_block > 1 && threadIdx.x == 0)
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(barrier)),
            "r"(bytes)
            : "memory");
#endif
}

__device__ void receive(uint64_t *barrier, uint32_t parity, int n_block) {
    if (n_block == 1) {
        __syncthreads();
        return;
    }
#if __CUDA_ARCH__ >= 900
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
#endif
}

__device__ int block_of_cluster(int n_block) { return (int)blockIdx.x % n_block; }

__device__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

__device__ void copy16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from)
                 : "memory");
}

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

// Among equal statistics the newest key leaves.
#ifdef KV_BREAK_CLOSED_LOOP
constexpr int NEWEST = -1;
#else
constexpr int NEWEST = 1;
#endif

__device__ candidate better(candidate x, candidate y) {
    const bool newer = NEWEST * y.time > NEWEST * x.time;
    const bool second = y.slot >= 0 && (x.slot < 0 || y.a < x.a || (y.a == x.a && newer));
    return second ? y : x;
}

// The best of a warp, in all lanes. A is never negative, so its bits order like an integer.
__device__ candidate best_of_warp(candidate x) {
    const uint64_t bits = x.slot >= 0 ? (uint64_t)__double_as_longlong(x.a) : ~0ull;
    const uint32_t high = (uint32_t)(bits >> 32), low = (uint32_t)bits;
    const uint32_t least_high = __reduce_min_sync(~0u, high);
    bool in = high == least_high;
    const uint32_t least_low = __reduce_min_sync(~0u, in ? low : ~0u);
    in = in && low == least_low;
    const int time = NEWEST * __reduce_max_sync(~0u, in ? NEWEST * x.time : -INT_MAX);
    in = in && x.time == time;
    const int from = __ffs((int)__ballot_sync(~0u, in)) - 1;
    return {__longlong_as_double((int64_t)((uint64_t)least_high << 32 | least_low)), time,
            __shfl_sync(~0u, x.slot, from)};
}

// Largest of a warp, in all lanes.
__device__ float top_of_warp(float x) {
    const uint32_t b = __float_as_uint(x);
    const uint32_t top = __reduce_max_sync(~0u, b & 0x80000000u ? ~b : b | 0x80000000u);
    return __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
}

__device__ double sum_of_warp(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

__device__ uint4 pack(const void *x) { return *static_cast<const uint4 *>(x); }

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

__global__ void never_kernel(int32_t *evict_at, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        evict_at[i] = KV_NEVER;
}

typedef void kernel_fn(loop_args);

kernel_fn *kernel_of(const kv_gpu_span *s) {
    const bool wide = s->head_dim == 128;
    if (s->type == KV_F16) return wide ? loop_kernel<__half, 128, 1> : loop_kernel<__half, 64, 1>;
    if (s->type == KV_BF16)
        return wide ? loop_kernel<__nv_bfloat16, 128, 1> : loop_kernel<__nv_bfloat16, 64, 1>;
    if (s->n_q_head / s->n_kv_head > 2)
        return wide ? loop_kernel<float, 128, 4> : loop_kernel<float, 64, 4>;
    return wide ? loop_kernel<float, 128, 2> : loop_kernel<float, 64, 2>;
}

// Shares the slots among n_block blocks and the memory of a block among its arrays.
void arrange(const kv_gpu_span *s, size_t limit, int n_block, loop_args *a) {
    const int element = s->type == KV_F32 ? 4 : 2, rows = a->members * a->group;
    const int key = a->members * s->head_dim * element, per_row = std::max(1, WARPS / rows);
    layout *l = &a->at;
    int next = 0;
    const auto take = [&next](int bytes) {
        const int at = next;
        next += (bytes + 15) / 16 * 16;
        return at;
    };
    a->n_block = n_block;
    a->n_slot = kv_div_up(a->budget + 1, n_block);
    // Rows of logits that eight threads write together meet different banks.
    a->pitch = kv_div_up(a->n_slot, 32) * 32 + 8;
    l->logit = take(rows * a->pitch * 4);
    l->a = take(a->n_slot * 8);
    l->time = take(a->n_slot * 4);
    l->slot_bytes = next;
    next = 0;
    l->barrier = take(16);
    l->q = take(2 * rows * s->head_dim * element);
    l->fresh = take(2 * key);
    l->part = take(2 * rows * n_block * per_row * (int)sizeof(row_part));
    l->best = take(4 * n_block * WARPS * (int)sizeof(candidate));
    l->row = take(rows * (int)sizeof(row_total));
    l->keys = next;
    size_t fixed = (size_t)next + (size_t)l->slot_bytes;
    a->scratch = nullptr;
    if (fixed + 4096 > limit) { // slot arrays go to device memory; the caller allocates
        fixed = (size_t)next;
        a->scratch = reinterpret_cast<char *>(1);
    }
    const size_t left = limit > fixed ? limit - fixed : 0;
    a->resident = (int)std::min((size_t)a->n_slot, left / (size_t)key);
    if (a->resident < a->n_slot) a->resident = a->resident / 16 * 16; // whole matrix tiles
    l->bytes = next + a->resident * key;
}

size_t shared_bytes(const loop_args &a) {
    return (size_t)a.at.bytes + (a.scratch ? 0 : (size_t)a.at.slot_bytes);
}

cudaLaunchConfig_t launch_config(const kv_gpu *g, const loop_args &a, int n_set,
                                 cudaLaunchAttribute *cluster) {
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3((unsigned)(n_set * a.n_block));
    c.blockDim = dim3(THREADS);
    c.dynamicSmemBytes = shared_bytes(a);
    c.stream = g->stream;
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim.x = (unsigned)a.n_block;
    cluster->val.clusterDim.y = cluster->val.clusterDim.z = 1;
    c.attrs = cluster;
    c.numAttrs = a.n_block > 1 ? 1 : 0;
    return c;
}

// Clusters of this shape that run at the same time; 0 when the device cannot hold one.
int clusters_at_once(const kv_gpu *g, kernel_fn *kernel, const loop_args &a, int n_set) {
    if (a.n_block == 1) return g->sm_count;
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t c = launch_config(g, a, n_set, &cluster);
    int n = 0;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)c.dynamicSmemBytes) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&n, kernel, &c) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    return n;
}

// Chooses the number of blocks per set: rounds of clusters times the clocks of one query, a line through what an H200 took with 1 to 8
// blocks (kernels/NOTES.md): waiting, work per slot and row, keys that are not in shared memory.
void choose(const kv_gpu_span *s, kernel_fn *kernel, int n_set, loop_args *best) {
    const kv_gpu *g = s->gpu;
    double least = INFINITY;
    loop_args a = *best;
    // The portable path of a Hopper GPU does what older ones do.
    const int most = g->cc_major > 9 || g->hopper ? 8 : 1;
    for (int n_block = 1; n_block <= most; n_block *= 2) {
        arrange(s, g->shared_limit, n_block, &a);
        const int at_once = clusters_at_once(g, kernel, a, n_set);
        if (at_once == 0 || shared_bytes(a) > g->shared_limit) continue;
        const double slots = (double)a.n_slot, keys = (double)(a.n_slot - a.resident) * a.members;
        const double bytes = keys * s->head_dim * (s->type == KV_F32 ? 4 : 2);
        const double fma = s->type == KV_F32 ? slots * a.members * a.group * s->head_dim / 40 : 0;
        const double wait = n_block == 1 ? 8000 : 9300;
        const double clocks = kv_div_up(n_set, at_once) *
                              (wait + 2.5 * slots * a.members * a.group + bytes / 64 + fma);
        if (clocks < least) {
            least = clocks;
            *best = a;
        }
    }
}

} // namespace

kv_status kv_gpu_replay_attention(const kv_gpu_span *s, const kv_attention_rule *rule,
                                  int32_t layer_heads, int32_t budget, const kv_gpu_buffer *forced,
                                  kv_gpu_buffer *gap, kv_gpu_buffer *evict_at) {
    kv_gpu *g = s->gpu;
    const int members = rule->per_layer ? layer_heads : 1;
    if (budget < 1 || rule->protect_recent < 0 || rule->protect_recent > budget ||
        layer_heads < 1 || s->n_kv_head % layer_heads != 0)
        return KV_FAIL(KV_E_USAGE,
                       "closed loop: budget %d, %d newest keys protected, %d of %d KV heads in a "
                       "layer",
                       budget, rule->protect_recent, layer_heads, s->n_kv_head);
    const int n_set = s->n_kv_head / members;
    const size_t cells = (size_t)s->n_kv_head * (size_t)s->n_token,
                 steps = (size_t)n_set * (size_t)s->n_token;
    KV_RETURN(kv_buffer_check(evict_at, "evict_at", cells, sizeof(int32_t)));
    KV_RETURN(kv_buffer_check(forced, "forced", steps, sizeof(int32_t)));
    KV_RETURN(kv_buffer_check(gap, "gap", steps, sizeof(float)));
    if ((forced == nullptr) != (gap == nullptr))
        return KV_FAIL(KV_E_USAGE, "closed loop: lockstep needs both victims and gaps");
    never_kernel<<<1024, 256, 0, g->stream>>>(kv_data<int32_t>(evict_at), cells);
    KV_CUDA(cudaGetLastError());
    if (gap) KV_CUDA(cudaMemsetAsync(gap->data, 0, steps * sizeof(float), g->stream));
    if (s->n_token <= budget + 1) return KV_OK; // the first to leave would be missed at B + 1
    kv_scratch failed, slots;
    KV_RETURN(failed.reserve(g, sizeof(int)));
    KV_CUDA(cudaMemsetAsync(failed.buffer->data, 0, sizeof(int), g->stream));
    const int group = s->n_q_head / s->n_kv_head;
    loop_args a = {};
    a.q = kv_data<char>(s->q);
    a.k = kv_data<char>(s->k);
    a.evict_at = kv_data<int32_t>(evict_at);
    a.forced = kv_data<int32_t>(forced);
    a.gap = kv_data<float>(gap);
    a.failed = failed.as<int>();
    a.n_token = s->n_token;
    a.members = members;
    a.group = group;
    a.budget = budget;
    a.protect = rule->protect_recent;
    a.scale = s->scale;
    a.softcap = s->softcap;
    a.factor = rule->reduce == KV_REDUCE_MEAN ? 1.0 / (members * group) : 1;
    a.decay = rule->decay;
    a.use_max = rule->reduce == KV_REDUCE_MAX;
    kernel_fn *kernel = kernel_of(s);
    choose(s, kernel, n_set, &a);
    if (a.n_block == 0)
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "closed loop: the queries of %d heads do not fit the shared memory of this "
                       "GPU; run with --device cpu",
                       members * group);
    if (a.scratch) {
        KV_RETURN(slots.reserve(g, (size_t)(n_set * a.n_block) * (size_t)a.at.slot_bytes));
        a.scratch = slots.as<char>();
    }
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t config = launch_config(g, a, n_set, &cluster);
    KV_RETURN(kv_allow_shared(g, kernel, config.dynamicSmemBytes));
    KV_CUDA(cudaLaunchKernelEx(&config, kernel, a));
    int set = 0;
    KV_RETURN(kv_gpu_get(failed.buffer, &set, sizeof set));
    if (set)
        return KV_FAIL(KV_E_DATA, "KV head %d: attention is not a number; q and k must be finite",
                       (set - 1) * members);
    return KV_OK;
}
