// Running cutoffs of one document inside one block, from ranks in shared memory.
//
// Arrival a is token sinks + a; k of the arrivals are kept. A token of rank x leaves when k better ones have arrived, or on arrival when
// they have arrived before: at max(a, until[x]), where until[x] is the arrival that moves the cutoff below x. The cutoff only falls, so
// it passes every rank once, and who passes it writes until[x].
//
// The arrivals behind the first k are cut into pieces, a thread each. A thread must know the cutoff at its start: counts of arrivals
// by (rank / CHUNK, piece), summed over the pieces before, tell its chunk of ranks, and `arrived` (by rank) its place in there.
#ifndef KV_KERNELS_SELECT_WALK_CUH
#define KV_KERNELS_SELECT_WALK_CUH

#include "kernels/rank.cuh"

namespace ranks {

constexpr int PIECES = 512, CHUNK = 256, CHUNKS = SMALL / CHUNK;
constexpr int NEVER_LEFT = 0xffff; // no arrival, in 16 bits

struct walk_shared { // behind the ranks of sort_shared and in the memory that its sort used
    uint16_t until[SMALL];
    // Rank x is at x + 2 (x / CHUNK): chunks meet different banks.
    uint16_t arrived[SMALL + 2 * CHUNKS];
    uint16_t count[CHUNKS][PIECES];
    uint16_t start[PIECES + 1];
    int cut; // before the first piece
};

__device__ __forceinline__ int arrived_at(int rank) { return rank + 2 * (rank / CHUNK); }

// First arrival of piece p. Pieces are equal in arrivals plus steps of the cutoff, both in shares of their totals, as if priorities
// were in random order (cutoff n k / a after a arrivals): they get longer with time. Rising priorities, where every arrival moves the
// cutoff by one, at most double the work of a piece.
__device__ __forceinline__ int piece_start(int p, int k, int m) {
    const double g = 2.0 * p * (m - k) / PIECES, b = m - k - g;
    const double root = (sqrt(b * b + 4.0 * k * m) - b) / 2;
    return min(max((int)rint(root), k), m);
}

// Counts of a chunk in the pieces before each piece, those of the first k arrivals included. A warp per chunk.
__device__ __forceinline__ void sum_counts(walk_shared &s, int k) {
    constexpr int words = PIECES / 64; // two counts each, of a lane
    const int lane = (int)threadIdx.x % 32;
    for (int chunk = (int)threadIdx.x / 32; chunk < CHUNKS; chunk += WARPS) {
        uint32_t *own = reinterpret_cast<uint32_t *>(s.count[chunk]) + lane * words, pair[words];
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < words; i++) {
            pair[i] = own[i];
            sum += (pair[i] & 0xffff) + (pair[i] >> 16);
        }
        uint32_t before = sum, first = 0; // first: of the first k arrivals
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const uint32_t y = __shfl_up_sync(~0u, before, d);
            if (lane >= d) before += y;
        }
        const uint32_t *arrived =
            reinterpret_cast<const uint32_t *>(s.arrived + arrived_at(chunk * CHUNK));
#pragma unroll
        for (int i = lane; i < CHUNK / 2; i += 32)
            first += ((int)(arrived[i] & 0xffff) < k) + ((int)(arrived[i] >> 16) < k);
        before += __reduce_add_sync(~0u, first) - sum;
#pragma unroll
        for (int i = 0; i < words; i++) {
            const uint32_t second = before + (pair[i] & 0xffff);
            own[i] = before | second << 16;
            before = second + (pair[i] >> 16);
        }
    }
}

// The k-th best rank among the arrivals before piece p, which are at least k.
__device__ __forceinline__ int cut_before(const walk_shared &s, int p, int k) {
    const int start = s.start[p];
    int chunk = 0, need = k;
    for (; chunk + 1 < CHUNKS; chunk++) {
        const int in = s.count[chunk][p];
        if (in >= need) break;
        need -= in;
    }
    // Pairs of ranks; groups of them first.
    const uint32_t *pair =
        reinterpret_cast<const uint32_t *>(s.arrived + arrived_at(chunk * CHUNK));
    constexpr int group = 8;
    int at = 0;
    for (; at + group < CHUNK / 2; at += group) {
        int in = 0;
#pragma unroll
        for (int i = 0; i < group; i++) {
            const uint32_t x = pair[at + i];
            in += ((int)(x & 0xffff) < start) + ((int)(x >> 16) < start);
        }
        if (in >= need) break;
        need -= in;
    }
    for (;; at++) {
        const uint32_t x = pair[at];
        need -= (int)(x & 0xffff) < start;
        if (need == 0) return chunk * CHUNK + 2 * at;
        need -= (int)(x >> 16) < start;
        if (need == 0) return chunk * CHUNK + 2 * at + 1;
    }
}

// rank: of all tokens, [n]; m arrivals from token `sinks` on, 1 <= k < m.
__device__ __forceinline__ void walk_head(walk_shared &s, const uint16_t *rank, int sinks, int m,
                                          int k) {
    const int tid = (int)threadIdx.x;
    rank += sinks;
    for (int i = tid; i < SMALL / 2; i += THREADS) reinterpret_cast<uint32_t *>(s.until)[i] = ~0u;
    for (int i = tid; i < SMALL / 2 + CHUNKS; i += THREADS)
        reinterpret_cast<uint32_t *>(s.arrived)[i] = ~0u;
    for (int i = tid; i < CHUNKS * PIECES / 2; i += THREADS)
        reinterpret_cast<uint32_t *>(s.count)[i] = 0;
    if (tid <= PIECES) s.start[tid] = (uint16_t)piece_start(tid, k, m);
    __syncthreads();
    for (int a = tid; a < m; a += THREADS) s.arrived[arrived_at(rank[a])] = (uint16_t)a;
    if (tid < PIECES)
        for (int a = s.start[tid]; a < s.start[tid + 1]; a++) s.count[rank[a] / CHUNK][tid]++;
    __syncthreads();
    sum_counts(s, k);
    __syncthreads();
    if (tid < PIECES) {
        int a = s.start[tid], cut = cut_before(s, tid, k);
        const int end = s.start[tid + 1];
        if (tid == 0) s.cut = cut;
        int x = rank[a];
        while (a < end) {
            const int next = rank[a + 1]; // there is one: a token of the window
            bool passed = x > cut;
            if (!passed) { // the cutoff steps down, to the next rank that is there
                s.until[cut--] = (uint16_t)a;
                passed = s.arrived[arrived_at(cut)] <= a;
            }
            if (passed) {
                a++;
                x = next;
            }
        }
    }
    __syncthreads();
}

// The arrival at which arrival a of rank x leaves, -1: never.
__device__ __forceinline__ int leaves_at(const walk_shared &s, int a, int x) {
    const int until = s.until[x];
    return x > s.cut ? a : until == NEVER_LEFT ? -1 : max(a, until);
}

} // namespace ranks

#endif
