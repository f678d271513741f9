// The model's forward pass on the device (kv_model_forward, reference/model.c: same steps, same hooks). The residual stream stays on
// the device; a layer's q, k, v (and the hidden state) go to page-locked host memory for the attention hook, its output comes back.
// Products are fp32 (cuBLAS), variances are summed in double, rotations are formed in double and rounded once, as on the CPU.
#include <algorithm>
#include <cstdlib>

#include "kernels/gpu_ops.h"
#include "kernels/linear.cuh"

#include "reference/model.h"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int32_t CHUNK = 16384;            // rows of one product
constexpr size_t LOGITS = (size_t)16 << 20; // floats of one block of logits

__device__ double warp_sum(double x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// 1 / rms of d elements, by one warp.
__device__ float inverse_rms(const float *x, const float *bias, int d, double eps) {
    double sum = 0;
    for (int c = (int)threadIdx.x % 32; c < d; c += 32) {
        const double y = (double)(bias ? x[c] + bias[c] : x[c]);
        sum += y * y;
    }
    return (float)(1.0 / sqrt(warp_sum(sum) / d + eps));
}

__global__ void embed_kernel(const float *table, const int32_t *token, size_t n, int d, float *x) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n * (size_t)d;
         i += (size_t)gridDim.x * blockDim.x)
        x[i] = table[(size_t)token[i / (size_t)d] * (size_t)d + i % (size_t)d];
}

// table [n][d]: cosines, then sines (kv_rope_table)
__global__ void rope_kernel(const int32_t *position, const double *inv_freq, size_t n, int half,
                            float *table) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n * (size_t)half;
         i += (size_t)gridDim.x * blockDim.x) {
        const size_t t = i / (size_t)half, c = i % (size_t)half;
        double sine, cosine;
        sincos((double)(position ? position[t] : (int32_t)t) * inv_freq[c], &sine, &cosine);
        table[2 * t * (size_t)half + c] = (float)cosine;
        table[(2 * t + 1) * (size_t)half + c] = (float)sine;
    }
}

// y[i] = weight * x[row i] / rms; rows by list, or in order.
__global__ void norm_kernel(const float *x, const int32_t *list, const float *weight, int rows,
                            int d, double eps, float *y) {
    const int i = (int)(blockIdx.x * WARPS + threadIdx.x / 32);
    if (i >= rows) return;
    const float *from = x + (size_t)(list ? list[i] : i) * (size_t)d;
    float *to = y + (size_t)i * (size_t)d;
    const float scale = inverse_rms(from, nullptr, d, eps);
    for (int c = (int)threadIdx.x % 32; c < d; c += 32) to[c] = weight[c] * (from[c] * scale);
}

struct heads_args {
    const float *rows, *bias, *norm, *rope; // [rows][n_head*d]; [n_head*d], [d], [n][d] or null
    float *heads;                           // [n_head][n][d]
    int first, count, n, n_head, d;
    double eps;
};

// Rows of a projection -> heads, with bias, head norm and rotation; a warp per (row, head).
__global__ void heads_kernel(heads_args a) {
    const int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int row = (int)(i / a.n_head), h = (int)(i % a.n_head), half = a.d / 2;
    if (row >= a.count) return;
    const size_t t = (size_t)(a.first + row);
    const float *x = a.rows + ((size_t)row * (size_t)a.n_head + (size_t)h) * (size_t)a.d;
    const float *bias = a.bias ? a.bias + h * a.d : nullptr;
    float *y = a.heads + ((size_t)h * (size_t)a.n + t) * (size_t)a.d;
    const float scale = a.norm ? inverse_rms(x, bias, a.d, a.eps) : 1.0f;
    const auto element = [&](int c) {
        const float z = bias ? x[c] + bias[c] : x[c];
        return a.norm ? a.norm[c] * (z * scale) : z;
    };
    for (int c = (int)threadIdx.x % 32; c < half; c += 32) {
        const float p = element(c), q = element(half + c);
        float cosine = 1, sine = 0;
        if (a.rope) {
            cosine = a.rope[t * (size_t)a.d + (size_t)c];
            sine = a.rope[t * (size_t)a.d + (size_t)(half + c)];
        }
        y[c] = __fsub_rn(__fmul_rn(p, cosine), __fmul_rn(q, sine)); // no fma: as the CPU rounds
        y[half + c] = __fadd_rn(__fmul_rn(q, cosine), __fmul_rn(p, sine));
    }
}

// o [n_head][n][d] -> rows [count][n_head*d]
__global__ void rows_kernel(const float *o, int first, int count, int n, int n_head, int d,
                            float *rows) {
    const size_t width = (size_t)n_head * (size_t)d;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)count * width;
         i += (size_t)gridDim.x * blockDim.x) {
        const size_t row = i / width, h = i % width / (size_t)d, c = i % (size_t)d;
        rows[i] = o[(h * (size_t)n + (size_t)first + row) * (size_t)d + c];
    }
}

// x += y; *bad is set when a sum is not finite.
__global__ void add_kernel(float *x, const float *y, size_t n, int *bad) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        const float sum = x[i] + y[i];
        x[i] = sum;
        if (!isfinite(sum)) *bad = 1;
    }
}

// gate = silu(gate) * up
__global__ void swiglu_kernel(float *gate, const float *up, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

unsigned blocks(size_t n) { return (unsigned)std::min<size_t>((n + THREADS - 1) / THREADS, 4096); }

// Page-locked host memory; the block stays with the process, the next forward pass takes it again.
struct locked_memory {
    float *data = nullptr;
    size_t bytes = 0;
    static locked_memory idle; // under the lock of the device table
    kv_status reserve(size_t wanted) {
        std::swap(data, idle.data);
        std::swap(bytes, idle.bytes);
        if (bytes >= wanted) return KV_OK;
        if (data) (void)cudaFreeHost(data);
        data = nullptr;
        bytes = 0;
        KV_CUDA(cudaMallocHost((void **)&data, wanted));
        bytes = wanted;
        return KV_OK;
    }
    void give_back() {
        if (bytes > idle.bytes) {
            std::swap(data, idle.data);
            std::swap(bytes, idle.bytes);
        }
        if (data) (void)cudaFreeHost(data);
        data = nullptr;
        bytes = 0;
    }
};
locked_memory locked_memory::idle;

struct host_array { // ordinary host memory
    void *data = nullptr;
    kv_status reserve(size_t bytes) {
        data = malloc(bytes);
        return data ? KV_OK : KV_FAIL(KV_E_INTERNAL, "out of memory (%zu bytes)", bytes);
    }
    template <class T> T *as() const { return static_cast<T *>(data); }
    ~host_array() { free(data); }
};

struct forward {
    kv_gpu *g;
    const kv_model *model;
    const kv_model_hooks *hooks;
    const int32_t *position;
    int32_t n;
    kv_scratch x, q, k, v, o, rope, narrow, wide, gate, bad;
    locked_memory memory;
    float *host_q, *host_k, *host_v, *host_o, *host_x;

    const kv_model_config &config() const { return model->config; }
    size_t width(int32_t heads) const { return (size_t)heads * (size_t)config().head_dim; }

    kv_status vector(const kv_weight &w, const float **out) const {
        *out = nullptr;
        if (!w.data) return KV_OK;
        return kv_weight_device(g, w.type, w.data, (size_t)w.rows * (size_t)w.cols, out);
    }
    kv_status linear(int32_t rows, const kv_weight &w, const kv_scratch &from,
                     const kv_scratch &to) const {
        const float *weight;
        KV_RETURN(vector(w, &weight));
        return kv_linear_device(g, rows, w.rows, w.cols, from.as<float>(), weight, to.as<float>());
    }
    kv_status norm(const float *from, const int32_t *list, const kv_weight &w, int32_t rows) const {
        const float *weight;
        KV_RETURN(vector(w, &weight));
        norm_kernel<<<(unsigned)kv_div_up(rows, WARPS), THREADS, 0, g->stream>>>(
            from, list, weight, rows, config().d_model, config().rms_eps, narrow.as<float>());
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }

    kv_status allocate() {
        const size_t rows = (size_t)n, chunk = (size_t)std::min(n, CHUNK);
        const size_t nq = width(config().n_q_head), nkv = width(config().n_kv_head);
        const size_t dm = (size_t)config().d_model, ff = (size_t)config().d_ff;
        KV_RETURN(x.reserve(g, rows * dm * 4));
        KV_RETURN(q.reserve(g, rows * nq * 4));
        KV_RETURN(o.reserve(g, rows * nq * 4));
        KV_RETURN(k.reserve(g, rows * nkv * 4));
        KV_RETURN(v.reserve(g, rows * nkv * 4));
        KV_RETURN(rope.reserve(g, rows * (size_t)config().head_dim * 4));
        KV_RETURN(narrow.reserve(g, chunk * dm * 4));
        KV_RETURN(wide.reserve(g, chunk * std::max(nq, ff) * 4));
        KV_RETURN(gate.reserve(g, chunk * ff * 4));
        KV_RETURN(bad.reserve(g, sizeof(int)));
        KV_RETURN(memory.reserve(rows * (2 * nq + 2 * nkv + dm) * 4));
        host_q = memory.data;
        host_o = host_q + rows * nq;
        host_k = host_o + rows * nq;
        host_v = host_k + rows * nkv;
        host_x = host_v + rows * nkv;
        return KV_OK;
    }

    kv_status begin(const int32_t *token) {
        const size_t rows = (size_t)n, half = (size_t)config().head_dim / 2;
        kv_scratch ids, places, frequencies;
        const float *table;
        for (int32_t t = 0; t < n; t++)
            if (token[t] < 0 || token[t] >= config().vocab)
                return KV_FAIL(KV_E_DATA,
                               "token %d at position %d is outside the vocabulary 0..%d of %s: "
                               "these tokens belong to another model",
                               token[t], t, config().vocab - 1, model->path);
        KV_RETURN(ids.reserve(g, rows * 4));
        KV_RETURN(kv_gpu_put(ids.buffer, token, rows * 4));
        KV_RETURN(vector(model->embedding, &table));
        embed_kernel<<<blocks(rows * (size_t)config().d_model), THREADS, 0, g->stream>>>(
            table, ids.as<int32_t>(), rows, config().d_model, x.as<float>());
        KV_CUDA(cudaGetLastError());
        KV_RETURN(frequencies.reserve(g, half * 8));
        KV_RETURN(kv_gpu_put(frequencies.buffer, model->inv_freq, half * 8));
        KV_RETURN(places.reserve(g, rows * 4));
        if (position) KV_RETURN(kv_gpu_put(places.buffer, position, rows * 4));
        rope_kernel<<<blocks(rows * half), THREADS, 0, g->stream>>>(
            position ? places.as<int32_t>() : nullptr, frequencies.as<double>(), rows, (int)half,
            rope.as<float>());
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }

    kv_status to_heads(const kv_weight &w, const kv_weight &bias, const kv_weight *head_norm,
                       bool rotate, int32_t first, int32_t rows, int32_t heads,
                       const kv_scratch &to) {
        heads_args a = {};
        KV_RETURN(linear(rows, w, narrow, wide));
        KV_RETURN(vector(bias, &a.bias));
        if (head_norm) KV_RETURN(vector(*head_norm, &a.norm));
        a.rows = wide.as<float>();
        a.rope = rotate ? rope.as<float>() : nullptr;
        a.heads = to.as<float>();
        a.first = first;
        a.count = rows;
        a.n = n;
        a.n_head = heads;
        a.d = config().head_dim;
        a.eps = config().rms_eps;
        const size_t warps = (size_t)rows * (size_t)heads;
        heads_kernel<<<(unsigned)((warps + WARPS - 1) / WARPS), THREADS, 0, g->stream>>>(a);
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }

    kv_status project(const kv_layer_weights &l, int32_t first, int32_t rows) {
        const size_t dm = (size_t)config().d_model;
        KV_RETURN(norm(x.as<float>() + (size_t)first * dm, nullptr, l.norm_attn, rows));
        KV_RETURN(to_heads(l.wq, l.bq, &l.q_norm, true, first, rows, config().n_q_head, q));
        KV_RETURN(to_heads(l.wk, l.bk, &l.k_norm, true, first, rows, config().n_kv_head, k));
        return to_heads(l.wv, l.bv, nullptr, false, first, rows, config().n_kv_head, v);
    }

    kv_status fetch(const kv_scratch &from, size_t width_of_row, float *to) {
        KV_CUDA(cudaMemcpyAsync(to, from.buffer->data, (size_t)n * width_of_row * 4,
                                cudaMemcpyDeviceToHost, g->stream));
        return KV_OK;
    }

    // The hook runs without the lock: it uses the device itself.
    kv_status attend(int32_t layer) {
        const size_t nq = width(config().n_q_head), nkv = width(config().n_kv_head);
        KV_RETURN(fetch(q, nq, host_q));
        KV_RETURN(fetch(k, nkv, host_k));
        KV_RETURN(fetch(v, nkv, host_v));
        KV_RETURN(fetch(x, (size_t)config().d_model, host_x));
        KV_RETURN(kv_gpu_sync(g));
        kv_span span = {};
        span.n_token = n;
        span.stride = n;
        span.n_q_head = config().n_q_head;
        span.n_kv_head = config().n_kv_head;
        span.head_dim = config().head_dim;
        span.q = host_q;
        span.k = host_k;
        span.v = host_v;
        span.hidden = host_x;
        span.d_model = config().d_model;
        span.position = position;
        span.inv_freq = model->inv_freq;
        span.scale = (float)(1.0 / sqrt((double)config().head_dim));
        span.layer_id = span.layer_index = layer;
        span.n_layer = config().n_layer;
        KV_RETURN(kv_gpu_ops_adopt(g, &span, q.buffer, k.buffer, v.buffer));
        kv_gpu_ops_leave();
        kv_status st = hooks->attend ? hooks->attend(hooks->context, &span, host_o)
                                     : hooks->ops->attend(&span, host_o, nullptr);
        kv_gpu_ops_enter();
        KV_RETURN(kv_gpu_ops_drop(st, span.held));
        KV_CUDA(cudaMemcpyAsync(o.buffer->data, host_o, (size_t)n * nq * 4, cudaMemcpyHostToDevice,
                                g->stream));
        return KV_OK;
    }

    kv_status add(float *to, size_t count) {
        add_kernel<<<blocks(count), THREADS, 0, g->stream>>>(to, narrow.as<float>(), count,
                                                             bad.as<int>());
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }

    kv_status finish_layer(const kv_layer_weights &l, int32_t layer, int32_t first, int32_t rows) {
        const size_t dm = (size_t)config().d_model, count = (size_t)rows * dm;
        float *part = x.as<float>() + (size_t)first * dm;
        int not_finite = 0;
        KV_CUDA(cudaMemsetAsync(bad.buffer->data, 0, sizeof(int), g->stream));
        rows_kernel<<<blocks((size_t)rows * width(config().n_q_head)), THREADS, 0, g->stream>>>(
            o.as<float>(), first, rows, n, config().n_q_head, config().head_dim, wide.as<float>());
        KV_CUDA(cudaGetLastError());
        KV_RETURN(linear(rows, l.wo, wide, narrow));
        KV_RETURN(add(part, count));
        KV_RETURN(norm(part, nullptr, l.norm_mlp, rows));
        KV_RETURN(linear(rows, l.w_gate, narrow, gate));
        KV_RETURN(linear(rows, l.w_up, narrow, wide));
        const size_t inner = (size_t)rows * (size_t)config().d_ff;
        swiglu_kernel<<<blocks(inner), THREADS, 0, g->stream>>>(gate.as<float>(), wide.as<float>(),
                                                                inner);
        KV_CUDA(cudaGetLastError());
        KV_RETURN(linear(rows, l.w_down, gate, narrow));
        KV_RETURN(add(part, count));
        KV_RETURN(kv_gpu_get(bad.buffer, &not_finite, sizeof not_finite));
        if (not_finite)
            return KV_FAIL(KV_E_DATA,
                           "%s: layer %d gives values that are not finite at positions %d..%d: the "
                           "weights are damaged or do not belong to this config.json",
                           model->path, layer, first, first + rows - 1);
        return KV_OK;
    }

    // Logits of the rows listed in row[count] (ascending), handed over in runs of consecutive rows.
    kv_status emit(const int32_t *row, int32_t count, const kv_scratch &list,
                   const kv_scratch &logits, float *host) {
        const size_t vocab = (size_t)config().vocab;
        KV_RETURN(kv_gpu_put(list.buffer, row, (size_t)count * 4));
        KV_RETURN(norm(x.as<float>(), list.as<int32_t>(), model->norm_final, count));
        KV_RETURN(linear(count, model->lm_head, narrow, logits));
        KV_RETURN(kv_gpu_get(logits.buffer, host, (size_t)count * vocab * 4));
        kv_gpu_ops_leave();
        kv_status st = KV_OK;
        for (int32_t i = 0, run; st == KV_OK && i < count; i += run) {
            for (run = 1; i + run < count && row[i + run] == row[i] + run;) run++;
            st = hooks->logits(hooks->context, row[i], run, host + (size_t)i * vocab);
        }
        kv_gpu_ops_enter();
        return st;
    }

    kv_status head() {
        const int32_t most = (int32_t)std::max<size_t>(
            1, std::min<size_t>((size_t)std::min(n, CHUNK), LOGITS / (size_t)config().vocab));
        kv_scratch list, logits;
        host_array row, host;
        int32_t count = 0;
        KV_RETURN(list.reserve(g, (size_t)most * 4));
        KV_RETURN(row.reserve((size_t)most * 4));
        KV_RETURN(logits.reserve(g, (size_t)most * (size_t)config().vocab * 4));
        KV_RETURN(host.reserve((size_t)most * (size_t)config().vocab * 4));
        for (int32_t t = 0; t < n; t++) {
            if (!hooks->want_logits || hooks->want_logits[t]) row.as<int32_t>()[count++] = t;
            if (count == most || (count > 0 && t == n - 1)) {
                KV_RETURN(kv_interrupt_poll());
                KV_RETURN(emit(row.as<int32_t>(), count, list, logits, host.as<float>()));
                count = 0;
            }
        }
        return KV_OK;
    }

    kv_status run(const int32_t *token) {
        KV_RETURN(allocate());
        KV_RETURN(begin(token));
        for (int32_t layer = 0; layer < config().n_layer; layer++) {
            const kv_layer_weights &l = model->layer[layer];
            KV_RETURN(kv_interrupt_poll());
            for (int32_t first = 0; first < n; first += CHUNK)
                KV_RETURN(project(l, first, std::min(n - first, CHUNK)));
            KV_RETURN(attend(layer));
            for (int32_t first = 0; first < n; first += CHUNK)
                KV_RETURN(finish_layer(l, layer, first, std::min(n - first, CHUNK)));
        }
        return hooks->logits ? head() : KV_OK;
    }
};

} // namespace

kv_status kv_gpu_ops_forward(const kv_model *model, const int32_t *token, const int32_t *position,
                             int32_t n_token, const kv_model_hooks *hooks) {
    kv_gpu *g = kv_gpu_ops_enter();
    kv_status st;
    {
        forward f = {}; // gives its device memory back inside the lock
        f.g = g;
        f.model = model;
        f.hooks = hooks;
        f.position = position;
        f.n = n_token;
        st = f.run(token);
        (void)kv_gpu_sync(g);
        f.memory.give_back();
    }
    kv_gpu_ops_leave();
    return st;
}
