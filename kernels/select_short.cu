// From static priorities to evict_at (kv_select) for documents that one block sorts: ranks and cutoffs never leave the chip.
#include "kernels/select.cuh"
#include "kernels/select_walk.cuh"

namespace {

using namespace ranks;

constexpr size_t WALK_AT = SMALL * sizeof(uint16_t); // behind the ranks
constexpr size_t SHARED = sizeof(sort_shared) > WALK_AT + sizeof(walk_shared)
                              ? sizeof(sort_shared)
                              : WALK_AT + sizeof(walk_shared);

// One block per head. priority, evict_at [head][n]; m arrivals, k of them are kept.
__global__ void __launch_bounds__(THREADS, 1)
    select_kernel(const float *priority, int n, int sinks, int window, int m, int k,
                  int32_t *evict_at) {
    extern __shared__ __align__(16) char raw[];
    sort_shared &sort = *reinterpret_cast<sort_shared *>(raw);
    walk_shared &walk = *reinterpret_cast<walk_shared *>(raw + WALK_AT);
    const size_t head = (size_t)blockIdx.x * (size_t)n;
    sort_head(sort, priority + head, n);
    walk_head(walk, sort.rank, sinks, m, k);
    for (int t = (int)threadIdx.x; t < n; t += THREADS) {
        const int a = t - sinks, at = a >= 0 && a < m ? leaves_at(walk, a, sort.rank[t]) : -1;
        evict_at[head + (size_t)t] = at < 0 ? KV_NEVER : at + sinks + window;
    }
}

} // namespace

bool kv_select_is_short(const kv_gpu *g, int32_t n, const kv_run *run) {
    const int kept = run->budget - run->sinks - run->window;
    return n <= SMALL && SHARED <= g->shared_limit && kept > 0 &&
           n - run->sinks - run->window > kept;
}

kv_status kv_select_short(kv_gpu *g, int32_t n_head, int32_t n, const kv_run *run,
                          const float *priority, int32_t *evict_at) {
    KV_RETURN(kv_allow_shared(g, select_kernel, SHARED));
    select_kernel<<<(unsigned)n_head, THREADS, SHARED, g->stream>>>(
        priority, n, run->sinks, run->window, n - run->sinks - run->window,
        run->budget - run->sinks - run->window, evict_at);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
