// What a scorer computes from one token alone, forward and backward (maths.md 5, 6.1; reference/scorer_net_impl.h): the token's own
// MLP, features, projections, gates. Matrix products by cuBLAS; the rest is one pass over each array.
#include <algorithm>

#include "kernels/fused.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

unsigned blocks(int64_t n) {
    return (unsigned)std::min<int64_t>((n + THREADS - 1) / THREADS, 1 << 16);
}
unsigned warp_blocks(int64_t rows) { return (unsigned)((rows + WARPS - 1) / WARPS); }

// A vector of parameters of every lane, fp32.
struct vectors {
    const float *data;
    int64_t stride;
    __device__ const float *of(int64_t lane) const { return data + lane * stride; }
};

// x[lane][row][first..first+width) from y [lane][n_token][width], zeros in rows without a token.
template <class T>
__global__ void gather_kernel(const float *y, const int32_t *token, int n_token, int n_row,
                              int width, int first, int ld, int64_t count, T *x) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int c = (int)(i % width);
        const int64_t row = i / width, lane = row / n_row;
        const int t = token[row % n_row];
        const float value = t < 0 ? 0.0f : y[(lane * n_token + t) * width + c];
        x[row * ld + first + c] = kv_slim<T>(value);
    }
}

template <class T> struct own_args {
    const T *z; // [lane][row][width]
    vectors bias, w;
    const int32_t *token;
    float *rhat;
    int n_row, n_token, width;
    int64_t rows;
};

// rhat = w . silu(z + bias)
template <class T> __global__ void own_kernel(own_args<T> a) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows) return;
    const int64_t lane = row / a.n_row;
    const int t = a.token[row % a.n_row];
    if (t < 0) return;
    const T *z = a.z + row * a.width;
    const float *bias = a.bias.of(lane), *w = a.w.of(lane);
    float sum = 0;
    for (int c = (int)threadIdx.x % 32; c < a.width; c += 32)
        sum = fmaf(kv_silu(kv_wide(z[c]) + bias[c]), w[c], sum);
    sum = kv_warp_sum(sum);
    if (threadIdx.x % 32 == 0) a.rhat[lane * a.n_token + t] = sum;
}

template <class T>
__global__ void feature_kernel(const T *z, vectors bias, int n_row, int width, int64_t count,
                               T *f) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const float *b = bias.of(i / ((int64_t)n_row * width));
        f[i] = kv_slim<T>(kv_silu(kv_wide(z[i]) + b[i % width]));
    }
}

// Behind v~: a column of ones, if there is one, and zeros. Zeros in rows without a token (their projections are f(0) = 0 only without a
// bias).
template <class T>
__global__ void ones_kernel(T *project, const int32_t *token, int n_row, int used, bool ones,
                            int ld, int64_t rows) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * ld;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int c = (int)(i % ld);
        const bool real = token[i / ld % n_row] >= 0;
        if (c >= used || !real) project[i] = kv_slim<T>(real && ones && c == used ? 1.0f : 0.0f);
    }
}

template <class T> struct gate_args {
    const T *x; // [lane / group][row][width]
    vectors w_i, w_f;
    float2 *pre;
    int n_row, width, group;
    int64_t rows;
};

template <class T> __global__ void gate_kernel(gate_args<T> a) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows) return;
    const int64_t lane = row / a.n_row;
    const T *x = a.x + (lane / a.group * a.n_row + row % a.n_row) * a.width;
    const float *wi = a.w_i.of(lane), *wf = a.w_f.of(lane);
    float pre_i = 0, pre_f = 0;
    for (int c = (int)threadIdx.x % 32; c < a.width; c += 32) {
        pre_i = fmaf(kv_wide(x[c]), wi[c], pre_i);
        pre_f = fmaf(kv_wide(x[c]), wf[c], pre_f);
    }
    pre_i = kv_warp_sum(pre_i);
    pre_f = kv_warp_sum(pre_f);
    if (threadIdx.x % 32 == 0) a.pre[row] = make_float2(pre_i, pre_f);
}

// z becomes the gradient before silu: z = scale(row) * w * silu'(z + bias); scale: e of the row's token.
template <class T>
__global__ void mlp_slope_kernel(T *z, vectors bias, vectors w, const float *e,
                                 const int32_t *token, int n_row, int n_token, int width,
                                 int64_t count) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int c = (int)(i % width);
        const int64_t row = i / width, lane = row / n_row;
        const int t = token[row % n_row];
#ifdef KV_BREAK_GRADIENTS
        const float up = t < 1 ? 0.0f : e[lane * n_token + t - 1];
#else
        const float up = t < 0 ? 0.0f : e[lane * n_token + t];
#endif
        z[i] = kv_slim<T>(up * w.of(lane)[c] * kv_silu_slope(kv_wide(z[i]) + bias.of(lane)[c]));
    }
}

// z becomes (d_f + gates) * silu'(z + bias)
template <class T> struct feature_slope_args {
    T *z;
    vectors bias, w_i, w_f;
    const float *d_f;
    const float2 *d_gate;
    int n_row, width;
    int64_t count;
    bool gates;
};
template <class T> __global__ void feature_slope_kernel(feature_slope_args<T> a) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int c = (int)(i % a.width);
        const int64_t row = i / a.width, lane = row / a.n_row;
        float d = a.d_f[i];
        if (a.gates) {
            const float2 g = a.d_gate[row];
            d = fmaf(g.x, a.w_i.of(lane)[c], fmaf(g.y, a.w_f.of(lane)[c], d));
        }
        a.z[i] = kv_slim<T>(d * kv_silu_slope(kv_wide(a.z[i]) + a.bias.of(lane)[c]));
    }
}

template <class T> struct own_value { // e * silu(z + bias)
    const T *z;
    vectors bias;
    const float *e;
    const int32_t *token;
    int n_row, n_token, width;
    __device__ float operator()(int lane, int r, int c) const {
        const int t = token[r];
        if (t < 0) return 0;
        const float x = kv_wide(z[((int64_t)lane * n_row + r) * width + c]) + bias.of(lane)[c];
        return e[(int64_t)lane * n_token + t] * kv_silu(x);
    }
};
template <class T> struct plain_value {
    const T *z;
    int n_row, width;
    __device__ float operator()(int lane, int r, int c) const {
        return kv_wide(z[((int64_t)lane * n_row + r) * width + c]);
    }
};
// Column c < width: gradient of the input gate's weight c; then the forget gate's; the last two columns: their biases.
template <class T> struct gate_value {
    const T *x;
    const float2 *d_gate;
    int n_row, width, group;
    __device__ float operator()(int lane, int r, int c) const {
        const float2 g = d_gate[(int64_t)lane * n_row + r];
        if (c >= 2 * width) return c == 2 * width ? g.x : g.y;
        const int64_t at = ((int64_t)(lane / group) * n_row + r) * width + c % width;
        return (c < width ? g.x : g.y) * kv_wide(x[at]);
    }
};

// Input of features and MLP: k and v side by side of each lane, or the hidden state that `group` lanes share.
template <class T> kv_net_matrix input_of(const kv_gpu_net *net, bool transposed) {
    const int64_t stride = (int64_t)net->n_row * net->spec.n_input;
    return {net->at<T>(NET_X), net->spec.n_input, stride, transposed, false};
}

// Products whose operand `x` is shared by the lanes of a group: one batch per group, x standing still inside it.
template <class F> kv_status each_group(const kv_gpu_net *net, bool shared, F product) {
    if (!shared) return product(0, net->n_lane, net->n_lane);
    for (int first = 0; first < net->n_lane; first += net->group)
        KV_RETURN(product(first, net->group, 1));
    return KV_OK;
}

// z [lane][row][width] = x W^T, W [width][n_input] of each lane
template <class T> kv_status input_product(kv_gpu_net *net, kv_net_part w, int width, T *z) {
    const int ni = net->spec.n_input;
    return each_group(net, net->spec.hidden_input, [&](int first, int count, int inputs) {
        kv_net_matrix x = input_of<T>(net, false);
        x.data = static_cast<const T *>(x.data) + (inputs == 1 ? first / net->group : 0) * x.stride;
        if (inputs == 1) x.stride = 0;
        return kv_net_product(
            net, net->n_row, width, ni, x,
            {net->part<T>(w) + first * net->n_packed, ni, net->n_packed, true, false}, false,
            {z + (int64_t)first * net->n_row * width, width, (int64_t)net->n_row * width, false,
             false},
            count);
    });
}

// grad of W = z^T x
template <class T>
kv_status input_gradient(kv_gpu_net *net, const T *z, kv_net_part w, int width, float *grad) {
    const int ni = net->spec.n_input;
    return each_group(net, net->spec.hidden_input, [&](int first, int count, int inputs) {
        kv_net_matrix x = input_of<T>(net, false);
        x.data = static_cast<const T *>(x.data) + (inputs == 1 ? first / net->group : 0) * x.stride;
        if (inputs == 1) x.stride = 0;
        return kv_net_product(net, width, ni, net->n_row,
                              {z + (int64_t)first * net->n_row * width, width,
                               (int64_t)net->n_row * width, true, false},
                              x, false,
                              {grad + first * net->layout.n_param + net->layout.part[w].at, ni,
                               net->layout.n_param, false, true},
                              count);
    });
}

vectors vector_of(const kv_gpu_net *net, const float *param, kv_net_part p) {
    return {param + net->layout.part[p].at, net->layout.n_param};
}

// Gates read the features (of each lane) or the hidden state (of a group).
template <class T> const T *gate_input(const kv_gpu_net *net, int *width, int *group) {
    *width = net->layout.part[KV_NET_GATE_I_W].rows;
    *group = net->spec.hidden_gate ? net->group : 1;
    if (net->spec.hidden_gate) return net->at<T>(NET_HIDDEN);
    if (net->spec.n_feature) return net->at<T>(NET_F);
    if (net->spec.hidden_input) *group = net->group;
    return net->at<T>(NET_X);
}

// Features, or the input itself, as operand of the projections; shared between lanes only when they are hidden states.
template <class T> bool feature_matrix(const kv_gpu_net *net, kv_net_matrix *f) {
    if (!net->spec.n_feature) {
        *f = input_of<T>(net, false);
        return net->spec.hidden_input;
    }
    *f = {net->at<T>(NET_F), net->wide(), (int64_t)net->n_row * net->wide(), false, false};
    return false;
}

template <class T> kv_status projections(kv_gpu_net *net) {
    const int wide = net->wide(), np = net->n_project();
    kv_net_matrix f;
    const bool shared = feature_matrix<T>(net, &f);
    KV_RETURN(each_group(net, shared, [&](int first, int count, int inputs) {
        kv_net_matrix x = f;
        x.data = static_cast<const T *>(x.data) + (inputs == 1 ? first / net->group : 0) * x.stride;
        if (inputs == 1) x.stride = 0;
        return kv_net_product(
            net, net->n_row, net->n_used(), wide, x,
            {net->part<T>(KV_NET_PHI_Q) + first * net->n_packed, wide, net->n_packed, true, false},
            false,
            {net->at<T>(NET_PROJECT) + (int64_t)first * net->n_row * np, np,
             (int64_t)net->n_row * np, false, false},
            count);
    }));
    ones_kernel<<<blocks(net->rows() * np), THREADS, 0, net->gpu->stream>>>(
        net->at<T>(NET_PROJECT), net->at<int32_t>(NET_TOKEN), net->n_row, net->n_used(),
        !net->spec.norm, np, net->rows());
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T> kv_status gates(kv_gpu_net *net, const float *param) {
    gate_args<T> a = {};
    a.x = gate_input<T>(net, &a.width, &a.group);
    a.w_i = vector_of(net, param, KV_NET_GATE_I_W);
    a.w_f = vector_of(net, param, KV_NET_GATE_F_W);
    a.pre = net->at<float2>(NET_PRE);
    a.n_row = net->n_row;
    a.rows = net->rows();
    gate_kernel<<<warp_blocks(a.rows), THREADS, 0, net->gpu->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T> kv_status gate_gradients(kv_gpu_net *net, float *grad) {
    gate_value<T> value = {};
    value.x = gate_input<T>(net, &value.width, &value.group);
    value.d_gate = net->at<float2>(NET_D_GATE);
    value.n_row = net->n_row;
    // Both weights, then both biases, follow each other in the parameters.
    return kv_column_sums(net, value, 2 * value.width + 2,
                          grad + net->layout.part[KV_NET_GATE_I_W].at, net->layout.n_param);
}

template <class T> kv_status projection_gradients(kv_gpu_net *net, float *grad) {
    const int wide = net->wide(), np = net->n_project(), used = net->n_used();
    kv_net_matrix f;
    const bool shared = feature_matrix<T>(net, &f);
    return each_group(net, shared, [&](int first, int count, int inputs) {
        kv_net_matrix x = f;
        x.data = static_cast<const T *>(x.data) + (inputs == 1 ? first / net->group : 0) * x.stride;
        if (inputs == 1) x.stride = 0;
        return kv_net_product(
            net, used, wide, net->n_row,
            {net->at<T>(NET_D_NARROW) + (int64_t)first * net->n_row * np, np,
             (int64_t)net->n_row * np, true, false},
            x, false,
            {grad + first * net->layout.n_param + net->layout.part[KV_NET_PHI_Q].at, wide,
             net->layout.n_param, false, true},
            count);
    });
}

template <class T> kv_status feature_gradients(kv_gpu_net *net, const float *param, float *grad) {
    const int wide = net->wide(), np = net->n_project(), used = net->n_used();
    const int64_t count = net->rows() * wide;
    KV_RETURN(net->reserve(NET_D_F, (size_t)count * 4));
    KV_RETURN(kv_net_product(
        net, net->n_row, wide, used,
        {net->at<T>(NET_D_NARROW), np, (int64_t)net->n_row * np, false, false},
        {net->part<T>(KV_NET_PHI_Q), wide, net->n_packed, false, false}, false,
        {net->at<float>(NET_D_F), wide, (int64_t)net->n_row * wide, false, true}, net->n_lane));
    const feature_slope_args<T> a = {net->at<T>(NET_FEATURE),
                                     vector_of(net, param, KV_NET_FEATURE_B),
                                     vector_of(net, param, KV_NET_GATE_I_W),
                                     vector_of(net, param, KV_NET_GATE_F_W),
                                     net->at<float>(NET_D_F),
                                     net->at<float2>(NET_D_GATE),
                                     net->n_row,
                                     wide,
                                     count,
                                     !net->spec.hidden_gate};
    feature_slope_kernel<<<blocks(count), THREADS, 0, net->gpu->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_column_sums(net, plain_value<T>{a.z, net->n_row, wide}, wide,
                             grad + net->layout.part[KV_NET_FEATURE_B].at, net->layout.n_param));
    return input_gradient<T>(net, a.z, KV_NET_FEATURE_W, wide, grad);
}

template <class T>
kv_status mlp_gradients(kv_gpu_net *net, const float *param, const float *e, float *grad) {
    const int m = net->spec.n_mlp;
    T *z = net->at<T>(NET_MLP);
    const vectors bias = vector_of(net, param, KV_NET_MLP_B1),
                  w2 = vector_of(net, param, KV_NET_MLP_W2);
    const int32_t *token = net->at<int32_t>(NET_TOKEN);
    KV_RETURN(kv_column_sums(net, own_value<T>{z, bias, e, token, net->n_row, net->n_token, m}, m,
                             grad + net->layout.part[KV_NET_MLP_W2].at, net->layout.n_param));
    mlp_slope_kernel<<<blocks(net->rows() * m), THREADS, 0, net->gpu->stream>>>(
        z, bias, w2, e, token, net->n_row, net->n_token, m, net->rows() * m);
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_column_sums(net, plain_value<T>{z, net->n_row, m}, m,
                             grad + net->layout.part[KV_NET_MLP_B1].at, net->layout.n_param));
    return input_gradient<T>(net, z, KV_NET_MLP_W1, m, grad);
}

} // namespace

template <class T>
kv_status kv_net_gather(kv_gpu_net *net, const float *y, int64_t lanes, int width, int first,
                        int ld, kv_net_array to) {
    const int64_t count = lanes * net->n_row * width;
    KV_RETURN(net->reserve(to, (size_t)(lanes * net->n_row * ld) * sizeof(T)));
    gather_kernel<<<blocks(count), THREADS, 0, net->gpu->stream>>>(
        y, net->at<int32_t>(NET_TOKEN), net->n_token, net->n_row, width, first, ld, count,
        net->at<T>(to));
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T>
kv_status kv_net_tokens_forward(kv_gpu_net *net, const float *param, float *rhat) {
    const kv_net_spec *spec = &net->spec;
    const size_t rows = (size_t)net->rows();
    if (kv_fused_mlp(net)) {
        KV_RETURN(kv_fused_mlp_forward(net, param, rhat));
    } else if (spec->n_mlp) {
        KV_RETURN(net->reserve(NET_MLP, rows * (size_t)spec->n_mlp * sizeof(T)));
        KV_RETURN(input_product<T>(net, KV_NET_MLP_W1, spec->n_mlp, net->at<T>(NET_MLP)));
        const own_args<T> a = {net->at<T>(NET_MLP),
                               vector_of(net, param, KV_NET_MLP_B1),
                               vector_of(net, param, KV_NET_MLP_W2),
                               net->at<int32_t>(NET_TOKEN),
                               rhat,
                               net->n_row,
                               net->n_token,
                               spec->n_mlp,
                               net->rows()};
        own_kernel<<<warp_blocks(a.rows), THREADS, 0, net->gpu->stream>>>(a);
        KV_CUDA(cudaGetLastError());
    }
    if (!spec->recurrent) return KV_OK;
    if (spec->n_feature) {
        const size_t cells = rows * (size_t)net->wide();
        KV_RETURN(net->reserve(NET_FEATURE, cells * sizeof(T)));
        KV_RETURN(net->reserve(NET_F, cells * sizeof(T)));
        KV_RETURN(input_product<T>(net, KV_NET_FEATURE_W, net->wide(), net->at<T>(NET_FEATURE)));
        feature_kernel<<<blocks((int64_t)cells), THREADS, 0, net->gpu->stream>>>(
            net->at<T>(NET_FEATURE), vector_of(net, param, KV_NET_FEATURE_B), net->n_row,
            net->wide(), (int64_t)cells, net->at<T>(NET_F));
        KV_CUDA(cudaGetLastError());
    }
    KV_RETURN(net->reserve(NET_PROJECT, rows * (size_t)net->n_project() * sizeof(T)));
    KV_RETURN(net->reserve(NET_PRE, rows * sizeof(float2)));
    if (kv_fused_memory(net)) {
        KV_RETURN(kv_fused_project(net, param));
        return spec->hidden_gate ? gates<T>(net, param) : KV_OK;
    }
    KV_RETURN(projections<T>(net));
    return gates<T>(net, param);
}

template <class T>
kv_status kv_net_tokens_backward(kv_gpu_net *net, const float *param, const float *e, float *grad) {
    if (net->spec.recurrent) {
        const bool fused = kv_fused_memory(net);
        if (!fused || net->spec.hidden_gate) KV_RETURN(gate_gradients<T>(net, grad));
        KV_RETURN(fused ? kv_fused_project_backward(net, grad)
                        : projection_gradients<T>(net, grad));
        if (net->spec.n_feature) KV_RETURN(feature_gradients<T>(net, param, grad));
    }
    if (kv_fused_mlp(net)) return kv_fused_mlp_backward(net, param, e, grad);
    return net->spec.n_mlp ? mlp_gradients<T>(net, param, e, grad) : KV_OK;
}

#define INSTANCE(T) \
    template kv_status kv_net_gather<T>(kv_gpu_net *, const float *, int64_t, int, int, int, \
                                        kv_net_array); \
    template kv_status kv_net_tokens_forward<T>(kv_gpu_net *, const float *, float *); \
    template kv_status kv_net_tokens_backward<T>(kv_gpu_net *, const float *, const float *, \
                                                 float *);
INSTANCE(float)
INSTANCE(__nv_bfloat16)
#undef INSTANCE
