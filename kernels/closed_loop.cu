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

#include "kernels/closed_loop_kernel.cuh"

using namespace closed_loop;

namespace {

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
