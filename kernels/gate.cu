// Gates of dms in training: network, relaxed decisions, gradients (reference/dms.h, maths.md 7.1-7.5). A gate with a hidden layer is
// the network of net.cu plus a bias; a linear one is computed here.
#include <Random123/philox.h>

#include <new>

#include "kernels/block_sum.cuh"
#include "kernels/device.cuh"

struct kv_gpu_gates {
    kv_gpu *gpu;
    kv_dms_spec spec;
    kv_gpu_draw draw; // of the last decisions
    int32_t n_lane, group, n;
    int64_t n_param, n_net; // of one lane, with and without the bias
    kv_gpu_net *net;        // NULL: linear
    kv_gpu_buffer *x;       // float [n_lane or n_lane/group][n][n_input]
    // float [n_lane][n_net], parameters without the bias, their gradient
    kv_gpu_buffer *packed, *d_packed;
    kv_gpu_buffer *alpha;      // double [n_lane][n]
    kv_gpu_buffer *e, *scaled; // float [n_lane][n], dL/dlogit, and times the scale

    bool shared() const { return spec.source == KV_DMS_HIDDEN; }
    int32_t inputs() const { return shared() ? n_lane / group : n_lane; }
};

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

// kv_dms_noise: logistic, from kv_rand_uniform at address (step, lane, token, 2).
__device__ double noise(uint64_t seed, uint32_t step, uint32_t lane, uint32_t token) {
    const philox4x32_ctr_t at = {{step, lane, token, 2}};
    const philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    const philox4x32_ctr_t r = philox4x32(at, key);
    const uint64_t bits = ((uint64_t)r.v[0] << 32 | r.v[1]) >> 12;
    const double u = ((double)bits + 0.5) * 0x1p-52;
    return log(u) - log1p(-u);
}

struct gate_args {
    const float *x, *param;
    float *logit;
    int n, width, n_lane, group; // group: lanes that share x
    int64_t n_param;
    double scale;
};

// logit = scale * x.w + bias of a linear gate. A warp per token.
__global__ void linear_kernel(gate_args a) {
    const int lane = (int)blockIdx.y, t = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    if (t >= a.n) return;
    const float *x = a.x + ((int64_t)(lane / a.group) * a.n + t) * a.width,
                *w = a.param + lane * a.n_param;
    double sum = 0;
    for (int c = (int)threadIdx.x % 32; c < a.width; c += 32) sum += (double)x[c] * (double)w[c];
    sum = kv_lanes_sum(sum);
    if (threadIdx.x % 32 == 0)
        a.logit[(int64_t)lane * a.n + t] = (float)a.scale * (float)sum + w[a.width];
}

// logit = scale * logit + bias
__global__ void bias_kernel(gate_args a) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i >= (int64_t)a.n_lane * a.n) return;
    const int64_t lane = i / a.n;
    a.logit[i] = (float)a.scale * a.logit[i] + a.param[lane * a.n_param + a.n_param - 1];
}

struct decide_args {
    kv_gpu_draw draw;
    const float *logit;
    double *alpha;
    float *log_keep;
    int32_t *marked;
    int n;
};

// One block per lane.
__global__ void decide_kernel(decide_args a) {
    __shared__ double shared[32];
    const int lane = (int)blockIdx.x;
    const int64_t own = (int64_t)lane * a.n;
    double count = 0;
    for (int t = (int)threadIdx.x; t < a.n; t += (int)blockDim.x) {
        const int at = t + a.draw.shift;
        double alpha = 0, keep = 0;
        if (at < a.n) {
            const double y = ((double)a.logit[own + at] +
                              noise(a.draw.seed, a.draw.step, (uint32_t)lane, (uint32_t)at)) /
                             a.draw.temp;
            keep = -(fmax(y, 0.0) + log1p(exp(-fabs(y))));
            alpha = 1 / (1 + exp(-y));
        }
        a.alpha[own + t] = alpha;
        a.log_keep[own + t] = (float)keep;
        count += alpha > 0.5;
    }
    count = kv_block_sum(count, shared);
    if (threadIdx.x == 0) a.marked[lane] = (int32_t)count;
}

struct error_args {
    const double *alpha, *off; // [n_lane][n], [n_lane][queries][2]
    const float *d_keep;       // [n_lane][queries][n]
    float *e, *scaled;         // [n_lane][n]
    float *bias;               // gradient of the bias, n_param apart
    int n, n_lane, queries, shift;
    int64_t n_param;
    double temp, push, scale;
};

// dL/dlogit of every token and their sum, the bias' gradient. One block per lane.
__global__ void error_kernel(error_args a) {
    __shared__ double shared[32];
    const int lane = (int)blockIdx.x;
    const int64_t own = (int64_t)lane * a.n;
    double sum = 0;
    for (int at = (int)threadIdx.x; at < a.n; at += (int)blockDim.x) {
        const int t = at - a.shift;
        float e = 0;
        if (t >= 0) {
            double d_keep = 0;
            for (int q = 0; q < a.queries; q++) {
                const int64_t head = (int64_t)lane * a.queries + q;
                const double size = a.off[2 * head + 1];
                if (size > 0) d_keep += (double)a.d_keep[head * a.n + t] / (size * a.queries);
            }
#ifdef KV_BREAK_GATE
            const double alpha = a.alpha[own + at];
#else
            const double alpha = a.alpha[own + t];
#endif
            const double slope = alpha / a.temp;
            e = (float)(-slope * d_keep / a.n_lane - a.push * slope * (1 - alpha));
        }
        a.e[own + at] = e;
        a.scaled[own + at] = e * (float)a.scale;
        sum += (double)e;
    }
    sum = kv_block_sum(sum, shared);
    if (threadIdx.x == 0) a.bias[lane * a.n_param] = (float)sum;
}

// Gradient of a linear gate's weights: column sums of e x. Blocks of 32 columns and 8 rows of threads.
__global__ void linear_gradient_kernel(gate_args a, const float *e, float *grad) {
    __shared__ double part[WARPS][32];
    const int lane = (int)blockIdx.y, c = (int)(blockIdx.x * 32 + threadIdx.x);
    const float *x = a.x + (int64_t)(lane / a.group) * a.n * a.width,
                *own = e + (int64_t)lane * a.n;
    double sum = 0;
    for (int t = (int)threadIdx.y; c < a.width && t < a.n; t += WARPS)
        sum += (double)own[t] * (double)x[(int64_t)t * a.width + c];
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= a.width) return;
    for (int i = 1; i < WARPS; i++) sum += part[i][threadIdx.x];
    grad[lane * a.n_param + c] = (float)sum;
}

kv_status reserve(kv_gpu_gates *gates, kv_gpu_buffer **b, size_t bytes) {
    if (*b && (*b)->bytes >= bytes) return KV_OK;
    KV_RETURN(kv_gpu_free(*b));
    *b = nullptr;
    return kv_gpu_new(gates->gpu, bytes, b);
}

// Rows of `width` floats between arrays whose rows lie apart.
kv_status copy_rows(kv_gpu *g, float *to, int64_t to_ld, const float *from, int64_t from_ld,
                    int64_t width, int64_t rows) {
    KV_CUDA(cudaMemcpy2DAsync(to, (size_t)to_ld * 4, from, (size_t)from_ld * 4, (size_t)width * 4,
                              (size_t)rows, cudaMemcpyDeviceToDevice, g->stream));
    return KV_OK;
}

gate_args arguments(const kv_gpu_gates *gates, const kv_gpu_buffer *param, float *logit) {
    return gate_args{kv_data<float>((const kv_gpu_buffer *)gates->x),
                     kv_data<float>(param),
                     logit,
                     gates->n,
                     gates->spec.n_input,
                     gates->n_lane,
                     gates->shared() ? gates->group : 1,
                     gates->n_param,
                     gates->spec.scale};
}

kv_status input_net(kv_gpu_gates *gates) {
    const int64_t doc_first[2] = {0, gates->n};
    const bool shared = gates->shared();
    return kv_gpu_net_input(gates->net, gates->n, 1, doc_first, shared ? nullptr : gates->x,
                            nullptr, shared ? gates->x : nullptr);
}

} // namespace

kv_status kv_gpu_gates_new(kv_gpu *g, const kv_dms_spec *spec, int32_t n_lane, int32_t group,
                           kv_gpu_gates **out) {
    *out = nullptr;
    if (n_lane < 1 || group < 1 || n_lane % group != 0)
        return KV_FAIL(KV_E_USAGE, "gates of %d lanes, %d of them share hidden states", n_lane,
                       group);
    kv_gpu_gates *gates = new (std::nothrow) kv_gpu_gates();
    if (!gates) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    gates->gpu = g;
    gates->spec = *spec;
    gates->n_lane = n_lane;
    gates->group = group;
    gates->n_param = kv_dms_param(spec);
    gates->n_net = gates->n_param - 1;
    kv_net_spec net = {};
    net.n_input = spec->n_input;
    net.n_mlp = spec->n_mlp;
    net.window = 1;
    net.hidden_input = gates->shared();
    net.n_hidden = net.hidden_input ? spec->n_input : 0;
    const size_t bytes = (size_t)(n_lane * gates->n_net) * sizeof(float);
    kv_status st = KV_OK;
    if (spec->n_mlp) st = kv_gpu_net_new(g, &net, n_lane, group, true, &gates->net);
    if (st == KV_OK) st = kv_gpu_new(g, bytes, &gates->packed);
    if (st == KV_OK) st = kv_gpu_new(g, bytes, &gates->d_packed);
    if (st == KV_OK)
        *out = gates;
    else
        kv_gpu_gates_free(gates);
    return st;
}

void kv_gpu_gates_free(kv_gpu_gates *gates) {
    if (!gates) return;
    kv_gpu_buffer *const owned[] = {gates->x,     gates->packed, gates->d_packed,
                                    gates->alpha, gates->e,      gates->scaled};
    for (kv_gpu_buffer *b : owned) (void)kv_gpu_free(b);
    kv_gpu_net_free(gates->net);
    delete gates;
}

kv_status kv_gpu_gates_input(kv_gpu_gates *gates, const kv_gpu_buffer *x, int32_t n_token,
                             int32_t first, int32_t n) {
    const int64_t width = gates->spec.n_input, rows = gates->inputs();
    if (first < 0 || n < 1 || first + n > n_token)
        return KV_FAIL(KV_E_USAGE, "gates: tokens [%d, %d) of %d", first, first + n, n_token);
    KV_RETURN(kv_buffer_check(x, "x", (size_t)(rows * n_token * width), sizeof(float)));
    const size_t cells = (size_t)gates->n_lane * (size_t)n;
    gates->n = n;
    KV_RETURN(reserve(gates, &gates->x, (size_t)(rows * n * width) * sizeof(float)));
    KV_RETURN(reserve(gates, &gates->alpha, cells * sizeof(double)));
    KV_RETURN(reserve(gates, &gates->e, cells * sizeof(float)));
    KV_RETURN(reserve(gates, &gates->scaled, cells * sizeof(float)));
    KV_RETURN(copy_rows(gates->gpu, kv_data<float>(gates->x), n * width,
                        kv_data<float>(x) + first * width, n_token * width, n * width, rows));
    return gates->net ? input_net(gates) : KV_OK;
}

// x of gates that read keys (and values), as kv_dms_input lays it out.
kv_status kv_gpu_gates_input_keys(kv_gpu_gates *gates, const kv_gpu_buffer *k,
                                  const kv_gpu_buffer *v, int32_t n_token, int32_t head_dim) {
    kv_gpu *g = gates->gpu;
    const kv_dms_spec *spec = &gates->spec;
    const int64_t d = head_dim, rows = (int64_t)gates->n_lane * n_token, width = spec->n_input;
    const size_t cells = (size_t)(rows * d);
    const bool whole = spec->source == KV_DMS_KV;
    if (gates->shared() || width != (whole ? 2 * d : 1) || n_token < 1)
        return KV_FAIL(KV_E_USAGE, "gates of %d inputs from keys of %d, %d tokens", spec->n_input,
                       head_dim, n_token);
    KV_RETURN(kv_buffer_check(k, "k", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(v, "v", cells, sizeof(float)));
    gates->n = n_token;
    KV_RETURN(reserve(gates, &gates->x, (size_t)(rows * width) * sizeof(float)));
    float *x = kv_data<float>(gates->x);
    KV_RETURN(copy_rows(g, x, width, kv_data<float>(k) + (whole ? 0 : spec->channel), d,
                        whole ? d : 1, rows));
    if (whole) KV_RETURN(copy_rows(g, x + d, width, kv_data<float>(v), d, d, rows));
    return gates->net ? input_net(gates) : KV_OK;
}

kv_status kv_gpu_gates_logits(kv_gpu_gates *gates, const kv_gpu_buffer *param,
                              kv_gpu_buffer *logit) {
    kv_gpu *g = gates->gpu;
    const size_t cells = (size_t)gates->n_lane * (size_t)gates->n;
    KV_RETURN(kv_buffer_check(param, "param", (size_t)(gates->n_lane * gates->n_param), 4));
    KV_RETURN(kv_buffer_check(logit, "logit", cells, sizeof(float)));
    const gate_args a = arguments(gates, param, kv_data<float>(logit));
    if (!gates->net) {
        linear_kernel<<<dim3((unsigned)kv_div_up(a.n, WARPS), (unsigned)a.n_lane), THREADS, 0,
                        g->stream>>>(a);
    } else {
        KV_RETURN(copy_rows(g, kv_data<float>(gates->packed), gates->n_net, a.param, a.n_param,
                            gates->n_net, a.n_lane));
        KV_RETURN(kv_gpu_net_forward(gates->net, gates->packed, logit));
        bias_kernel<<<(unsigned)((cells + THREADS - 1) / THREADS), THREADS, 0, g->stream>>>(a);
    }
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status kv_gpu_gates_decide(kv_gpu_gates *gates, const kv_gpu_draw *draw,
                              const kv_gpu_buffer *logit, kv_gpu_buffer *log_keep,
                              kv_gpu_buffer *marked) {
    const size_t cells = (size_t)gates->n_lane * (size_t)gates->n;
    KV_RETURN(kv_buffer_check(logit, "logit", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(log_keep, "log_keep", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(marked, "marked", (size_t)gates->n_lane, sizeof(int32_t)));
    gates->draw = *draw;
    const decide_args a = {*draw,
                           kv_data<float>(logit),
                           kv_data<double>(gates->alpha),
                           kv_data<float>(log_keep),
                           kv_data<int32_t>(marked),
                           gates->n};
    decide_kernel<<<(unsigned)gates->n_lane, 1024, 0, gates->gpu->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status kv_gpu_gates_backward(kv_gpu_gates *gates, int32_t queries, const kv_gpu_buffer *d_keep,
                                const kv_gpu_buffer *off, double push, kv_gpu_buffer *grad) {
    kv_gpu *g = gates->gpu;
    const size_t heads = (size_t)gates->n_lane * (size_t)queries,
                 count = (size_t)(gates->n_lane * gates->n_param);
    KV_RETURN(kv_buffer_check(grad, "grad", count, sizeof(float)));
    KV_RETURN(kv_buffer_check(d_keep, "d_keep", heads * (size_t)gates->n, sizeof(float)));
    KV_RETURN(kv_buffer_check(off, "off", heads * 2, sizeof(double)));
    float *out = kv_data<float>(grad);
    const error_args a = {kv_data<double>(gates->alpha),
                          kv_data<double>(off),
                          kv_data<float>(d_keep),
                          kv_data<float>(gates->e),
                          kv_data<float>(gates->scaled),
                          out + gates->n_net,
                          gates->n,
                          gates->n_lane,
                          queries,
                          gates->draw.shift,
                          gates->n_param,
                          gates->draw.temp,
                          push,
                          gates->spec.scale};
    error_kernel<<<(unsigned)gates->n_lane, 1024, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    if (gates->net) {
        KV_RETURN(kv_gpu_net_backward(gates->net, gates->packed, gates->scaled, gates->d_packed));
        return copy_rows(g, out, gates->n_param, kv_data<float>(gates->d_packed), gates->n_net,
                         gates->n_net, gates->n_lane);
    }
    const gate_args b = arguments(gates, nullptr, nullptr);
    linear_gradient_kernel<<<dim3((unsigned)kv_div_up(b.width, 32), (unsigned)b.n_lane),
                             dim3(32, WARPS), 0, g->stream>>>(b, a.scaled, out);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
