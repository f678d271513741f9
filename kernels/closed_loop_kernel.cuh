// The kernel of the closed-loop replay (closed_loop.cu says what it does): one set of decisions per cluster, batch after batch of
// queries, inside a batch query after query.
#ifndef KV_KERNELS_CLOSED_LOOP_KERNEL_CUH
#define KV_KERNELS_CLOSED_LOOP_KERNEL_CUH

#include "kernels/closed_loop_slots.cuh"

namespace closed_loop {

template <class T, int D, bool FAR> struct loop : slots<T, D, FAR> {
    using base = slots<T, D, FAR>;
    using base::a, base::block, base::set, base::rows, base::shared;
    using base::column, base::time, base::statistic, base::total, base::share_of;
    cluster::exchange x;

    __device__ loop(const base &b, uint64_t *barriers) : base(b), x{barriers, b.a.n_block, 0} {}

    __device__ uint4 *part() const { // of the next exchange
        const int size = max(rows * a.batch * a.n_block * a.shares, 2 * a.n_block);
        return reinterpret_cast<uint4 *>(shared + a.at.part) + x.count % 2 * (uint32_t)size;
    }

    // Values become exp(logit - maximum of the column), totals their sums over all blocks. Block 0 counts the arriving keys, as far as
    // they have arrived.
    __device__ void weigh(const query_batch &b) {
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        const int columns = rows * b.n, parts = a.n_block * a.shares, step = a.shares * 128;
        const auto for_columns = [&](auto work) {
            for (int i = warp; i < columns * a.shares; i += WARPS) {
                const int at = i / a.shares, share = i - at * a.shares, r = at / b.n,
                          j = at - r * b.n;
                // Lanes that look at an arriving key: all blocks need the value, block 0 counts it.
                const bool arrives = share == 0 && lane <= j;
                work(column(r * a.batch + j), share * 128 + lane * 4, arrives,
                     (at * a.n_block + block) * a.shares + share, at * parts);
            }
        };
        const auto top_of = [&](const float *value, int first, bool arrives) {
            float top = block == 0 && arrives ? value[a.fresh + lane] : -INFINITY;
#pragma unroll 4
            for (int s = first; s < b.held; s += step) {
                const float4 v = *reinterpret_cast<const float4 *>(value + s);
                top = fmaxf(fmaxf(top, fmaxf(v.x, v.y)), fmaxf(v.z, v.w));
            }
            return top_of_warp(top);
        };
        const uint4 *tops = part();
        if (parts > 1) {
            x.announce(columns * parts * 16);
            for_columns([&](float *value, int first, bool arrives, int mine, int) {
                const float top = top_of(value, first, arrives);
                x.publish(part() + mine, make_uint4(__float_as_uint(top), 0, 0, 0));
            });
            x.receive();
        }
        uint4 *sums = part();
        x.announce(columns * parts * 16);
        for_columns([&](float *value, int first, bool arrives, int mine, int all) {
            float top;
            if (parts > 1) {
                top = -INFINITY;
                for (int i = lane; i < parts; i += 32)
                    top = fmaxf(top, __uint_as_float(tops[all + i].x));
                top = top_of_warp(top);
            } else {
                top = top_of(value, first, arrives);
            }
            double sum = 0;
#pragma unroll 2
            for (int s = first; s < b.held; s += step) {
                float4 v = *reinterpret_cast<const float4 *>(value + s);
                v = make_float4(expf(v.x - top), expf(v.y - top), expf(v.z - top), expf(v.w - top));
                *reinterpret_cast<float4 *>(value + s) = v;
                sum += (double)((v.x + v.y) + (v.z + v.w));
            }
            if (arrives) {
                float *v = value + a.fresh + lane;
                *v = expf(*v - top);
                if (block == 0) sum += (double)*v;
            }
            const uint64_t bits = (uint64_t)__double_as_longlong(sum_of_warp(sum));
            x.publish(sums + mine, make_uint4((uint32_t)bits, (uint32_t)(bits >> 32), 0, 0));
        });
        x.receive();
        for (int at = (int)threadIdx.x; at < columns; at += THREADS) {
            double sum = 0;
            for (int i = 0; i < parts; i++) {
                const uint4 p = sums[at * parts + i];
                sum += __longlong_as_double((int64_t)((uint64_t)p.y << 32 | p.x));
            }
            set_total(at / b.n * a.batch + at % b.n, sum);
        }
        __syncthreads();
        if (a.n_block > 1 && warp == 0) cluster::release(); // the values: `leave` reads them
    }

    __device__ void set_total(int i, double sum) const { total()[i] = {sum, 1.0f / (float)sum}; }

    __device__ float joined(float p, float q) const {
        return a.use_max ? (q > p || q != q ? q : p) : p + q;
    }

    // A of slots [0, n) after query j of the batch; slot `at` has just taken that query's key. Returns this thread's least A among
    // positions <= limit; `named`: the slot of position `want`.
    __device__ candidate update(const query_batch &b, int j, int n, int at, int limit, int want,
                                candidate *named) const {
        constexpr int WIDE = 2; // slots at a time
        const int split = 1 << a.split_bits, own = (int)threadIdx.x & (split - 1);
        const int step = THREADS >> a.split_bits, row_step = a.batch * a.pitch << a.split_bits;
        candidate least = {0, 0, -1};
        *named = least;
        __syncwarp(); // positions that lanes of this warp wrote for the query before
        const int lane_slot = (int)threadIdx.x % 32 >> a.split_bits;
        for (int first = (int)threadIdx.x >> a.split_bits; first - lane_slot < n;
             first += WIDE * step) {
            int t[WIDE];
            const float *value[WIDE];
            float sum[WIDE] = {};
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                const int slot = first + i * step;
                t[i] = slot == at ? b.first + j : slot < n ? time()[slot] : -1;
                value[i] = column(own * a.batch + j) + (t[i] >= b.first ? a.fresh + t[i] - b.first
                                                        : slot < n      ? slot
                                                                        : 0);
            }
            const column_total *f = total() + own * a.batch + j;
#pragma unroll 4
            for (int r = own; r < rows; r += split) {
                const float inverse = f->inverse;
                f += a.batch << a.split_bits;
#pragma unroll
                for (int i = 0; i < WIDE; i++) {
                    sum[i] = joined(sum[i], probability(*value[i], inverse));
                    value[i] += row_step;
                }
            }
            for (int d = 1; d < split; d *= 2)
#pragma unroll
                for (int i = 0; i < WIDE; i++)
                    sum[i] = joined(sum[i], __shfl_xor_sync(~0u, sum[i], d));
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                const int slot = first + i * step;
                if (own != 0 || slot >= n) continue;
                const double before = slot == at ? 0 : statistic()[slot];
                const double now = a.decay * before + a.factor * (double)sum[i];
                const candidate me = {now, t[i], slot * a.n_block + block};
                statistic()[slot] = now;
                if (slot == at) time()[slot] = t[i];
                if (t[i] <= limit && now == now) least = better(least, me);
                if (t[i] == want) *named = me;
            }
        }
        return least;
    }

    // The best candidates of all threads of all blocks, in all threads; `named` only in lockstep.
    __device__ void agree(candidate *least, candidate *named) {
        const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
        const int kinds = a.forced ? 2 : 1;
        candidate *best = reinterpret_cast<candidate *>(shared + a.at.best);
        const auto send = [&](int kind, const candidate &c) {
            const __align__(16) candidate mine = c;
            x.publish(part() + kind * a.n_block + block, pack(&mine));
        };
        *least = best_of_warp(*least);
        if (lane == 0) best[warp] = *least;
        if (kinds == 2) {
            *named = best_of_warp(*named);
            if (lane == 0) best[WARPS + warp] = *named;
        }
        __syncthreads();
        *least = best_of(best, WARPS);
        if (kinds == 2) *named = best_of(best + WARPS, WARPS);
        if (a.n_block == 1) return;
        x.announce(kinds * a.n_block * 16);
        if (warp == 0) send(0, *least);
        if (warp == 0 && kinds == 2) send(1, *named);
        const candidate *from = reinterpret_cast<const candidate *>(part());
        x.receive();
        *least = best_of(from, a.n_block);
        if (kinds == 2) *named = best_of(from + a.n_block, a.n_block);
    }

    // What leaves after query j no longer counts in the later ones. True: the next sum has lost its largest part, so that values near
    // the least may be lost too, and a new batch must begin.
    __device__ bool leave(const query_batch &b, int j, const candidate &victim) const {
        const bool arrived = victim.time >= b.first; // such values are in every block
        const int place = arrived ? a.fresh + victim.time - b.first : victim.slot / a.n_block;
        const int owner = victim.slot % a.n_block, later = b.n - 1 - j;
        bool low = false;
        for (int i = (int)threadIdx.x; i < rows * later; i += THREADS) {
            const int r = i / later, next = j + 1 + i - r * later, at = r * a.batch + next;
            const float *value = column(at) + place;
            const double e =
                (double)(arrived || owner == block ? *value : cluster::read(value, owner));
            const double sum = total()[at].sum - e;
            set_total(at, sum);
            low = low || (next == j + 1 && !(sum >= 1));
        }
        const bool again = __syncthreads_or(low);
        if (again) cluster::barrier(); // no block may begin while others read its values
        return again;
    }

    // The queries of a batch, one after the other. Returns how many were done, 0 when there was no victim.
    __device__ int queries(const query_batch &b, int *goes) {
        for (int j = 0; j < b.n; j++) {
            const int u = b.first + j, slot = u <= a.budget ? u : *goes;
            const int n = share_of(min(u, a.budget) + 1);
            const int at = slot % a.n_block == block ? slot / a.n_block : -1;
            const size_t step = (size_t)set * (size_t)a.n_token + (size_t)u;
            candidate given,
                victim = update(b, j, n, at, u - a.protect, a.forced ? a.forced[step] : -1, &given);
            if (u < a.budget) continue;
            agree(&victim, &given);
            if (a.forced) {
                if (block == 0 && threadIdx.x == 0)
                    a.gap[step] = given.slot < 0 || victim.slot < 0 ? INFINITY
                                  : given.a == victim.a             ? 0.0f
                                                        : (float)((given.a - victim.a) / given.a);
                victim = given;
            }
            if (victim.slot < 0) { // all blocks see the same
                if (threadIdx.x == 0) *a.failed = set + 1;
                return 0;
            }
            *goes = victim.slot;
            if (block == 0 && (int)threadIdx.x < a.members)
                a.evict_at[(size_t)(set * a.members + (int)threadIdx.x) * (size_t)a.n_token +
                           (size_t)victim.time] = u + 1;
            if (j + 1 < b.n && leave(b, j, victim)) return j + 1;
        }
        return b.n;
    }

    __device__ void run() {
        int goes = 0; // global slot that the last query emptied
        // A query without memory of earlier ones is not asked before the cache is full.
        int u = a.decay == 0 ? min(a.budget, a.n_token - 1) : 0, fetched = u;
        for (int s = (int)threadIdx.x; s < share_of(u); s += THREADS) {
            time()[s] = s * a.n_block + block;
            statistic()[s] = 0;
        }
        base::fetch(u);
        // What the last query evicts is never missed.
        while (u < a.n_token - 1) {
            query_batch b = {u, min(a.batch, a.n_token - 1 - u), share_of(min(u, a.budget + 1)),
                             -1};
            if (u > a.budget && goes % a.n_block == block) b.hole = goes / a.n_block;
            if (fetched != u) {
                portable::copy_wait<0>();
                base::fetch(u);
            }
            portable::copy_wait<0>();
            __syncthreads();
            base::logits(b);
            fetched = u + b.n;
            base::fetch(fetched);
            weigh(b);
            const int done = queries(b, &goes);
            if (done == 0) break;
            u += done;
        }
        portable::copy_wait<0>();
    }
};

template <class T, int D, bool FAR>
__global__ void __launch_bounds__(THREADS, 1) loop_kernel(const __grid_constant__ loop_args a) {
    extern __shared__ __align__(16) char shared[];
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared + a.at.barrier);
    cluster::init(barriers);
    cluster::barrier();
    loop<T, D, FAR> l({a, shared, a.scratch + (size_t)blockIdx.x * (size_t)a.at.slot_bytes,
                       (int)blockIdx.x % a.n_block, (int)blockIdx.x / a.n_block,
                       a.members * a.group},
                      barriers);
    l.run();
    cluster::barrier(); // no block may leave while others write to it
}

} // namespace closed_loop

#endif
