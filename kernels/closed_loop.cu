// Closed-loop replay of tova, h2o and cumulative (kv_replay_attention; contract.md 1, 2): the whole document in one launch.
//
// A set of decisions (one KV head, or the heads of a layer) belongs to one cluster of blocks. Global slot g lives in block g % n_block
// and keeps its place while its key changes. Which keys a batch of queries may meet is known before its first one: those that are
// held, and the ones that arrive. Per batch:
//     logits of both against all queries of the batch, every key read once     mma.sync, 16 keys by 8 (head, query); fp32 keys by fma
//     their maximum and the sum of exp(logit - maximum), for every (head, query)    exchanges, through distributed shared memory
// and then per query:
//     p = exp / sum, statistic A, least A with its position                    one thread per slot
//     (A, position, slot) of each block -> every block                         exchange; all agree on the victim
//     the victim's values leave the sums of the later queries, the next key takes its slot
// A sum that falls below 1 has lost the key of its maximum: what it consists of may then be too small for fp32 values, and a new batch
// begins.
//
// Products of half and bfloat16 are exact, sums of logits fp32, exponentials fp32, their sums and the statistic double, as on the
// CPU; only the order of the sums differs, so decisions agree except where two A are closer than rounding. Lockstep mode follows
// given victims and reports how far each was from the least A.
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

template <class T> kernel_fn *kernel_for(int head_dim, bool far) {
    if (head_dim == 128) return far ? loop_kernel<T, 128, true> : loop_kernel<T, 128, false>;
    return far ? loop_kernel<T, 64, true> : loop_kernel<T, 64, false>;
}

kernel_fn *kernel_of(const kv_gpu_span *s, const loop_args &a) {
    if (s->type == KV_F16) return kernel_for<__half>(s->head_dim, a.scratch);
    if (s->type == KV_BF16) return kernel_for<__nv_bfloat16>(s->head_dim, a.scratch);
    return kernel_for<float>(s->head_dim, a.scratch);
}

size_t shared_bytes(const loop_args &a) {
    return (size_t)a.at.bytes + (a.scratch ? 0 : (size_t)a.at.slot_bytes);
}

// Lays out the memory of a block for batches of a->batch queries.
void arrange_batch(const kv_gpu_span *s, loop_args *a) {
    const int element = s->type == KV_F32 ? 4 : 2, rows = a->members * a->group;
    const int columns = rows * a->batch;
    layout *l = &a->at;
    int next = 0;
    const auto take = [&next](int bytes) {
        const int at = next;
        next += (bytes + 15) / 16 * 16;
        return at;
    };
    a->shares = 1;
    for (int n = 2; n <= WARPS; n *= 2) // shares of columns that a warp works on, in columns
        if (kv_div_up(columns * n, WARPS) * a->shares < kv_div_up(columns * a->shares, WARPS) * n)
            a->shares = n;
    a->fresh = kv_div_up(a->n_slot, 4) * 4;
    // The columns that threads write together meet different banks.
    a->pitch = kv_div_up(a->fresh + a->batch, 32) * 32 + 4;
    l->value = take(columns * a->pitch * 4);
    l->a = take(a->n_slot * 8);
    l->time = take(a->n_slot * 4);
    l->slot_bytes = next;
    next = 0;
    l->barrier = take(16);
    // Matrix products read up to 7 columns more.
    l->q = take((columns + 7) * (s->head_dim * element + 64));
    l->part = take(2 * std::max(columns * a->n_block * a->shares, 2 * a->n_block) * 16);
    l->best = take(2 * WARPS * (int)sizeof(candidate));
    l->total = take(columns * (int)sizeof(column_total));
    l->bytes = next;
}

// Shares the slots among n_block blocks; slot arrays that do not fit shared memory go to device memory, which the caller allocates.
void arrange(const kv_gpu_span *s, int n_block, int batch, loop_args *a) {
    const int rows = a->members * a->group;
    int least = INT_MAX;
    a->n_block = n_block;
    a->n_slot = kv_div_up(a->budget + 1, n_block);
    for (int bits = 0; bits <= 5 && 1 << bits <= rows; bits++) {
        // Values that a thread looks at, and what it does once a slot.
        const int work = kv_div_up(a->n_slot << bits, THREADS) * (kv_div_up(rows, 1 << bits) + 8);
        if (work < least) {
            least = work;
            a->split_bits = bits;
        }
    }
    a->batch = batch;
    a->scratch = nullptr;
    arrange_batch(s, a);
    // Blocks do not read each other's device memory, as batches of several queries would.
    if (batch == 1 && shared_bytes(*a) > s->gpu->shared_limit)
        a->scratch = reinterpret_cast<char *>(1);
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

// L1 cache, in KB, beside so much shared memory: an SM splits 256 KB in steps, and takes 1 KB of a block's share for itself.
double cache_beside(size_t shared) {
    for (const size_t kb : {8, 16, 32, 64, 100, 132, 164, 196})
        if (shared + 1024 <= kb * 1024) return 256 - (double)kb;
    return 28;
}

// Clocks that a query takes, roughly, from what an H200 took with 1 to 8 blocks (kernels/NOTES.md): waiting, statistics, and a share
// of the batch's sums, products and keys. Loads in flight need room in the L1 cache, and L2 gives 24 bytes a clock at most.
double clocks_of(const kv_gpu_span *s, const loop_args &a) {
    const double slots = a.n_slot, keys = slots * a.members;
    const double rounds = kv_div_up(a.members * a.group * a.batch * a.shares, WARPS);
    const double weigh = rounds / a.shares * slots * 2.25;
    const double products = s->type == KV_F32
                                ? keys * a.group * a.batch * s->head_dim / 60
                                : keys / 64 * (60 + 45 * kv_div_up(a.group * a.batch, 8));
    const double bytes = keys * s->head_dim * (s->type == KV_F32 ? 4 : 2);
    const double load = bytes / std::min(24.0, cache_beside(shared_bytes(a)) / 4);
    return (a.n_block == 1 ? 2200 : 5300) + slots * (30 + 4 * a.members * a.group) / 128 +
           (1500 + weigh + std::max(products, load)) / a.batch;
}

// Chooses the number of blocks per set and the length of a batch.
void choose(const kv_gpu_span *s, int n_set, loop_args *best) {
    const kv_gpu *g = s->gpu;
    double least = INFINITY;
    loop_args a = *best;
    // The portable path of a Hopper GPU does what older ones do.
    const int most = g->cc_major > 9 || g->hopper ? 8 : 1, fixed = std::min(g->loop_blocks, most);
    for (int n_block = std::max(fixed, 1); n_block <= (fixed ? fixed : most); n_block++)
        for (int batch = 1; batch <= BATCH; batch++) {
            arrange(s, n_block, batch, &a);
            if (shared_bytes(a) > g->shared_limit) break;
            const int at_once = clusters_at_once(g, kernel_of(s, a), a, n_set);
            if (at_once == 0) continue;
            const double clocks = kv_div_up(n_set, at_once) * clocks_of(s, a);
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
    if (members > THREADS) // a thread per member tells of what leaves
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "closed loop: %d KV heads decide together, the GPU takes %d at most; run "
                       "with --device cpu",
                       members, THREADS);
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
    KV_RETURN(failed.reserve_zeros(g, sizeof(int)));
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
    choose(s, n_set, &a);
    if (a.n_block == 0)
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "closed loop: the queries of %d heads do not fit the shared memory of this "
                       "GPU; run with --device cpu",
                       members * group);
    if (a.scratch) {
        KV_RETURN(slots.reserve(g, (size_t)(n_set * a.n_block) * (size_t)a.at.slot_bytes));
        a.scratch = slots.as<char>();
    }
    kernel_fn *kernel = kernel_of(s, a);
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
