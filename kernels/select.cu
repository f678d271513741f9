// Running cutoffs of ranks -> evict_at and tau (kv_cutoff_pointer, kv_select; maths.md 3.4-3.6), any length. Documents that one block
// sorts are also decided by it, in select_short.cu, when no ranks and no tau are wanted.
//
// Arrival a is token sinks + a, eligible from query sinks + a + window on. The first k arrivals are kept without a choice. The others
// are cut into pieces, one warp each, shorter where the cutoff moves more often. What a piece must know about the past is which ranks
// have arrived: a bitmap; the cutoff at its start is the bitmap's k-th set bit, and bits above the cutoff are never looked at again. So
// pieces are independent, and inside a piece the pointer of maths.md 3.6 walks, 32 arrivals at a time: an arrival worse than the cutoff
// never moves it.
#include <algorithm>
#include <climits>

#include "kernels/select.cuh"

namespace {

constexpr int PIECES = 64, PIECE_WARPS = 16;

struct cutoff_args {
    const int32_t *rank, *at; // [head][n]
    int32_t *evict_at, *tau;  // [head][n], tau may be null
    int n, sinks, window, k, arrivals, words;
};

__global__ void fill_kernel(int32_t *evict_at, int32_t *tau, int n, int k, int sinks, int window) {
    const size_t head = (size_t)blockIdx.y * (size_t)n;
    for (int t = (int)(blockIdx.x * blockDim.x + threadIdx.x); t < n;
         t += (int)(gridDim.x * blockDim.x)) {
        const bool leaves = k == 0 && t >= sinks && t < n - window; // a window may be INT_MAX
        evict_at[head + (size_t)t] = leaves ? t + window : KV_NEVER;
        if (tau) tau[head + (size_t)t] = k == 0 && t >= window + sinks - 1 ? -1 : n;
    }
}

// The rank of the k-th set bit; it exists. The warp works together.
__device__ int kth_set_bit(const uint32_t *bits, int k) {
    const int lane = (int)threadIdx.x % 32;
    for (int first = 0;; first += 32) {
        const uint32_t word = bits[first + lane];
        const int own = __popc(word), all = __reduce_add_sync(~0u, own);
        if (k > all) {
            k -= all;
            continue;
        }
        int upto = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int y = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += y;
        }
        const int at = __ffs((int)__ballot_sync(~0u, upto >= k)) - 1;
        const uint32_t here = __shfl_sync(~0u, word, at);
        const int skip = k - 1 - __shfl_sync(~0u, upto - own, at);
        // Lane i tests bit i: it is the one when `skip` set bits lie below.
        const bool found = here >> lane & 1 && __popc(here & ((1u << lane) - 1)) == skip;
        return (first + at) * 32 + __ffs((int)__ballot_sync(~0u, found)) - 1;
    }
}

// Arrivals [first, end) of one head; bits: ranks that arrived before, at least k of them.
template <bool TAU>
__device__ void walk(const cutoff_args &a, const int32_t *rank, const int32_t *at,
                     int32_t *evict_at, int32_t *tau, uint32_t *bits, int first, int end) {
    const int lane = (int)threadIdx.x % 32;
    int cut = kth_set_bit(bits, a.k), here = cut / 32; // worst kept rank, its word
    uint32_t word = bits[here];
    int next = first + lane < end ? rank[a.sinks + first + lane] : INT_MAX;
    if (TAU && first == a.k && lane == 0) tau[a.sinks + a.window + first - 1] = cut;
    for (int base = first; base < end; base += 32) {
        const int arrival = base + lane, x = next, q = a.sinks + a.window + arrival;
        const bool valid = arrival < end;
        next = arrival + 32 < end ? rank[a.sinks + arrival + 32] : INT_MAX;
        uint32_t pending = __ballot_sync(~0u, x < cut);
        int leaves = x > cut ? x : -1, after = cut; // rank that leaves at q; cutoff after q
        while (pending) {
            const int j = __ffs((int)pending) - 1, fresh = __shfl_sync(~0u, x, j);
            pending &= pending - 1;
            if (fresh > cut) { // the cutoff has moved past it
                if (lane == j) leaves = fresh;
                continue;
            }
            if (lane == j) leaves = cut;
            if (fresh / 32 == here) {
                word |= 1u << fresh % 32;
            } else {
                if (lane == 0) bits[fresh / 32] |= 1u << fresh % 32;
                __syncwarp();
            }
            uint32_t below = word & ((1u << cut % 32) - 1);
            while (!below) below = word = bits[--here];
            cut = here * 32 + 31 - __clz((int)below);
            if (TAU && lane >= j) after = cut;
        }
        if (valid) {
            evict_at[at[leaves]] = q;
            if (TAU) tau[q] = after;
        }
    }
}

// blockIdx = (group of blockDim/32 pieces, head). Shared: a bitmap of `words` words per warp, words a multiple of 32.
template <bool TAU>
__global__ void __launch_bounds__(PIECE_WARPS * 32) cutoff_kernel(cutoff_args a) {
    extern __shared__ __align__(16) uint32_t bitmap[];
    const int warps = (int)blockDim.x / 32, warp = (int)threadIdx.x / 32,
              lane = (int)threadIdx.x % 32;
    const size_t head = (size_t)blockIdx.y * (size_t)a.n;
    const int32_t *rank = a.rank + head;
    // Priorities in random order move the cutoff at arrival x with probability k/x, rising ones at every arrival: pieces whose
    // length grows from half to one and a half of the mean serve both.
    const auto start = [&](int64_t i) {
        return a.k + (int)((a.arrivals - a.k) * i * (i + PIECES) / (2 * PIECES * PIECES));
    };
    const int piece = (int)blockIdx.x * warps + warp;
    const int block_first = start((int)blockIdx.x * warps);
    const int first = start(min(piece, PIECES)), end = start(min(piece + 1, PIECES));
    for (int i = (int)threadIdx.x; i < warps * a.words; i += (int)blockDim.x) bitmap[i] = 0;
    __syncthreads();
    const auto insert = [&](uint32_t *bits, int arrival) {
        const int x = rank[a.sinks + arrival];
        atomicOr(&bits[x / 32], 1u << x % 32);
    };
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < block_first; i += (int)blockDim.x) insert(bitmap, i);
    if (warp + 1 < warps) // what arrives in this piece is known to the next
        for (int i = first + lane; i < end; i += 32) insert(bitmap + (warp + 1) * a.words, i);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < a.words; i += (int)blockDim.x) {
        uint32_t seen = 0;
        for (int w = 0; w < warps; w++) bitmap[w * a.words + i] = seen |= bitmap[w * a.words + i];
    }
    __syncthreads();
    if (first < end || piece == 0) // the first piece also gives the cutoff of the first full set
        walk<TAU>(a, rank, a.at + head, a.evict_at + head, a.tau ? a.tau + head : nullptr,
                  bitmap + warp * a.words, first, end);
}

} // namespace

kv_status kv_cutoff_device(kv_gpu *g, int32_t n_head, int32_t n, const kv_run *run,
                           const int32_t *rank, const int32_t *at, int32_t *evict_at,
                           int32_t *tau) {
    const cutoff_args a = {rank,
                           at,
                           evict_at,
                           tau,
                           n,
                           run->sinks,
                           run->window,
                           run->budget - run->sinks - run->window,
                           n - run->sinks - run->window,
                           kv_div_up(n, 1024) * 32};
    const size_t bitmap = (size_t)a.words * 4;
    const dim3 grid((unsigned)std::min(kv_div_up(n, 256), 64), (unsigned)n_head);
    fill_kernel<<<grid, 256, 0, g->stream>>>(evict_at, tau, n, a.k, a.sinks, a.window);
    KV_CUDA(cudaGetLastError());
    if (a.k == 0) return KV_OK;
    // Without a choice there is still the cutoff of the first full set.
    if (a.arrivals < a.k || (a.arrivals == a.k && !tau)) return KV_OK;
    int warps = PIECE_WARPS;
    while (warps > 1 && (size_t)warps * bitmap > g->shared_limit) warps /= 2;
    const auto kernel = tau ? cutoff_kernel<true> : cutoff_kernel<false>;
    KV_RETURN(kv_allow_shared(g, kernel, (size_t)warps * bitmap));
    kernel<<<dim3((unsigned)(PIECES / warps), (unsigned)n_head), (unsigned)warps * 32,
             (size_t)warps * bitmap, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status kv_gpu_select(kv_gpu *g, int32_t n_head, int32_t n_token, const kv_run *run,
                        const kv_gpu_buffer *priority, kv_gpu_buffer *evict_at) {
    const size_t count = (size_t)n_head * (size_t)n_token;
    kv_scratch rank, at;
    KV_RETURN(kv_buffer_check(priority, "priority", count, sizeof(float)));
    KV_RETURN(kv_buffer_check(evict_at, "evict_at", count, sizeof(int32_t)));
    if (kv_select_is_short(g, n_token, run))
        return kv_select_short(g, n_head, n_token, run, kv_data<float>(priority),
                               kv_data<int32_t>(evict_at));
    KV_RETURN(rank.reserve(g, count * sizeof(int32_t)));
    KV_RETURN(at.reserve(g, count * sizeof(int32_t)));
    KV_RETURN(kv_rank_device(g, n_head, n_token, kv_data<float>(priority), rank.as<int32_t>(),
                             at.as<int32_t>()));
    return kv_cutoff_device(g, n_head, n_token, run, rank.as<int32_t>(), at.as<int32_t>(),
                            kv_data<int32_t>(evict_at), nullptr);
}
