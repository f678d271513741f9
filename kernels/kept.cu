// From evict_at to key lists (performance.md B.3): the kept sets of 64 neighbouring queries differ by at most 64 arrivals and 64
// departures, so one list serves all of them and all query heads of the group. Order inside a list does not matter to attention;
// keys that need no mask come first.
#include <new>

#include "kernels/kept.cuh"

namespace {

constexpr size_t GENEROUS = (size_t)2 << 30; // bytes that may be taken for lists of unknown length
constexpr int WARPS = 8;                     // that build one list, each from its share of the keys

enum key_class { FAR, NEAR, PART, UNSEEN };

struct kept_args {
    const int *evict_at;
    kept_block *block;
    int *list;
    int n_token, n_block, sinks, window;
    bool ordered;
    bool roomy; // every list has room for all keys; otherwise block[].first says where it starts
};

__device__ key_class classify(int t, int gone, int u0, int u1, const kept_args &a) {
    if (t > u1 || gone <= u0) return UNSEEN;
    if (a.ordered || t > u0 || gone <= u1) return PART;
    if (t >= a.sinks && t <= u0 - a.window) return FAR;
    return t < a.sinks || t > u1 - a.window ? NEAR : PART;
}

// Keys of the lists of blocks 0..b-1 when they hold all keys up to their last query.
__host__ __device__ __forceinline__ int64_t room_before(int64_t b) {
    return b * (b + 1) / 2 * KV_BLOCK;
}

// One block per (64 queries, KV head), one share of the keys per warp: counts them, then, unless COUNT, writes them where the
// counts say.
template <bool COUNT> __global__ __launch_bounds__(32 * WARPS) void list_kernel(kept_args a) {
    const int b = (int)blockIdx.x, kv = (int)blockIdx.y, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32, u0 = b * KV_BLOCK, u1 = min(u0 + KV_BLOCK, a.n_token) - 1;
    const int *gone = a.evict_at + (size_t)kv * (size_t)a.n_token;
    kept_block *block = a.block + (size_t)kv * (size_t)a.n_block + (size_t)b;
    const int steps = (u1 + 32 * WARPS) / (32 * WARPS); // of 32 keys, for each warp
    __shared__ int share[WARPS][3];
    const int end = u0 - a.window; // last key inside every E(u)
    // Almost all steps hold only keys that are in every E(u) while they live.
    auto inner = [&](int t) { return !a.ordered && t >= a.sinks && t + 31 <= end; };
    auto load = [&](int t) { return t + lane <= u1 ? __ldg(gone + t + lane) : 0; };
    int found[3] = {};
#pragma unroll 4
    for (int i = 0; i < steps; i++) {
        const int t = (warp * steps + i) * 32, until = load(t);
        if (inner(t)) {
            found[FAR] += until > u1;
            found[PART] += until > u0 && until <= u1;
        } else {
            const key_class of = classify(t + lane, until, u0, u1, a);
#pragma unroll
            for (int c = 0; c < 3; c++) found[c] += of == c;
        }
    }
#pragma unroll
    for (int c = 0; c < 3; c++) {
        found[c] = __reduce_add_sync(~0u, found[c]);
        if (lane == 0) share[warp][c] = found[c];
    }
    const int64_t first = a.roomy ? kv * room_before(a.n_block) + room_before(b) : block->first;
    __syncthreads();
    int sum[3] = {}, before[3] = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int c = 0; c < 3; c++) {
            if (w == warp) before[c] = sum[c];
            sum[c] += share[w][c];
        }
    if (threadIdx.x == 0) *block = kept_block{first, sum[FAR], sum[NEAR], sum[PART]};
    if (COUNT) return;
    int *to[3];
    to[FAR] = a.list + first + before[FAR];
    to[NEAR] = a.list + first + sum[FAR] + before[NEAR];
    to[PART] = a.list + first + sum[FAR] + sum[NEAR] + before[PART];
    const uint32_t before_lane = (1u << lane) - 1;
    auto put = [&](int c, bool here, int key) {
        const uint32_t peers = __ballot_sync(~0u, here);
        if (here) to[c][__popc(peers & before_lane)] = key;
        to[c] += __popc(peers);
    };
#pragma unroll 4
    for (int i = 0; i < steps; i++) {
        const int t = (warp * steps + i) * 32, until = load(t);
        if (inner(t)) {
            put(FAR, until > u1, t + lane);
            const bool part = until > u0 && until <= u1;
            if (__any_sync(~0u, part)) put(PART, part, t + lane);
        } else {
            const key_class of = classify(t + lane, until, u0, u1, a);
#pragma unroll
            for (int c = 0; c < 3; c++) put(c, of == c, t + lane);
        }
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

kv_status make_room(kv_gpu_plan *p, int64_t keys) {
    const size_t need = (size_t)keys * sizeof(int);
    if (p->list && p->list->bytes >= need) return KV_OK;
    KV_RETURN(kv_gpu_free(p->list));
    p->list = nullptr;
    return kv_gpu_new(p->gpu, need, &p->list);
}

// Where lists start that follow each other without gaps.
kv_status place_lists(kv_gpu_plan *p, const kept_args &a, dim3 grid) {
    kv_gpu *g = p->gpu;
    kv_scratch total;
    int64_t keys = 0;
    KV_RETURN(total.reserve(g, sizeof keys));
    list_kernel<true><<<grid, 32 * WARPS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    offset_kernel<<<1, 1024, 0, g->stream>>>(a.block, p->n_kv_head * p->n_block,
                                             total.as<int64_t>());
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_gpu_get(total.buffer, &keys, sizeof keys));
    return make_room(p, keys);
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
    a.n_token = p->n_token;
    a.n_block = p->n_block;
    a.sinks = p->sinks;
    a.window = p->window;
    a.ordered = p->ordered;
    // Short documents get room for any evict_at, so that the host need not wait for the counts.
    const int64_t keys = p->n_kv_head * room_before(p->n_block);
    a.roomy = (size_t)keys * sizeof(int) <= GENEROUS;
    KV_RETURN(a.roomy ? make_room(p, keys) : place_lists(p, a, grid));
    a.list = kv_data<int>(p->list);
    list_kernel<false><<<grid, 32 * WARPS, 0, g->stream>>>(a);
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
    (void)kv_gpu_free(p->list);
    (void)kv_gpu_free(p->evict_at);
    delete p;
}

kv_status kv_gpu_plan_pairs(kv_gpu_plan *p, int32_t n_q_head, double *pairs) {
    const size_t blocks = (size_t)p->n_kv_head * (size_t)p->n_block;
    kept_block *host = new (std::nothrow) kept_block[blocks];
    if (!host) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    const kv_status st = kv_gpu_get(p->block, host, blocks * sizeof *host);
    int64_t visits = 0;
    for (size_t i = 0; st == KV_OK && i < blocks; i++)
        visits += host[i].far + host[i].near + host[i].part;
    delete[] host;
    *pairs = (double)visits * KV_BLOCK * (n_q_head / p->n_kv_head);
    return st;
}
