// Ranks of up to 16384 priorities by one block: a stable radix sort in registers and shared memory. Stability gives the tie rule:
// equal priorities keep the order of t.
//
// Keys are taken relative to the head's least, and only the bits in which they differ are sorted: 27 for numbers within 16 binades of
// each other, three passes of 9; three of 10 up to 30 bits. Bits of digits that were sorted on are dropped, so that the rest and the
// token soon share a word and a pass moves one word per key, the last one only the rank.
#ifndef KV_KERNELS_RANK_CUH
#define KV_KERNELS_RANK_CUH

#include <stdint.h>

namespace ranks {

constexpr int THREADS = 1024, WARPS = THREADS / 32, ITEMS = 16, SMALL = THREADS * ITEMS;
constexpr int MOST_BITS = 10; // of a digit
constexpr int COUNT_STRIDE =
    WARPS + 2;                // an odd number of words, so that digits meet different banks
constexpr int REST_BITS = 18; // below the token in a word

struct sort_shared {
    union {
        uint32_t word[SMALL];
        uint16_t rank[SMALL]; // the result
    };
    union {
        struct {
            uint8_t high[SMALL]; // bits that do not fit the words of the first pass
            uint16_t count[COUNT_STRIDE << MOST_BITS]; // [digit][warp]
        };
        char free[1]; // after the sort
    };
    uint32_t warp_sum[WARPS], least[WARPS], most[WARPS];
};

// threadIdx.x, read where it is used: the compiler would keep it, and every token that follows from it, in registers.
__device__ __forceinline__ int thread() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// Ascending keys are descending priorities; -0 and +0 coincide (kv_ordered).
__device__ __forceinline__ uint32_t sort_key(float priority) {
    const uint32_t b = __float_as_uint(priority == 0.0f ? 0.0f : priority);
#ifdef KV_BREAK_SELECT
    return b;
#else
    return ~(b & 0x80000000u ? ~b : b | 0x80000000u);
#endif
}

// Lanes whose lowest BITS bits are the same as this lane's.
template <int BITS> __device__ __forceinline__ uint32_t same_digit(uint32_t digit) {
    uint32_t peers = ~0u;
#pragma unroll
    for (int b = 0; b < BITS; b++) // four instructions a bit; from C++ it would be six
        asm volatile("{\n.reg .pred p;\n.reg .b32 x;\n"
                     "and.b32 x, %1, %2;\n"
                     "setp.ne.u32 p, x, 0;\n"
                     "vote.sync.ballot.b32 x, p, 0xffffffff;\n"
                     "@!p not.b32 x, x;\n"
                     "and.b32 %0, %0, x;\n}"
                     : "+r"(peers)
                     : "r"(digit), "r"(1u << b));
    return peers;
}

// Counters become the number of elements before (digit, warp), digits first. A thread holds neighbours.
template <int BITS> __device__ __forceinline__ void counts_to_offsets(sort_shared &s) {
    constexpr int own_count = (WARPS << BITS) / THREADS, per_digit = WARPS / own_count;
    const int i = thread(), lane = i % 32, warp = i / 32;
    uint32_t *own = reinterpret_cast<uint32_t *>(s.count + i / per_digit * COUNT_STRIDE +
                                                 i % per_digit * own_count);
    uint32_t sum = 0;
#pragma unroll
    for (int j = 0; j < own_count / 2; j++) sum += (own[j] & 0xffff) + (own[j] >> 16);
    uint32_t before = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const uint32_t y = __shfl_up_sync(~0u, before, d);
        if (lane >= d) before += y;
    }
    if (lane == 31) s.warp_sum[warp] = before;
    before -= sum;
    __syncthreads();
    before += __reduce_add_sync(~0u, lane < warp ? s.warp_sum[lane] : 0);
#pragma unroll
    for (int j = 0; j < own_count / 2; j++) {
        const uint32_t pair = own[j], second = before + (pair & 0xffff);
        own[j] = before | second << 16;
        before = second + (pair >> 16);
    }
}

// item: keys of `bits` significant bits, at tokens first + 32 i.
template <int BITS>
__device__ __forceinline__ void sort_passes(sort_shared &s, uint32_t (&item)[ITEMS], int bits) {
    const int passes = max(1, (bits + BITS - 1) / BITS);
    const bool wide = bits - BITS > REST_BITS;
    constexpr uint32_t digits = 1u << BITS, rest_mask = (1u << REST_BITS) - 1;
    for (int pass = 0; pass < passes; pass++) {
#pragma unroll 1
        for (int i = thread(); i < (int)digits * COUNT_STRIDE / 2; i += THREADS)
            reinterpret_cast<uint32_t *>(s.count)[i] = 0;
        __syncthreads();
        const uint32_t below = (1u << thread() % 32) - 1, above = ~below << 1; // lanes
        int warp = thread() / 32;
        uint32_t place[ITEMS / 2] =
            {}; // within the warp's elements of the same digit, 16 bits each
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const uint32_t digit = item[i] & (digits - 1), peers = same_digit<BITS>(digit);
            uint16_t *count = &s.count[digit * COUNT_STRIDE + (uint32_t)warp];
            const uint32_t before = *count + (uint32_t)__popc(peers & below);
            __syncwarp();
            if ((peers & above) == 0) *count = (uint16_t)(before + 1); // the last of them
            __syncwarp();
            place[i / 2] |= before << i % 2 * 16;
        }
        __syncthreads();
        counts_to_offsets<BITS>(s);
        __syncthreads();
        warp = thread() / 32;
        const int first = warp * 32 * ITEMS + thread() % 32;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const uint32_t digit = item[i] & (digits - 1), t = (uint32_t)(first + 32 * i);
            const uint32_t to = s.count[digit * COUNT_STRIDE + (uint32_t)warp] +
                                (place[i / 2] >> i % 2 * 16 & 0xffff);
            if (pass + 1 == passes) {
                s.rank[pass == 0 ? t : item[i] >> REST_BITS] = (uint16_t)to;
            } else if (pass == 0) {
                s.word[to] = (item[i] >> BITS & rest_mask) | t << REST_BITS;
                if (wide) s.high[to] = (uint8_t)(item[i] >> BITS >> REST_BITS);
            } else {
                uint32_t rest = item[i] & rest_mask;
                if (wide && pass == 1) rest |= (uint32_t)s.high[t] << REST_BITS;
                s.word[to] = rest >> BITS | (item[i] & ~rest_mask);
            }
        }
        __syncthreads();
        if (pass + 1 < passes)
#pragma unroll
            for (int i = 0; i < ITEMS; i++) item[i] = s.word[first + 32 * i];
    }
}

// s.rank[t] of the priorities [n] of a head, n <= SMALL; what lies behind n is not specified. Ends with the threads together.
__device__ __forceinline__ void sort_head(sort_shared &s, const float *priority, int n) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int first = warp * 32 * ITEMS + lane;
    uint32_t item[ITEMS], least = ~0u, most = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int t = first + 32 * i;
        item[i] = t < n ? sort_key(priority[t]) : ~0u;
        if (t < n) {
            least = min(least, item[i]);
            most = max(most, item[i]);
        }
    }
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    if (lane == 0) {
        s.least[warp] = least;
        s.most[warp] = most;
    }
    __syncthreads();
    least = __reduce_min_sync(~0u, s.least[lane]);
    most = __reduce_max_sync(~0u, s.most[lane]);
    // Padding counts as the worst key; it comes later, so it sorts last.
#pragma unroll
    for (int i = 0; i < ITEMS; i++) item[i] = min(item[i], most) - least;
    const int bits = 32 - __clz((int)(most - least));
    if (bits <= 24 || bits > 30)
        sort_passes<8>(s, item, bits);
    else if (bits <= 27)
        sort_passes<9>(s, item, bits);
    else
        sort_passes<10>(s, item, bits);
}

} // namespace ranks

#endif
