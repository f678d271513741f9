// Device, stream, memory with optional guard borders, device clock, copy ceiling.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels/device.cuh"

namespace {

constexpr size_t BORDER = 256; // bytes on each side of a guarded buffer
constexpr unsigned char POISON = 0xff; // NaN in every floating-point format

__global__ void empty_kernel() {}

kv_status stream_wait(kv_gpu *g) {
    KV_CUDA(cudaStreamSynchronize(g->stream));
    return KV_OK;
}

} // namespace

kv_status kv_cuda_fail(cudaError_t error, const char *what, const char *file, int line) {
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return kv_fail_at(file, line, KV_E_UNAVAILABLE,
                          "this kvlab holds no code for this GPU (%s); rebuild with "
                          "`make CUDA_ARCHS=\"...\"` naming its compute capability",
                          cudaGetErrorString(error));
    return kv_fail_at(file, line, KV_E_INTERNAL, "CUDA: %s: %s", what, cudaGetErrorString(error));
}

kv_status kv_gpu_open(kv_gpu **out) {
    *out = nullptr;
    int count = 0;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count == 0)
        return KV_FAIL(
            KV_E_UNAVAILABLE,
            "no usable GPU: %s; this build needs an NVIDIA GPU and a driver for CUDA %d or newer "
            "(`nvidia-smi` shows both); everything but verify runs with --device cpu",
            e != cudaSuccess ? cudaGetErrorString(e) : "no device found", CUDART_VERSION / 1000);
    kv_gpu *g = new (std::nothrow) kv_gpu();
    if (!g) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    *out = g;
    int limit = 0;
    KV_CUDA(cudaGetDevice(&g->device));
    KV_CUDA(cudaDeviceGetAttribute(&g->sm_count, cudaDevAttrMultiProcessorCount, g->device));
    KV_CUDA(cudaDeviceGetAttribute(&g->cc_major, cudaDevAttrComputeCapabilityMajor, g->device));
    KV_CUDA(cudaDeviceGetAttribute(&g->cc_minor, cudaDevAttrComputeCapabilityMinor, g->device));
    KV_CUDA(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, g->device));
    g->shared_limit = (size_t)limit;
    KV_CUDA(cudaStreamCreateWithFlags(&g->stream, cudaStreamNonBlocking));
    for (cudaEvent_t &tick : g->tick) KV_CUDA(cudaEventCreate(&tick));
    // Freed memory stays with the process: scratch is taken and returned by every call.
    cudaMemPool_t pool;
    uint64_t keep = UINT64_MAX;
    KV_CUDA(cudaDeviceGetDefaultMemPool(&pool, g->device));
    KV_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    const char *guard = getenv("KV_GPU_GUARD"), *path = getenv("KV_GPU_PATH");
    g->guard = guard && !strcmp(guard, "1");
    if (path && strcmp(path, "portable") != 0 && strcmp(path, "hopper") != 0)
        return KV_FAIL(KV_E_USAGE, "KV_GPU_PATH is '%s', expected 'hopper' or 'portable'", path);
    const bool wanted = !path || !strcmp(path, "hopper");
    if (path && wanted)
        KV_RETURN(kv_gpu_use_hopper(g, true));
    else if (wanted && kv_gpu_use_hopper(g, true) != KV_OK)
        kv_error_clear();
    empty_kernel<<<1, 1, 0, g->stream>>>();
    KV_CUDA(cudaGetLastError());
    return stream_wait(g);
}

void kv_gpu_close(kv_gpu *g) {
    if (!g) return;
    for (cudaEvent_t tick : g->tick)
        if (tick) cudaEventDestroy(tick);
    if (g->stream) cudaStreamDestroy(g->stream);
    delete g;
}

void kv_gpu_describe(kv_gpu *g, kv_gpu_info *out) {
    cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    *out = kv_gpu_info{};
    if (cudaGetDeviceProperties(&p, g->device) == cudaSuccess)
        strncpy(out->name, p.name, sizeof out->name - 1);
    (void)cudaMemGetInfo(&free_bytes, &total);
    out->sm_count = g->sm_count;
    out->cc_major = g->cc_major;
    out->cc_minor = g->cc_minor;
    out->bytes_total = (int64_t)total;
    out->bytes_free = (int64_t)free_bytes;
    out->hopper = g->hopper;
}

kv_status kv_gpu_use_hopper(kv_gpu *g, bool hopper) {
#ifdef KV_HOPPER
    const bool built = true;
#else
    const bool built = false;
#endif
    if (hopper && (!built || g->cc_major != 9))
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "the wgmma kernels need a Hopper GPU (compute capability 9.0, found %d.%d) "
                       "and a build with sm_90a (this one %s it)",
                       g->cc_major, g->cc_minor, built ? "has" : "lacks");
    g->hopper = hopper;
    return KV_OK;
}

void kv_gpu_use_loop_blocks(kv_gpu *g, int32_t n) { g->loop_blocks = n; }

kv_status kv_gpu_sync(kv_gpu *g) { return stream_wait(g); }

kv_status kv_gpu_new(kv_gpu *g, size_t bytes, kv_gpu_buffer **out) {
    *out = nullptr;
    kv_gpu_buffer *b = new (std::nothrow) kv_gpu_buffer();
    if (!b) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    const size_t border = g->guard ? BORDER : 0;
    const size_t whole = (bytes + 255) / 256 * 256 + 2 * border;
    const cudaError_t e = cudaMallocAsync((void **)&b->raw, whole ? whole : 256, g->stream);
    if (e != cudaSuccess) {
        delete b;
        size_t free = 0, total = 0;
        (void)cudaMemGetInfo(&free, &total);
        return KV_FAIL(KV_E_INTERNAL,
                       "the GPU gives no further %zu MiB (%s; %zu of %zu MiB free); end other "
                       "programs on it, take fewer tokens, or run with --device cpu",
                       (whole >> 20) + 1, cudaGetErrorString(e), free >> 20, total >> 20);
    }
    b->gpu = g;
    b->data = b->raw + border;
    b->bytes = bytes;
    *out = b;
    if (g->guard) KV_CUDA(cudaMemsetAsync(b->raw, POISON, whole, g->stream));
    return KV_OK;
}

kv_status kv_gpu_free(kv_gpu_buffer *b) {
    if (!b) return KV_OK;
    kv_gpu *g = b->gpu;
    kv_status st = KV_OK;
    if (g->guard) {
        // The tail between `bytes` and the rounded size belongs to the border.
        const size_t tail = (b->bytes + 255) / 256 * 256 - b->bytes + BORDER;
        std::vector<unsigned char> seen(BORDER + tail);
        cudaError_t e = cudaMemcpyAsync(seen.data(), b->raw, BORDER, cudaMemcpyDefault, g->stream);
        if (e == cudaSuccess)
            e = cudaMemcpyAsync(seen.data() + BORDER, b->data + b->bytes, tail, cudaMemcpyDefault,
                                g->stream);
        if (e == cudaSuccess) e = cudaStreamSynchronize(g->stream);
        if (e != cudaSuccess) st = kv_cuda_fail(e, "guard check", __FILE__, __LINE__);
        for (size_t i = 0; st == KV_OK && i < seen.size(); i++)
            if (seen[i] != POISON)
                st = KV_FAIL(KV_E_MISMATCH,
                             "a kernel wrote %s a GPU buffer of %zu bytes (border byte %zu)",
                             i < BORDER ? "before" : "behind", b->bytes, i);
    }
    (void)cudaFreeAsync(b->raw, g->stream);
    delete b;
    return st;
}

size_t kv_gpu_bytes(const kv_gpu_buffer *b) { return b->bytes; }

kv_status kv_buffer_check(const kv_gpu_buffer *b, const char *name, size_t count, size_t size) {
    if (b && b->bytes < count * size)
        return KV_FAIL(KV_E_USAGE, "GPU buffer '%s' holds %zu bytes, the operation needs %zu", name,
                       b->bytes, count * size);
    return KV_OK;
}

kv_status kv_gpu_put(kv_gpu_buffer *b, const void *host, size_t bytes) {
    KV_RETURN(kv_buffer_check(b, "put", bytes, 1));
    KV_CUDA(cudaMemcpyAsync(b->data, host, bytes, cudaMemcpyHostToDevice, b->gpu->stream));
    return stream_wait(b->gpu);
}

kv_status kv_gpu_get(const kv_gpu_buffer *b, void *host, size_t bytes) {
    KV_RETURN(kv_buffer_check(b, "get", bytes, 1));
    KV_CUDA(cudaMemcpyAsync(host, b->data, bytes, cudaMemcpyDeviceToHost, b->gpu->stream));
    return stream_wait(b->gpu);
}

kv_status kv_gpu_tick(kv_gpu *g, int i) {
    KV_CUDA(cudaEventRecord(g->tick[i], g->stream));
    return KV_OK;
}

kv_status kv_gpu_ms(kv_gpu *g, int from, int to, float *ms) {
    KV_CUDA(cudaEventSynchronize(g->tick[to]));
    KV_CUDA(cudaEventElapsedTime(ms, g->tick[from], g->tick[to]));
    return KV_OK;
}

kv_status kv_gpu_copy_ceiling(kv_gpu *g, size_t bytes, double *tb_per_s) {
    kv_scratch from, to;
    std::vector<float> ms(9);
    KV_RETURN(from.reserve(g, bytes));
    KV_RETURN(to.reserve(g, bytes));
    KV_CUDA(cudaMemsetAsync(from.buffer->data, 0x5a, bytes, g->stream));
    for (size_t i = 0; i < ms.size() + 2; i++) {
        KV_RETURN(kv_gpu_tick(g, 0));
        KV_CUDA(cudaMemcpyAsync(to.buffer->data, from.buffer->data, bytes,
                                cudaMemcpyDeviceToDevice, g->stream));
        KV_RETURN(kv_gpu_tick(g, 1));
        KV_RETURN(kv_gpu_ms(g, 0, 1, &ms[i % ms.size()]));
    }
    std::sort(ms.begin(), ms.end());
    *tb_per_s = 2.0 * (double)bytes / (double)ms[ms.size() / 2] * 1e-9;
    return KV_OK;
}
