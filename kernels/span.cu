// Spans on the device: upload with the narrowest exact number format, random spans for benchmarks, tensor maps.
#include <new>

#include "kernels/device.cuh"

namespace {

enum { NOT_HALF = 1, NOT_BFLOAT = 2 };

// Sets bits of `flags` for formats that cannot hold every element of x[n].
__global__ void exactness_kernel(const float *x, size_t n, int *flags) {
    int f = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        if (__half2float(__float2half_rn(x[i])) != x[i]) f |= NOT_HALF;
        if (__bfloat162float(__float2bfloat16_rn(x[i])) != x[i]) f |= NOT_BFLOAT;
    }
    if (f) atomicOr(flags, f);
}

__device__ float convert(float x, float) { return x; }
__device__ __half convert(float x, __half) { return __float2half_rn(x); }
__device__ __nv_bfloat16 convert(float x, __nv_bfloat16) { return __float2bfloat16_rn(x); }

// y[rows][d_out] from x[rows][d_in], zeros behind d_in.
template <class T>
__global__ void convert_kernel(const float *x, T *y, size_t rows, int d_in, int d_out) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < rows * (size_t)d_out;
         i += (size_t)gridDim.x * blockDim.x) {
        const int c = (int)(i % (size_t)d_out);
        y[i] = convert(c < d_in ? x[i / (size_t)d_out * (size_t)d_in + (size_t)c] : 0.0f, T());
    }
}

__device__ uint32_t mix(uint64_t x) { // splitmix64's finaliser
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (uint32_t)(x >> 32);
}

template <class T> __global__ void normal_kernel(T *y, size_t n, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        const uint64_t at = (seed * 0x9e3779b97f4a7c15ull) ^ (i * 0xd1b54a32d192ed03ull);
        const float u = ((float)mix(at) + 0.5f) * 0x1p-32f, v = (float)mix(~at) * 0x1p-32f;
        y[i] = convert(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v), T());
    }
}

const int BLOCKS = 1024, THREADS = 256;

size_t element(kv_dtype type) { return type == KV_F32 ? 4 : 2; }

kv_status new_span(kv_gpu *g, int32_t n_q_head, int32_t n_kv_head, int32_t n_token, int32_t d_in,
                   kv_gpu_span **out) {
    if (d_in > 128)
        return KV_FAIL(KV_E_UNAVAILABLE,
                       "head size %d: the GPU kernels take up to 128; "
                       "run with --device cpu",
                       d_in);
    if (n_token < 1 || n_kv_head < 1 || n_q_head % n_kv_head != 0)
        return KV_FAIL(KV_E_USAGE, "span of %d tokens, %d query and %d KV heads", n_token, n_q_head,
                       n_kv_head);
    kv_gpu_span *s = new (std::nothrow) kv_gpu_span();
    if (!s) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    s->gpu = g;
    s->n_token = n_token;
    s->n_q_head = n_q_head;
    s->n_kv_head = n_kv_head;
    s->head_dim_in = d_in;
    s->head_dim = d_in <= 64 ? 64 : 128;
    *out = s;
    return KV_OK;
}

size_t elements(const kv_gpu_span *s, int32_t heads) {
    return (size_t)heads * (size_t)s->n_token * (size_t)s->head_dim;
}

kv_status stage(const kv_span *span, const float *x, int32_t heads, kv_scratch *to) {
    kv_gpu *g = to->buffer->gpu;
    const size_t row = (size_t)span->n_token * (size_t)span->head_dim * sizeof(float);
    const size_t pitch = (size_t)span->stride * (size_t)span->head_dim * sizeof(float);
    KV_CUDA(cudaMemcpy2DAsync(to->buffer->data, row, x, pitch, row, (size_t)heads,
                              cudaMemcpyHostToDevice, g->stream));
    return KV_OK;
}

template <class T>
kv_status convert_as(const kv_gpu_span *s, const float *from, kv_gpu_buffer *to, int32_t heads) {
    convert_kernel<T><<<BLOCKS, THREADS, 0, s->gpu->stream>>>(
        from, kv_data<T>(to), (size_t)heads * (size_t)s->n_token, s->head_dim_in, s->head_dim);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status fill(const kv_gpu_span *s, const float *from, int32_t heads, kv_gpu_buffer **to) {
    KV_RETURN(kv_gpu_new(s->gpu, elements(s, heads) * element(s->type), to));
    if (s->type == KV_F16) return convert_as<__half>(s, from, *to, heads);
    if (s->type == KV_BF16) return convert_as<__nv_bfloat16>(s, from, *to, heads);
    return convert_as<float>(s, from, *to, heads);
}

// Chooses the format of device arrays [head][n_token][head_dim_in] and fills the span; v may be null.
kv_status settle(kv_gpu_span *s, const float *q, const float *k, const float *v) {
    kv_gpu *g = s->gpu;
    const size_t cell = (size_t)s->n_token * (size_t)s->head_dim_in;
    kv_scratch flags;
    int found = 0;
    KV_RETURN(flags.reserve_zeros(g, sizeof found));
    for (const float *x : {q, k, v}) {
        if (!x) continue;
        exactness_kernel<<<BLOCKS, THREADS, 0, g->stream>>>(
            x, (size_t)(x == q ? s->n_q_head : s->n_kv_head) * cell, flags.as<int>());
        KV_CUDA(cudaGetLastError());
    }
    KV_RETURN(kv_gpu_get(flags.buffer, &found, sizeof found));
    s->type = !(found & NOT_HALF) ? KV_F16 : !(found & NOT_BFLOAT) ? KV_BF16 : KV_F32;
    KV_RETURN(fill(s, q, s->n_q_head, &s->q));
    KV_RETURN(fill(s, k, s->n_kv_head, &s->k));
    return v ? fill(s, v, s->n_kv_head, &s->v) : KV_OK;
}

kv_status upload(const kv_span *span, kv_gpu_span *s, bool want_v) {
    kv_gpu *g = s->gpu;
    const size_t cell = (size_t)s->n_token * (size_t)s->head_dim_in * sizeof(float);
    kv_scratch q, k, v;
    KV_RETURN(q.reserve(g, (size_t)s->n_q_head * cell));
    KV_RETURN(k.reserve(g, (size_t)s->n_kv_head * cell));
    KV_RETURN(stage(span, span->q, s->n_q_head, &q));
    KV_RETURN(stage(span, span->k, s->n_kv_head, &k));
    if (want_v) {
        KV_RETURN(v.reserve(g, (size_t)s->n_kv_head * cell));
        KV_RETURN(stage(span, span->v, s->n_kv_head, &v));
    }
    return settle(s, q.as<float>(), k.as<float>(), want_v ? v.as<float>() : nullptr);
}

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// y[rows][d_out] from x[rows][d_in], d_out <= d_in.
template <class T>
__global__ void widen_kernel(const T *x, float *y, size_t rows, int d_in, int d_out) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < rows * (size_t)d_out;
         i += (size_t)gridDim.x * blockDim.x)
        y[i] = widen(x[i / (size_t)d_out * (size_t)d_in + i % (size_t)d_out]);
}

template <class T>
kv_status floats_as(const kv_gpu_span *s, const kv_gpu_buffer *from, kv_gpu_buffer **to) {
    const size_t rows = (size_t)s->n_kv_head * (size_t)s->n_token;
    KV_RETURN(kv_gpu_new(s->gpu, rows * (size_t)s->head_dim_in * sizeof(float), to));
    widen_kernel<T><<<BLOCKS, THREADS, 0, s->gpu->stream>>>(kv_data<T>(from), kv_data<float>(*to),
                                                            rows, s->head_dim, s->head_dim_in);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status floats(const kv_gpu_span *s, const kv_gpu_buffer *from, kv_gpu_buffer **to) {
    if (s->type == KV_F16) return floats_as<__half>(s, from, to);
    if (s->type == KV_BF16) return floats_as<__nv_bfloat16>(s, from, to);
    return floats_as<float>(s, from, to);
}

template <class T> kv_status normal(kv_gpu_buffer *b, size_t n, uint64_t seed) {
    normal_kernel<<<BLOCKS, THREADS, 0, b->gpu->stream>>>(kv_data<T>(b), n, seed);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status random_array(const kv_gpu_span *s, int32_t heads, uint64_t seed, kv_gpu_buffer **to) {
    const size_t n = elements(s, heads);
    KV_RETURN(kv_gpu_new(s->gpu, n * element(s->type), to));
    if (s->type == KV_F16) return normal<__half>(*to, n, seed);
    if (s->type == KV_BF16) return normal<__nv_bfloat16>(*to, n, seed);
    return normal<float>(*to, n, seed);
}

} // namespace

// An empty span of this shape, filled by `work`; freed when that fails.
template <class F>
static kv_status make_span(kv_gpu *g, const kv_span *span, F work, kv_gpu_span **out) {
    *out = nullptr;
    KV_RETURN(new_span(g, span->n_q_head, span->n_kv_head, span->n_token, span->head_dim, out));
    (*out)->scale = span->scale;
    (*out)->softcap = span->softcap > 0 ? span->softcap : 0;
    const kv_status st = work(*out);
    if (st != KV_OK) {
        kv_gpu_span_free(*out);
        *out = nullptr;
    }
    return st;
}

kv_status kv_gpu_span_upload(kv_gpu *g, const kv_span *span, bool want_v, kv_gpu_span **out) {
    return make_span(
        g, span, [=](kv_gpu_span *s) { return upload(span, s, want_v); }, out);
}

kv_status kv_gpu_span_adopt(kv_gpu *g, const kv_span *span, const kv_gpu_buffer *q,
                            const kv_gpu_buffer *k, const kv_gpu_buffer *v, kv_gpu_span **out) {
    const size_t cell = (size_t)span->n_token * (size_t)span->head_dim;
    KV_RETURN(kv_buffer_check(q, "q", (size_t)span->n_q_head * cell, sizeof(float)));
    KV_RETURN(kv_buffer_check(k, "k", (size_t)span->n_kv_head * cell, sizeof(float)));
    KV_RETURN(kv_buffer_check(v, "v", (size_t)span->n_kv_head * cell, sizeof(float)));
    return make_span(
        g, span,
        [=](kv_gpu_span *s) {
            return settle(s, kv_data<float>(q), kv_data<float>(k), kv_data<float>(v));
        },
        out);
}

kv_status kv_gpu_span_floats(const kv_gpu_span *s, kv_gpu_buffer **k, kv_gpu_buffer **v) {
    *k = *v = nullptr;
    if (!s->v) return KV_FAIL(KV_E_USAGE, "kv_gpu_span_floats: the span was uploaded without v");
    KV_RETURN(floats(s, s->k, k));
    return floats(s, s->v, v);
}

kv_status kv_gpu_span_random(kv_gpu *g, int32_t n_q_head, int32_t n_kv_head, int32_t n_token,
                             int32_t head_dim, kv_dtype type, uint64_t seed, kv_gpu_span **out) {
    *out = nullptr;
    if (head_dim != 64 && head_dim != 128)
        return KV_FAIL(KV_E_USAGE, "random span: head size %d is not 64 or 128", head_dim);
    KV_RETURN(new_span(g, n_q_head, n_kv_head, n_token, head_dim, out));
    kv_gpu_span *s = *out;
    s->scale = 1.0f / sqrtf((float)head_dim);
    s->type = type;
    kv_status st = random_array(s, n_q_head, 3 * seed + 1, &s->q);
    if (st == KV_OK) st = random_array(s, n_kv_head, 3 * seed + 2, &s->k);
    if (st == KV_OK) st = random_array(s, n_kv_head, 3 * seed + 3, &s->v);
    if (st != KV_OK) {
        kv_gpu_span_free(s);
        *out = nullptr;
    }
    return st;
}

void kv_gpu_span_free(kv_gpu_span *s) {
    if (!s) return;
    (void)kv_gpu_free(s->q);
    (void)kv_gpu_free(s->k);
    (void)kv_gpu_free(s->v);
    delete s;
}

kv_dtype kv_gpu_span_type(const kv_gpu_span *s) { return s->type; }

void kv_gpu_span_shape(const kv_gpu_span *s, int32_t *n_q_head, int32_t *n_token,
                       int32_t *head_dim) {
    if (n_q_head) *n_q_head = s->n_q_head;
    if (n_token) *n_token = s->n_token;
    if (head_dim) *head_dim = s->head_dim_in;
}

kv_status kv_tile_map_of(const void *data, kv_dtype type, int64_t n_row, int64_t ld, int32_t columns,
                         int64_t n_head, int64_t head_stride, int32_t rows, int32_t box_columns,
                         CUtensorMap *out) {
    typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                               const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                               const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    // From the driver at run time, so that kvlab starts on machines without one.
    static void *entry;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    if (!entry)
        KV_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                 cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess)
        return KV_FAIL(KV_E_UNAVAILABLE, "the NVIDIA driver lacks tensor maps (12.0 or newer has "
                                         "them); set KV_GPU_PATH=portable");
    const cuuint64_t size[4] = {64, (cuuint64_t)n_row, (cuuint64_t)columns / 64, (cuuint64_t)n_head};
    const cuuint64_t stride[3] = {(cuuint64_t)ld * 2, 128, (cuuint64_t)head_stride * 2};
    const cuuint32_t box[4] = {64, (cuuint32_t)rows, (cuuint32_t)box_columns / 64, 1};
    const cuuint32_t step[4] = {1, 1, 1, 1};
    const CUresult r = ((encode_fn *)entry)(
        out, type == KV_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
        const_cast<void *>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return KV_FAIL(KV_E_INTERNAL, "cuTensorMapEncodeTiled: CUDA driver error %d", (int)r);
    return KV_OK;
}

kv_status kv_tile_map(const kv_gpu_span *s, const kv_gpu_buffer *data, int32_t n_head, int32_t rows,
                      CUtensorMap *out) {
    return kv_tile_map_of(data->data, s->type, s->n_token, s->head_dim, s->head_dim, n_head,
                          (int64_t)s->n_token * s->head_dim, rows, s->head_dim, out);
}
