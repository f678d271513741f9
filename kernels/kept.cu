// From evict_at to key lists (performance.md B.3): the kept sets of 64 neighbouring queries differ by at most 64 arrivals and 64
// departures, so one list serves all of them and all query heads of the group. Order inside a list does not matter to attention;
// keys that need no mask come first.
#include <new>

#include "kernels/kept.cuh"

namespace {

constexpr size_t GENEROUS = (size_t)2 << 30; // bytes that may be taken for lists of unknown length

enum key_class { FAR, NEAR, PART, UNSEEN };

struct kept_args {
    const int *evict_at;
    kept_block *block;
    int3 *share;
    int *list;
    int n_token, n_block, sinks, window;
    bool ordered;
};

__device__ key_class classify(int t, int gone, int u0, int u1, const kept_args &a) {
    if (t > u1 || gone <= u0) return UNSEEN;
    if (a.ordered || t > u0 || gone <= u1) return PART;
    if (t >= a.sinks && t <= u0 - a.window) return FAR;
    return t < a.sinks || t > u1 - a.window ? NEAR : PART;
}

// One block per (64 queries, KV head), one share of the keys per warp: counts, or writes where the counts say.
template <bool WRITE>
__global__ __launch_bounds__(32 * KV_LIST_WARPS) void list_kernel(kept_args a) {
    const int b = (int)blockIdx.x, kv = (int)blockIdx.y, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, u0 = b * KV_BLOCK, u1 = min(u0 + KV_BLOCK, a.n_token) - 1;
    const int *gone = a.evict_at + (size_t)kv * (size_t)a.n_token;
    const size_t at = (size_t)kv * (size_t)a.n_block + (size_t)b;
    const int steps = (u1 + 32 * KV_LIST_WARPS) / (32 * KV_LIST_WARPS); // of 32 keys, for each warp
    int64_t to[3] = {};
    if (WRITE) {
        const kept_block out = a.block[at];
        to[FAR] = out.first;
        to[NEAR] = to[FAR] + out.far;
        to[PART] = to[NEAR] + out.near;
        for (int w = 0; w < warp; w++) {
            const int3 other = a.share[at * KV_LIST_WARPS + (size_t)w];
            to[FAR] += other.x;
            to[NEAR] += other.y;
            to[PART] += other.z;
        }
    }
#pragma unroll 4
    for (int i = 0; i < steps; i++) {
        const int t = (warp * steps + i) * 32 + lane;
        const key_class of = t <= u1 ? classify(t, __ldg(gone + t), u0, u1, a) : UNSEEN;
#pragma unroll
        for (int c = 0; c < 3; c++) {
            const uint32_t peers = __ballot_sync(~0u, of == c);
            if (WRITE && of == c) a.list[to[c] + __popc(peers & ((1u << lane) - 1))] = t;
            to[c] += __popc(peers);
        }
    }
    if (WRITE) return;
    if (lane == 0)
        a.share[at * KV_LIST_WARPS + (size_t)warp] =
            make_int3((int)to[FAR], (int)to[NEAR], (int)to[PART]);
    __syncthreads();
    if (threadIdx.x == 0) {
        kept_block sum = {};
        for (int w = 0; w < KV_LIST_WARPS; w++) {
            const int3 other = a.share[at * KV_LIST_WARPS + (size_t)w];
            sum.far += other.x;
            sum.near += other.y;
            sum.part += other.z;
        }
        a.block[at] = sum;
    }
}

// Offsets of n lists, one after the other, by one block of 1024 threads; their whole length in *sum.
__global__ void offset_kernel(kept_block *block, int n, int64_t *sum) {
    __shared__ int64_t warp_sum[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t base = 0;
    for (int first = 0; first < n; first += 1024) {
        const int i = first + (int)threadIdx.x;
        const int64_t own = i < n ? block[i].far + block[i].near + block[i].part : 0;
        int64_t x = own;
        for (int d = 1; d < 32; d *= 2) {
            const int64_t y = __shfl_up_sync(~0u, x, d);
            if (lane >= d) x += y;
        }
        if (lane == 31) warp_sum[warp] = x;
        __syncthreads();
        int64_t before = 0, all = 0;
        for (int w = 0; w < 32; w++) {
            if (w < warp) before += warp_sum[w];
            all += warp_sum[w];
        }
        if (i < n) block[i].first = base + before + x - own;
        base += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) *sum = base;
}

// Room for the lists. Short documents get room for any evict_at, so that the host need not wait for the counts.
kv_status make_room(kv_gpu_plan *p) {
    const size_t blocks = (size_t)p->n_block;
    size_t need = (size_t)p->n_kv_head * blocks * (blocks + 1) / 2 * KV_BLOCK * sizeof(int);
    if (need > GENEROUS) {
        int64_t total = 0;
        KV_RETURN(kv_gpu_get(p->total, &total, sizeof total));
        need = (size_t)total * sizeof(int);
    }
    if (p->list && p->list->bytes >= need) return KV_OK;
    KV_RETURN(kv_gpu_free(p->list));
    p->list = nullptr;
    return kv_gpu_new(p->gpu, need, &p->list);
}

} // namespace

kv_status kv_gpu_plan_fill(kv_gpu_plan *p, const kv_gpu_buffer *evict_at) {
    kv_gpu *g = p->gpu;
    const size_t bytes = (size_t)p->n_kv_head * (size_t)p->n_token * sizeof(int);
    const dim3 grid((unsigned)p->n_block, (unsigned)p->n_kv_head);
    kept_args a = {};
    KV_RETURN(kv_buffer_check(evict_at, "evict_at", bytes, 1));
    KV_CUDA(cudaMemcpyAsync(p->evict_at->data, evict_at->data, bytes, cudaMemcpyDeviceToDevice,
                            g->stream));
    a.evict_at = kv_data<int>(p->evict_at);
    a.block = kv_data<kept_block>(p->block);
    a.share = kv_data<int3>(p->share);
    a.n_token = p->n_token;
    a.n_block = p->n_block;
    a.sinks = p->sinks;
    a.window = p->window;
    a.ordered = p->ordered;
    list_kernel<false><<<grid, 32 * KV_LIST_WARPS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    offset_kernel<<<1, 1024, 0, g->stream>>>(a.block, p->n_kv_head * p->n_block,
                                             kv_data<int64_t>(p->total));
    KV_CUDA(cudaGetLastError());
    KV_RETURN(make_room(p));
    a.list = kv_data<int>(p->list);
    list_kernel<true><<<grid, 32 * KV_LIST_WARPS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

// A plan of shape and kind as in `want`.
static kv_status make_plan(const kv_gpu_plan &want, const kv_gpu_buffer *evict_at,
                           kv_gpu_plan **out) {
    *out = nullptr;
    kv_gpu_plan *p = new (std::nothrow) kv_gpu_plan(want);
    if (!p) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    kv_gpu *g = p->gpu;
    const int32_t n_kv_head = p->n_kv_head, n_token = p->n_token;
    p->n_block = kv_div_up(n_token, KV_BLOCK);
    const size_t blocks = (size_t)n_kv_head * (size_t)p->n_block;
    kv_status st = kv_gpu_new(g, blocks * sizeof(kept_block), &p->block);
    if (st == KV_OK) st = kv_gpu_new(g, blocks * KV_LIST_WARPS * sizeof(int3), &p->share);
    if (st == KV_OK) st = kv_gpu_new(g, sizeof(int64_t), &p->total);
    if (st == KV_OK)
        st = kv_gpu_new(g, (size_t)n_kv_head * (size_t)n_token * sizeof(int), &p->evict_at);
    if (st == KV_OK) st = kv_gpu_plan_fill(p, evict_at);
    if (st == KV_OK)
        *out = p;
    else
        kv_gpu_plan_free(p);
    return st;
}

kv_status kv_gpu_plan_new(kv_gpu *g, int32_t n_kv_head, int32_t n_token, int32_t sinks,
                          int32_t window, const kv_gpu_buffer *evict_at, kv_gpu_plan **out) {
    kv_gpu_plan want = {};
    want.gpu = g;
    want.n_kv_head = n_kv_head;
    want.n_token = n_token;
    want.sinks = sinks;
    want.window = window;
    return make_plan(want, evict_at, out);
}

kv_status kv_plan_ordered_new(kv_gpu *g, int32_t n_kv_head, int32_t n_token,
                              const kv_gpu_buffer *evict_at, kv_gpu_plan **out) {
    kv_gpu_plan want = {};
    want.gpu = g;
    want.n_kv_head = n_kv_head;
    want.n_token = n_token;
    want.ordered = true;
    return make_plan(want, evict_at, out);
}

void kv_gpu_plan_free(kv_gpu_plan *p) {
    if (!p) return;
    (void)kv_gpu_free(p->block);
    (void)kv_gpu_free(p->share);
    (void)kv_gpu_free(p->total);
    (void)kv_gpu_free(p->list);
    (void)kv_gpu_free(p->evict_at);
    delete p;
}

kv_status kv_gpu_plan_pairs(kv_gpu_plan *p, int32_t n_q_head, double *pairs) {
    int64_t visits = 0;
    KV_RETURN(kv_gpu_get(p->total, &visits, sizeof visits));
    *pairs = (double)visits * KV_BLOCK * (n_q_head / p->n_kv_head);
    return KV_OK;
}
