// Hopper instructions (sm_90a) that CUDA C++ has no names for: mbarrier, bulk tensor copy, warpgroup matrix products.
// Thin wrappers only; PTX ISA 8.0, chapters mbarrier, cp.async.bulk.tensor and wgmma.
#ifndef KV_KERNELS_HOPPER_CUH
#define KV_KERNELS_HOPPER_CUH

#include "kernels/device.cuh"

namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(uint64_t *b, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals)
                 : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t *b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t *b, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t *b, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(b)), "r"(parity)
                     : "memory");
    } while (!done);
}
// Arrives when all earlier cp.async of this thread have landed; the barrier's count already includes it.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t *b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b))
                 : "memory");
}
// Orders ordinary shared-memory writes that this thread has seen before its later wgmma and bulk copies.
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Turns of warpgroups: who waits and who passes the turn on meet at named barrier `id`, 1 to 15. A turn that is passed to nobody at a
// kernel's end is forgotten.
__device__ __forceinline__ void turn_wait(int id) {
    asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory");
}
__device__ __forceinline__ void turn_pass(int id) {
    asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory");
}

// The same value, which all lanes hold, in a form that the compiler knows to be uniform: branches on it do not count as divergent.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// Position in a ring of N slots; the parity flips with every round.
template <int N> struct ring {
    uint32_t slot = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++slot == N) slot = 0, parity ^= 1;
    }
};

// Tile (rows from `row`, columns from 64 `block`) of a kv_tile_map into shared memory.
__device__ __forceinline__ void load_tile(void *to, const CUtensorMap *map, int32_t row,
                                          int32_t head, uint64_t *b, int32_t block = 0) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
                 "l"(map), "r"(0), "r"(row), "r"(block), "r"(head), "r"(shared_address(b))
                 : "memory");
}
__device__ __forceinline__ void load_bytes(void *to, const void *from, uint32_t bytes,
                                           uint64_t *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(b))
                 : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <int REGS> __device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGS));
}
template <int REGS> __device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGS));
}

__device__ __forceinline__ void mma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void mma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving reads or writes of an accumulator across this point.
template <int N> __device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> __device__ __forceinline__ void pin(uint32_t (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// Matrix descriptors of 128-byte-swizzled tiles [halves][rows][64] of 2-byte elements: address, leading and stride offsets in
// 16-byte units, swizzle mode 1. K-major (rows are m or n): groups of 8 rows are 1024 bytes apart. N-major (rows are k, operand
// used transposed): 64-column halves are `half_bytes` apart.
__device__ __forceinline__ uint64_t tile_k_major(const void *tile) {
    return (uint64_t)((shared_address(tile) & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 |
           1ull << 62;
}
__device__ __forceinline__ uint64_t tile_n_major(const void *tile, uint32_t half_bytes) {
    return (uint64_t)((shared_address(tile) & 0x3ffff) >> 4) | (uint64_t)(half_bytes >> 4) << 16 |
           64ull << 32 | 1ull << 62;
}
// Offsets in descriptor units: k-step i of 16 columns in a K-major tile of `rows` rows, of 16 rows in an N-major tile.
__device__ __forceinline__ constexpr uint64_t step_k_major(int i, int rows) {
    return (uint64_t)((i / 4) * rows * 128 + (i % 4) * 32) >> 4;
}
__device__ __forceinline__ constexpr uint64_t step_n_major(int i) {
    return (uint64_t)(i * 16 * 128) >> 4;
}

#define KV_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KV_R16(d, i) KV_R4(d, i), KV_R4(d, i + 4), KV_R4(d, i + 8), KV_R4(d, i + 12)
#define KV_R32(d) KV_R16(d, 0), KV_R16(d, 16)
#define KV_R64(d) KV_R32(d), KV_R16(d, 32), KV_R16(d, 48)
#define KV_LIST32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KV_LIST64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// D[64][N] (+)= A[64][16] B[N][16]^T, fp32 accumulation. ss: both operands in shared memory, K-major or, where TA or TB is 1, M- or
// N-major, that is A[16][64], B[16][N]. rs: A in registers (pairs of the accumulator layout), B N-major unless TB is 0.
template <class T, int N> struct mma;
#define KV_MMA(TYPE, NAME, N, LIST, REGS, X0, X1, X2, X3, X4, X5, X6) \
    template <> struct mma<TYPE, N> { \
        template <int TA = 0, int TB = 0> \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b, \
                                                  int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" LIST "}, " X0 ", " X1 ", p, 1, 1, " X3 ", " X4 ";\n}" \
                         : REGS(d) \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB)); \
        } \
        template <int TB = 1> \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t *a, \
                                                  uint64_t b, int accumulate) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n" \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                         " {" LIST "}, {" X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", p, 1, 1, " X6 ";\n}" \
                         : REGS(d) \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), \
                           "n"(TB)); \
        } \
    }
#define KV_MMA_TYPE(TYPE, NAME) \
    KV_MMA(TYPE, NAME, 64, KV_LIST32, KV_R32, "%32", "%33", "%34", "%35", "%36", "%37", "%38"); \
    KV_MMA(TYPE, NAME, 128, KV_LIST64, KV_R64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
KV_MMA_TYPE(__half, "f16");
KV_MMA_TYPE(__nv_bfloat16, "bf16");
#undef KV_MMA_TYPE
#undef KV_MMA

// Products of a 64-row with an N-row tile over head_dim D, one committed group. Issues, does not wait.
template <class T, int D, int N = 128>
__device__ __forceinline__ void tile_product(float (&d)[N / 2], uint64_t a, uint64_t b) {
    mma_begin();
#pragma unroll
    for (int i = 0; i < D / 16; i++)
        mma<T, N>::ss(d, a + step_k_major(i, 64), b + step_k_major(i, N), i > 0);
    mma_commit();
}

} // namespace hopper

#endif
