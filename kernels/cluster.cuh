// Exchanges between the blocks of a cluster through distributed shared memory. A cluster of one block needs none of it, so the code
// that uses them also serves GPUs without clusters.
//
// Exchange number n of a block uses barrier n % 2, and buffers that alternate likewise: a block is never more than one exchange ahead,
// because each exchange needs a part from every block. Between reading what one exchange brought and sending in the exchange after the
// next, the threads of a block must have met.
#ifndef KV_KERNELS_CLUSTER_CUH
#define KV_KERNELS_CLUSTER_CUH

#include <stdint.h>

namespace cluster {

__device__ __forceinline__ uint32_t address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// Both barriers, by one thread each; a cluster barrier must follow.
__device__ __forceinline__ void init(uint64_t *barriers) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x < 2) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barriers + threadIdx.x))
                     : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#endif
}

// A float of another block's shared memory, at the place that p has in this block's.
__device__ __forceinline__ float read(const float *p, int block) {
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    float x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(p)), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
    return x;
#else
    return *p;
#endif
}

// What the threads of this warp know to be written is written for the blocks that receive what they publish from here on. The
// completion of st.async releases its own bytes only.
__device__ __forceinline__ void release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
#endif
}

// All threads of a block hold the same copy.
struct exchange {
    uint64_t *barriers; // [2], shared memory
    int n_block;
    uint32_t count; // of exchanges before

    // How many bytes the next exchange brings.
    __device__ __forceinline__ void announce(int bytes) const {
#if __CUDA_ARCH__ >= 900
        if (n_block > 1 && threadIdx.x == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                             address(barriers + count % 2)),
                         "r"(bytes)
                         : "memory");
#endif
    }
    // 16 bytes, equal in all lanes of a warp, to the same place in every block.
    __device__ __forceinline__ void publish(void *to, uint4 x) const {
        const int lane = (int)threadIdx.x % 32;
        if (n_block == 1) {
            if (lane == 0) *static_cast<uint4 *>(to) = x;
            return;
        }
#if __CUDA_ARCH__ >= 900
        if (lane < n_block) {
            uint32_t there, bell;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(to)), "r"(lane));
            asm("mapa.shared::cluster.u32 %0, %1, %2;"
                : "=r"(bell)
                : "r"(address(barriers + count % 2)), "r"(lane));
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                         "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
                         "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(bell)
                         : "memory");
        }
#endif
    }
    // Waits until every block's part is here.
    __device__ __forceinline__ void receive() {
        if (n_block == 1) {
            __syncthreads();
        } else {
#if __CUDA_ARCH__ >= 900
            uint32_t done;
            do {
                asm volatile(
                    "{\n.reg .pred p;\n"
                    "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                    "selp.u32 %0, 1, 0, p;\n}"
                    : "=r"(done)
                    : "r"(address(barriers + count % 2)), "r"(count / 2 % 2)
                    : "memory");
            } while (!done);
#endif
        }
        count++;
    }
};

} // namespace cluster

#endif
