// From evict_at to key lists (performance.md B.3): the kept sets of 64 neighbouring queries differ by at most 64 arrivals and 64
// departures, so one list serves all of them and all query heads of the group. Order inside a list does not matter to attention;
// keys that need no mask come first.
#include <new>

#include "kernels/kept.cuh"

namespace {

constexpr int THREADS = 256, PER_THREAD = 4, CHUNK = THREADS * PER_THREAD;

enum key_class { FAR, NEAR, PART, UNSEEN };

struct kept_args {
    const int *evict_at;
    kept_block *block;
    int *list;
    int n_token, n_block, sinks, window;
};

__device__ key_class classify(int t, int gone, int u0, int u1, const kept_args &a) {
    if (t > u1 || gone <= u0) return UNSEEN;
    if (t > u0 || gone <= u1) return PART;
    if (t >= a.sinks && t <= u0 - a.window) return FAR;
    return t < a.sinks || t > u1 - a.window ? NEAR : PART;
}

// Prefix of each class over the threads before this one, and the total over the block.
__device__ void scan(const int (&own)[3], int (&before)[3], int (&total)[3]) {
    __shared__ int warp_sum[3][THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < 3; c++) {
        int x = own[c];
        for (int d = 1; d < 32; d *= 2) {
            const int y = __shfl_up_sync(~0u, x, d);
            if (lane >= d) x += y;
        }
        before[c] = x - own[c];
        if (lane == 31) warp_sum[c][warp] = x;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 3; c++) {
        total[c] = 0;
        for (int w = 0; w < THREADS / 32; w++) {
            if (w == warp) before[c] += total[c];
            total[c] += warp_sum[c][w];
        }
    }
    __syncthreads();
}

// One block per (64 queries, KV head): counts, or writes the list at the offsets that the counts gave.
template <bool WRITE> __global__ void list_kernel(kept_args a) {
    const int b = (int)blockIdx.x, kv = (int)blockIdx.y;
    const int u0 = b * KV_BLOCK, u1 = min(u0 + KV_BLOCK, a.n_token) - 1;
    const int *gone = a.evict_at + (size_t)kv * (size_t)a.n_token;
    kept_block *out = &a.block[(size_t)kv * (size_t)a.n_block + (size_t)b];
    int64_t at[3] = {};
    if (WRITE) {
        at[FAR] = out->first;
        at[NEAR] = at[FAR] + out->far;
        at[PART] = at[NEAR] + out->near;
    }
    for (int first = 0; first <= u1; first += CHUNK) {
        key_class of[PER_THREAD];
        int own[3] = {}, before[3], total[3];
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const int t = first + (int)threadIdx.x * PER_THREAD + i;
            of[i] = t <= u1 ? classify(t, gone[t], u0, u1, a) : UNSEEN;
#pragma unroll
            for (int c = 0; c < 3; c++) own[c] += of[i] == c;
        }
        scan(own, before, total);
        if (WRITE)
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                for (int c = 0; c < 3; c++)
                    if (of[i] == c)
                        a.list[at[c] + before[c]++] = first + (int)threadIdx.x * PER_THREAD + i;
#pragma unroll
        for (int c = 0; c < 3; c++) at[c] += total[c];
    }
    if (!WRITE && threadIdx.x == 0)
        *out = kept_block{0, (int)at[FAR], (int)at[NEAR], (int)at[PART]};
}

// Offsets of n lists, one after the other; their whole length in *sum.
__global__ void offset_kernel(kept_block *block, int n, int64_t *sum) {
    __shared__ int64_t part[1024];
    int64_t base = 0;
    for (int first = 0; first < n; first += 1024) {
        const int i = first + (int)threadIdx.x;
        const int64_t own = i < n ? block[i].far + block[i].near + block[i].part : 0;
        part[threadIdx.x] = own;
        __syncthreads();
        for (int d = 1; d < 1024; d *= 2) {
            const int64_t y = (int)threadIdx.x >= d ? part[threadIdx.x - d] : 0;
            __syncthreads();
            part[threadIdx.x] += y;
            __syncthreads();
        }
        if (i < n) block[i].first = base + part[threadIdx.x] - own;
        base += part[1023];
        __syncthreads();
    }
    if (threadIdx.x == 0) *sum = base;
}

} // namespace

kv_status kv_gpu_plan_fill(kv_gpu_plan *p, const kv_gpu_buffer *evict_at) {
    kv_gpu *g = p->gpu;
    const size_t bytes = (size_t)p->n_kv_head * (size_t)p->n_token * sizeof(int);
    const dim3 grid((unsigned)p->n_block, (unsigned)p->n_kv_head);
    kv_scratch sum;
    kept_args a = {};
    KV_RETURN(kv_buffer_check(evict_at, "evict_at", bytes, 1));
    KV_RETURN(sum.reserve(g, sizeof(int64_t)));
    KV_CUDA(cudaMemcpyAsync(p->evict_at->data, evict_at->data, bytes, cudaMemcpyDeviceToDevice,
                            g->stream));
    a.evict_at = kv_data<int>(p->evict_at);
    a.block = kv_data<kept_block>(p->block);
    a.n_token = p->n_token;
    a.n_block = p->n_block;
    a.sinks = p->sinks;
    a.window = p->window;
    list_kernel<false><<<grid, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    offset_kernel<<<1, 1024, 0, g->stream>>>(a.block, p->n_kv_head * p->n_block, sum.as<int64_t>());
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_gpu_get(sum.buffer, &p->visits, sizeof p->visits));
    const size_t need = (size_t)p->visits * sizeof(int);
    if (!p->list || p->list->bytes < need) {
        KV_RETURN(kv_gpu_free(p->list));
        p->list = nullptr;
        KV_RETURN(kv_gpu_new(g, need + need / 8, &p->list));
    }
    a.list = kv_data<int>(p->list);
    list_kernel<true><<<grid, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status kv_gpu_plan_new(kv_gpu *g, int32_t n_kv_head, int32_t n_token, int32_t sinks,
                          int32_t window, const kv_gpu_buffer *evict_at, kv_gpu_plan **out) {
    *out = nullptr;
    kv_gpu_plan *p = new (std::nothrow) kv_gpu_plan();
    if (!p) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    p->gpu = g;
    p->n_kv_head = n_kv_head;
    p->n_token = n_token;
    p->n_block = kv_div_up(n_token, KV_BLOCK);
    p->sinks = sinks;
    p->window = window;
    const size_t cells = (size_t)n_kv_head * (size_t)n_token;
    kv_status st =
        kv_gpu_new(g, (size_t)n_kv_head * (size_t)p->n_block * sizeof(kept_block), &p->block);
    if (st == KV_OK) st = kv_gpu_new(g, cells * sizeof(int), &p->evict_at);
    if (st == KV_OK) st = kv_gpu_plan_fill(p, evict_at);
    if (st == KV_OK)
        *out = p;
    else
        kv_gpu_plan_free(p);
    return st;
}

void kv_gpu_plan_free(kv_gpu_plan *p) {
    if (!p) return;
    (void)kv_gpu_free(p->block);
    (void)kv_gpu_free(p->list);
    (void)kv_gpu_free(p->evict_at);
    delete p;
}

kv_status kv_gpu_plan_pairs(kv_gpu_plan *p, int32_t n_q_head, double *pairs) {
    *pairs = (double)p->visits * KV_BLOCK * (n_q_head / p->n_kv_head);
    return KV_OK;
}
