// Sums behind the metrics (kv_metrics_measure) from arrays on the device: sizes of kept sets and their overlap with the oracle's,
// future mass of both, probability mass, squared output difference, retrievals. Kept sets are intervals in time, so membership is a
// comparison. Integer sums are exact, sums of doubles have a fixed order: the same bytes on every run.
//
// Cost: rows read both outputs once (8 bytes an element: memory-bound). Sets go over all (query, key) pairs with two comparisons
// and an addition; 8 KV heads of 16384 tokens are 1.1 G pairs.
#include <algorithm>
#include <vector>

#include "kernels/device.cuh"

#include "reference/metrics_sums.h"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int ROWS = 8; // rows of one warp of row_kernel

struct key_sums {
    unsigned long long kept, long_kept, common, own;
};
struct set_part { // queries of one block
    double chance, ratio;
    int64_t kept_max;
};
struct row_part {
    double mass, long_kept, long_all, difference, output;
    int64_t hits, retrievals;
};

struct measure_args {
    const float *dense_lse, *long_mass, *top_p, *lse, *lse_long; // [n_q_head][n]
    const float *dense_o, *o;                                    // [n_q_head][n][d]
    const double *m;                                             // [n_kv_head][n]
    const int *top_t;                                            // [n_q_head][n]
    const int *evict_at, *oracle, *own;                          // [n_kv_head][n], own may be null
    const unsigned char *kind;                                   // [n] or null
    int *kept;                                                   // [n_kv_head][n]
    key_sums *key;                                               // [n_kv_head]
    unsigned long long *kinds;                                   // [2][KV_KINDS]: common, all
    set_part *set;                                               // [n_kv_head][blocks]
    row_part *row;                                               // [n_q_head][blocks]
    int n, d, group, sinks, window, budget;
};

__device__ double warp_sum(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

__device__ unsigned long long span_of(int from, int to) {
    return to > from ? (unsigned long long)(to - from) : 0;
}

// One key a thread: lengths of intervals that begin at the first counted query.
__global__ void __launch_bounds__(THREADS) key_kernel(measure_args a) {
    __shared__ key_sums sum;
    __shared__ unsigned long long kinds[2][KV_KINDS];
    const int t = (int)(blockIdx.x * THREADS + threadIdx.x), h = (int)blockIdx.y;
    const size_t at = (size_t)h * (size_t)a.n + (size_t)t;
    if (threadIdx.x == 0) sum = {};
    for (int i = (int)threadIdx.x; i < 2 * KV_KINDS; i += THREADS) kinds[0][i] = 0;
    __syncthreads();
    if (t < a.n) {
        const int end = min(a.evict_at[at], a.n), joins = t + a.window;
        atomicAdd(&sum.kept, span_of(max(t, a.budget), end));
        if (t >= a.sinks && joins < a.n) {
            const int oracle = min(a.oracle[at], a.n), from = max(joins, a.budget);
            const unsigned long long common = span_of(from, min(end, oracle));
            atomicAdd(&sum.long_kept, span_of(from, end));
            atomicAdd(&sum.common, common);
            if (a.own) atomicAdd(&sum.own, span_of(from, min(end, min(a.own[at], a.n))));
            if (a.kind) {
                atomicAdd(&kinds[0][a.kind[t]], common);
                atomicAdd(&kinds[1][a.kind[t]], span_of(from, oracle));
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&a.key[h].kept, sum.kept);
        atomicAdd(&a.key[h].long_kept, sum.long_kept);
        atomicAdd(&a.key[h].common, sum.common);
        atomicAdd(&a.key[h].own, sum.own);
    }
    for (int i = (int)threadIdx.x; i < 2 * KV_KINDS; i += THREADS)
        if (kinds[0][i]) atomicAdd(&a.kinds[i], kinds[0][i]);
}

// One query a thread, all keys before it.
__global__ void __launch_bounds__(THREADS) set_kernel(measure_args a) {
    __shared__ int end[THREADS], oracle[THREADS];
    __shared__ double mass[THREADS];
    __shared__ set_part part[WARPS];
    const int first = (int)blockIdx.x * THREADS, u = first + (int)threadIdx.x, h = (int)blockIdx.y,
              last = min(first + THREADS, a.n);
    const size_t head = (size_t)h * (size_t)a.n;
    int kept = 0, long_kept = 0;
    double mass_kept = 0, mass_oracle = 0;
    for (int start = 0; start < last; start += THREADS) {
        const int mine = start + (int)threadIdx.x;
        __syncthreads();
        if (mine < a.n) {
            end[threadIdx.x] = a.evict_at[head + (size_t)mine];
            oracle[threadIdx.x] = a.oracle[head + (size_t)mine];
            mass[threadIdx.x] = a.m[head + (size_t)mine];
        }
        __syncthreads();
        const int count = min(THREADS, last - start);
#pragma unroll 4
        for (int j = 0; j < count; j++) {
            const int t = start + j;
            const bool held = u < end[j], eligible = t >= a.sinks && t + a.window <= u;
            kept += held && t <= u;
            long_kept += held && eligible;
            if (held && eligible) mass_kept += mass[j];
            if (u < oracle[j] && eligible) mass_oracle += mass[j];
        }
    }
    const bool valid = u < a.n, counted = valid && u >= a.budget;
    if (valid) a.kept[head + (size_t)u] = kept;
    const double chance =
        warp_sum(counted ? (double)long_kept / (double)(u - a.window - a.sinks + 1) : 0);
    const double ratio = warp_sum(!counted ? 0 : mass_oracle > 0 ? mass_kept / mass_oracle : 1);
    const int most = __reduce_max_sync(~0u, valid ? kept : 0);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = {chance, ratio, most};
    __syncthreads();
    if (threadIdx.x > 0) return;
    set_part sum = {};
    for (const set_part &p : part) {
        sum.chance += p.chance;
        sum.ratio += p.ratio;
        sum.kept_max = max(sum.kept_max, p.kept_max);
    }
    a.set[(size_t)h * gridDim.x + blockIdx.x] = sum;
}

// ROWS queries of one query head a warp.
__global__ void __launch_bounds__(THREADS) row_kernel(measure_args a) {
    __shared__ row_part part[WARPS];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, i = (int)blockIdx.y;
    const int first = ((int)blockIdx.x * WARPS + warp) * ROWS;
    const size_t head = (size_t)i * (size_t)a.n, kv = (size_t)(i / a.group) * (size_t)a.n;
    row_part own = {};
    for (int u = max(first, a.budget); u < min(first + ROWS, a.n); u++) {
        const float *masked = a.o + (head + (size_t)u) * (size_t)a.d;
        const float *dense = a.dense_o + (head + (size_t)u) * (size_t)a.d;
        for (int c = lane; c < a.d; c += 32) {
            const double x = (double)dense[c], y = (double)masked[c] - x;
            own.difference += y * y;
            own.output += x * x;
        }
    }
    const int u = first + lane;
    if (lane < ROWS && u >= a.budget && u < a.n) {
        const size_t at = head + (size_t)u;
        const double norm = (double)a.dense_lse[at];
        const bool all = a.kept[kv + (size_t)u] == u + 1;
        own.mass = all ? 1 : fmin(1.0, exp((double)a.lse[at] - norm));
        own.long_kept = exp((double)a.lse_long[at] - norm);
        own.long_all = (double)a.long_mass[at];
        own.retrievals = a.top_p[at] >= 0.5f;
        own.hits = own.retrievals && u < a.evict_at[kv + (size_t)a.top_t[at]];
    }
    own.mass = warp_sum(own.mass);
    own.long_kept = warp_sum(own.long_kept);
    own.long_all = warp_sum(own.long_all);
    own.difference = warp_sum(own.difference);
    own.output = warp_sum(own.output);
    own.hits = __popc(__ballot_sync(~0u, own.hits > 0));
    own.retrievals = __popc(__ballot_sync(~0u, own.retrievals > 0));
    if (lane == 0) part[warp] = own;
    __syncthreads();
    if (threadIdx.x > 0) return;
    row_part sum = {};
    for (const row_part &p : part) {
        sum.mass += p.mass;
        sum.long_kept += p.long_kept;
        sum.long_all += p.long_all;
        sum.difference += p.difference;
        sum.output += p.output;
        sum.hits += p.hits;
        sum.retrievals += p.retrievals;
    }
    a.row[(size_t)i * gridDim.x + blockIdx.x] = sum;
}

kv_status check(const kv_gpu_measure_input *in) {
    const size_t q = (size_t)in->n_q_head * (size_t)in->n_token,
                 kv = (size_t)in->n_kv_head * (size_t)in->n_token, d = (size_t)in->head_dim;
    const struct {
        const kv_gpu_buffer *buffer;
        const char *name;
        size_t count, size;
        bool optional;
    } list[] = {
        {in->dense_lse, "dense_lse", q, 4, false},
        {in->long_mass, "long_mass", q, 4, false},
        {in->top_p, "top_p", q, 4, false},
        {in->top_t, "top_t", q, 4, false},
        {in->dense_o, "dense_o", q * d, 4, false},
        {in->lse, "lse", q, 4, false},
        {in->lse_long, "lse_long", q, 4, false},
        {in->o, "o", q * d, 4, false},
        {in->evict_at, "evict_at", kv, 4, false},
        {in->evict_oracle, "evict_oracle", kv, 4, false},
        {in->evict_own, "evict_own", kv, 4, true},
        {in->mass, "mass", kv, 8, false},
        {in->kind, "kind", (size_t)in->n_token, 1, true},
    };
    for (const auto &x : list) {
        if (!x.buffer && !x.optional)
            return KV_FAIL(KV_E_USAGE, "kv_gpu_measure: '%s' is missing", x.name);
        KV_RETURN(kv_buffer_check(x.buffer, x.name, x.count, x.size));
    }
    return KV_OK;
}

template <class T> kv_status fetch(const kv_scratch &from, std::vector<T> &to) {
    return kv_gpu_get(from.buffer, to.data(), to.size() * sizeof(T));
}

void add_heads(const std::vector<key_sums> &key, const std::vector<set_part> &set,
               kv_layer_sums *sums) {
    const size_t blocks = set.size() / key.size();
    for (size_t h = 0; h < key.size(); h++) {
        kv_head_sums *s = &sums->head[h];
        s->kept += (int64_t)key[h].kept;
        s->long_kept += (int64_t)key[h].long_kept;
        s->common += (int64_t)key[h].common;
        s->own += (int64_t)key[h].own;
        for (size_t b = h * blocks; b < (h + 1) * blocks; b++) {
            s->chance += set[b].chance;
            s->ratio += set[b].ratio;
            s->kept_max = std::max(s->kept_max, set[b].kept_max);
        }
    }
}

void add_rows(const std::vector<row_part> &row, size_t n_head, kv_layer_sums *sums) {
    for (size_t i = 0; i < row.size(); i++) {
        kv_query_sums *s = &sums->query[i / (row.size() / n_head)];
        s->mass += row[i].mass;
        s->long_kept += row[i].long_kept;
        s->long_all += row[i].long_all;
        s->difference += row[i].difference;
        s->output += row[i].output;
        s->hits += row[i].hits;
        s->retrievals += row[i].retrievals;
    }
}

} // namespace

kv_status kv_gpu_measure(kv_gpu *g, const kv_run *run, const kv_gpu_measure_input *in,
                         kv_layer_sums *sums) {
    const int n = in->n_token, n_q = in->n_q_head, n_kv = in->n_kv_head;
    const unsigned key_blocks = (unsigned)kv_div_up(n, THREADS),
                   row_blocks = (unsigned)kv_div_up(n, WARPS * ROWS);
    std::vector<key_sums> key((size_t)n_kv);
    std::vector<unsigned long long> kinds(2 * KV_KINDS);
    std::vector<set_part> set((size_t)n_kv * key_blocks);
    std::vector<row_part> row((size_t)n_q * row_blocks);
    kv_scratch kept, key_out, kinds_out, set_out, row_out;
    KV_RETURN(check(in));
    KV_RETURN(kept.reserve(g, (size_t)n_kv * (size_t)n * sizeof(int)));
    KV_RETURN(key_out.reserve_zeros(g, key.size() * sizeof(key_sums)));
    KV_RETURN(kinds_out.reserve_zeros(g, kinds.size() * sizeof kinds[0]));
    KV_RETURN(set_out.reserve(g, set.size() * sizeof(set_part)));
    KV_RETURN(row_out.reserve(g, row.size() * sizeof(row_part)));
    measure_args a = {};
    a.dense_lse = kv_data<float>(in->dense_lse);
    a.long_mass = kv_data<float>(in->long_mass);
    a.top_p = kv_data<float>(in->top_p);
    a.top_t = kv_data<int>(in->top_t);
    a.dense_o = kv_data<float>(in->dense_o);
    a.lse = kv_data<float>(in->lse);
    a.lse_long = kv_data<float>(in->lse_long);
    a.o = kv_data<float>(in->o);
    a.evict_at = kv_data<int>(in->evict_at);
    a.oracle = kv_data<int>(in->evict_oracle);
    a.own = kv_data<int>(in->evict_own);
    a.m = kv_data<double>(in->mass);
    a.kind = kv_data<unsigned char>(in->kind);
    a.kept = kept.as<int>();
    a.key = key_out.as<key_sums>();
    a.kinds = kinds_out.as<unsigned long long>();
    a.set = set_out.as<set_part>();
    a.row = row_out.as<row_part>();
    a.n = n;
    a.d = in->head_dim;
    a.group = n_q / n_kv;
    a.sinks = run->sinks;
    a.window = run->window;
    a.budget = run->budget;
#ifdef KV_BREAK_METRICS
    a.budget++;
#endif
    const dim3 by_key(key_blocks, (unsigned)n_kv), by_row(row_blocks, (unsigned)n_q);
    key_kernel<<<by_key, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    set_kernel<<<by_key, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    row_kernel<<<by_row, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    KV_RETURN(fetch(key_out, key));
    KV_RETURN(fetch(kinds_out, kinds));
    KV_RETURN(fetch(set_out, set));
    KV_RETURN(fetch(row_out, row));
    add_heads(key, set, sums);
    add_rows(row, (size_t)n_q, sums);
    for (size_t i = 0; i < KV_KINDS; i++) {
        sums->kind_common[i] += (int64_t)kinds[i];
        sums->kind_all[i] += (int64_t)kinds[KV_KINDS + i];
    }
    return KV_OK;
}
