// Tensor-core products for any GPU from sm_80 on: cp.async into padded shared tiles, mma.sync. Half and bfloat16 operands enter
// exactly; fp32 operands are split into two tf32 parts and multiplied three times (relative error about 2^-21).
// A block has 4 warps; each warp owns 16 rows of a 64-row tile. Accumulators are laid out as rows.cuh says.
#ifndef KV_KERNELS_PORTABLE_CUH
#define KV_KERNELS_PORTABLE_CUH

#include "kernels/device.cuh"

namespace portable {

constexpr int THREADS = 128, ROWS = 64, COLUMNS = 64; // of a block's stationary and streamed tile

template <class T> __host__ __device__ constexpr int row_stride(int d) {
    return d + 16 / (int)sizeof(T); // 16 bytes of padding: no bank conflicts
}
template <class T> __host__ __device__ constexpr int tile_elements(int d) {
    return ROWS * row_stride<T>(d);
}
// fp32 tiles are twice as large and are not double-buffered, so that two of them and a query tile fit sm_80.
template <class T> __host__ __device__ constexpr int stages() { return sizeof(T) == 4 ? 1 : 2; }

// One block per (64 rows, head), with shared memory for a stationary tile and the stages of `streamed` others.
template <class T, int D, class... P, class... A>
kv_status launch_rows(const kv_gpu_span *s, int streamed, void (*kernel)(P...), A... args) {
    const size_t bytes = (size_t)(1 + streamed * stages<T>()) * tile_elements<T>(D) * sizeof(T);
    const dim3 grid((unsigned)kv_div_up(s->n_token, ROWS), (unsigned)s->n_q_head);
    KV_RETURN(kv_allow_shared(s->gpu, kernel, bytes));
    kernel<<<grid, THREADS, bytes, s->gpu->stream>>>(args...);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

__device__ __forceinline__ void copy16(void *to, const void *from, bool valid) {
    const int bytes = valid ? 16 : 0; // the rest is filled with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 64 rows of D columns into a padded tile; row i comes from x + row(i) * D, zeros where row(i) < 0.
template <class T, int D, class F>
__device__ __forceinline__ void load_rows(T *tile, const T *x, F row) {
    constexpr int per_row = D * (int)sizeof(T) / 16, width = 16 / (int)sizeof(T);
    for (int i = threadIdx.x; i < ROWS * per_row; i += THREADS) {
        const int r = i / per_row, c = i % per_row * width, from = row(r);
        copy16(tile + r * row_stride<T>(D) + c, x + (size_t)max(from, 0) * D + c, from >= 0);
    }
}

__device__ __forceinline__ void mma16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1,
                                      __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1,
                                      __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma8(float *d, const uint32_t *a, const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <int N>
__device__ __forceinline__ void split_tf32(const float (&x)[N], uint32_t (&high)[N],
                                           uint32_t (&low)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high[i]) : "f"(x[i]));
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(low[i]) : "f"(x[i] - __uint_as_float(high[i])));
    }
}
__device__ __forceinline__ void mma_split(float *d, const uint32_t (&ah)[4],
                                          const uint32_t (&al)[4], const float (&b)[2]) {
    uint32_t bh[2], bl[2];
    split_tf32(b, bh, bl);
    mma8(d, al, bh);
    mma8(d, ah, bl);
    mma8(d, ah, bh);
}

template <class T> __device__ __forceinline__ uint32_t word(const T *p) {
    return *reinterpret_cast<const uint32_t *>(p);
}

// x = A B^T over D: a the warp's 16 rows, b 64 rows, both padded tiles.
template <class T, int D>
__device__ __forceinline__ void product(float (&x)[COLUMNS / 2], const T *a, const T *b) {
    constexpr int stride = row_stride<T>(D);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) x[i] = 0;
    if constexpr (sizeof(T) == 4) {
#pragma unroll 2
        for (int k = 0; k < D; k += 8) {
            const float *p = a + g * stride + k + t;
            const float av[4] = {p[0], p[8 * stride], p[4], p[8 * stride + 4]};
            uint32_t high[4], low[4];
            split_tf32(av, high, low);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                const float *q = b + (8 * j + g) * stride + k + t;
                const float bv[2] = {q[0], q[4]};
                mma_split(x + 4 * j, high, low, bv);
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < D; k += 16) {
            const T *p = a + g * stride + k + 2 * t;
            const uint32_t av[4] = {word(p), word(p + 8 * stride), word(p + 8),
                                    word(p + 8 * stride + 8)};
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                const T *q = b + (8 * j + g) * stride + k + 2 * t;
                mma16(x + 4 * j, av, word(q), word(q + 8), T());
            }
        }
    }
}

// Two probabilities packed as T, and what the packing lost.
__device__ __forceinline__ uint32_t pack(float a, float b, __half) {
    const __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&h);
}
__device__ __forceinline__ uint32_t pack(float a, float b, __nv_bfloat16) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t *>(&h);
}
__device__ __forceinline__ uint32_t pack_rest(float a, float b, uint32_t packed, __half type) {
    const __half2 h = *reinterpret_cast<const __half2 *>(&packed);
    return pack(a - __low2float(h), b - __high2float(h), type);
}
__device__ __forceinline__ uint32_t pack_rest(float a, float b, uint32_t packed,
                                              __nv_bfloat16 type) {
    const __nv_bfloat162 h = *reinterpret_cast<const __nv_bfloat162 *>(&packed);
    return pack(a - __low2float(h), b - __high2float(h), type);
}

// o += P V: p [16][64] in accumulator layout, v 64 rows of D columns. exact: P as high and low part.
template <class T, int D>
__device__ __forceinline__ void accumulate(float (&o)[D / 2], const float (&p)[COLUMNS / 2],
                                           const T *v, bool exact) {
    constexpr int stride = row_stride<T>(D);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            // Columns 2t and 2t+1 of P act as k = t and t+4; V's rows follow the same renaming.
            const float av[4] = {p[4 * j], p[4 * j + 2], p[4 * j + 1], p[4 * j + 3]};
            uint32_t high[4], low[4];
            split_tf32(av, high, low);
            const float *q = v + (8 * j + 2 * t) * stride + g;
#pragma unroll
            for (int c = 0; c < D / 8; c++) {
                const float bv[2] = {q[8 * c], q[stride + 8 * c]};
                mma_split(o + 4 * c, high, low, bv);
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
            uint32_t high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float a = p[8 * j + 2 * i], b = p[8 * j + 2 * i + 1];
                high[i] = pack(a, b, T());
                low[i] = pack_rest(a, b, high[i], T());
            }
            const T *row = v + (16 * j + lane % 16) * stride + lane / 16 * 8;
#pragma unroll
            for (int c = 0; c < D / 16; c++) {
                uint32_t b[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                             : "r"((uint32_t)__cvta_generic_to_shared(row + 16 * c)));
                mma16(o + 8 * c, high, b[0], b[1], T());
                mma16(o + 8 * c + 4, high, b[2], b[3], T());
                if (exact) {
                    mma16(o + 8 * c, low, b[0], b[1], T());
                    mma16(o + 8 * c + 4, low, b[2], b[3], T());
                }
            }
        }
    }
}

// Logits from products: scaled, capped (softcap 0: not). Afterwards their unit is log2(e).
template <int N>
__device__ __forceinline__ void to_logits(float (&x)[N], float scale, float softcap) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= scale;
    if (softcap > 0)
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = softcap * tanhf(x[i] / softcap);
}

} // namespace portable

#endif
