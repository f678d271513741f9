// AdamW with clipping by the norm of the whole group (kv_sum_of_squares, kv_clip_factor, kv_adamw_step). Products and sums are
// rounded one by one, as on the CPU, so that equal gradients and scale give equal parameters.
#include <cmath>

#include "kernels/block_sum.cuh"
#include "kernels/device.cuh"

namespace {

constexpr int BLOCKS = 256, THREADS = 256;

// partial [BLOCKS]
__global__ void square_kernel(const float *grad, int64_t n, double *partial) {
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n; i += BLOCKS * THREADS)
        sum += (double)grad[i] * (double)grad[i];
    sum = kv_block_sum(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void total_kernel(const double *partial, double *sum) {
    __shared__ double shared[32];
    const double x = kv_block_sum(partial[threadIdx.x], shared);
    if (threadIdx.x == 0) *sum = x;
}

struct step_args {
    kv_adamw o;
    double correct1, correct2, clip;
    int64_t n;
    const double *sum;
    const float *grad;
    float *param, *moment1, *moment2;
};

__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }

__global__ void step_kernel(step_args a) {
    const double sum = *a.sum, norm = sqrt(sum);
    if (!isfinite(sum)) return;
    const double scale = a.clip > 0 && norm > a.clip ? a.clip / norm : 1.0;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < a.n;
         i += (int64_t)gridDim.x * THREADS) {
        const double g = times(scale, (double)a.grad[i]), p = (double)a.param[i];
        const double m = plus(times(a.o.beta1, (double)a.moment1[i]), times(1 - a.o.beta1, g));
        const double v =
            plus(times(a.o.beta2, (double)a.moment2[i]), times(times(1 - a.o.beta2, g), g));
#ifdef KV_BREAK_ADAMW
        const double correct2 = 1;
#else
        const double correct2 = a.correct2;
#endif
        const double move =
            plus((m / a.correct1) / plus(sqrt(v / correct2), a.o.eps), times(a.o.weight_decay, p));
        a.moment1[i] = (float)m;
        a.moment2[i] = (float)v;
        a.param[i] = (float)plus(p, -times(a.o.rate, move));
    }
}

} // namespace

kv_status kv_gpu_adamw(kv_gpu *g, const kv_adamw *o, int64_t step, double clip, int64_t n,
                       const kv_gpu_buffer *grad, kv_gpu_buffer *param, kv_gpu_buffer *moment1,
                       kv_gpu_buffer *moment2, kv_gpu_buffer *sum) {
    kv_scratch partial;
    KV_RETURN(kv_buffer_check(grad, "grad", (size_t)n, sizeof(float)));
    KV_RETURN(kv_buffer_check(param, "param", (size_t)n, sizeof(float)));
    KV_RETURN(kv_buffer_check(moment1, "moment1", (size_t)n, sizeof(float)));
    KV_RETURN(kv_buffer_check(moment2, "moment2", (size_t)n, sizeof(float)));
    KV_RETURN(kv_buffer_check(sum, "sum", 1, sizeof(double)));
    KV_RETURN(partial.reserve(g, BLOCKS * sizeof(double)));
    square_kernel<<<BLOCKS, THREADS, 0, g->stream>>>(kv_data<float>(grad), n, partial.as<double>());
    KV_CUDA(cudaGetLastError());
    total_kernel<<<1, BLOCKS, 0, g->stream>>>(partial.as<double>(), kv_data<double>(sum));
    KV_CUDA(cudaGetLastError());
    const step_args a = {*o,
                         1 - pow(o->beta1, (double)step),
                         1 - pow(o->beta2, (double)step),
                         clip,
                         n,
                         kv_data<double>(sum),
                         kv_data<float>(grad),
                         kv_data<float>(param),
                         kv_data<float>(moment1),
                         kv_data<float>(moment2)};
    step_kernel<<<4 * BLOCKS, THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
