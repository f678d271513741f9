// Scorer networks on the device: layout of rows and parameters, matrix products, the passes in order.
#include <algorithm>
#include <new>
#include <vector>

#include "kernels/net.cuh"

namespace {

// Parts that must start on 16 bytes for the matrix units; the others follow their neighbour without a gap, as the products over
// several parts want.
bool starts_group(kv_net_part p) {
    return p == KV_NET_FEATURE_W || p == KV_NET_PHI_Q || p == KV_NET_GATE_I_W || p == KV_NET_MLP_W1;
}

struct pack_args {
    const float *param;
    int64_t at[KV_NET_PARTS], packed_at[KV_NET_PARTS], size[KV_NET_PARTS];
    int64_t n_param, n_packed;
};

template <class T> __global__ void pack_kernel(pack_args a, T *out) {
    kv_follow();
    const float *from = a.param + blockIdx.y * a.n_param;
    out += blockIdx.y * a.n_packed;
    for (int p = 0; p < KV_NET_PARTS; p++)
        for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.size[p];
             i += (int64_t)gridDim.x * blockDim.x)
            out[a.packed_at[p] + i] = kv_slim<T>(from[a.at[p] + i]);
}

template <class T> kv_status pack(kv_gpu_net *net, const float *param) {
    pack_args a = {};
    a.param = param;
    a.n_param = net->layout.n_param;
    a.n_packed = net->n_packed;
    for (int p = 0; p < KV_NET_PARTS; p++) {
        const int64_t cols = net->layout.part[p].cols;
        a.at[p] = net->layout.part[p].at;
        a.packed_at[p] = net->packed_at[p];
        a.size[p] = net->layout.part[p].rows * (cols ? cols : 1);
    }
    KV_RETURN(net->reserve(NET_PARAM, (size_t)net->n_lane * (size_t)net->n_packed * sizeof(T)));
    return kv_net_launch(net->gpu, pack_kernel<T>, dim3(128, (unsigned)net->n_lane), 256, 0, a,
                         net->at<T>(NET_PARAM));
}

template <class T> kv_status forward(kv_gpu_net *net, const float *param, float *rhat) {
    KV_RETURN(pack<T>(net, param));
    KV_RETURN(kv_net_tokens_forward<T>(net, param, rhat));
    return net->spec.recurrent ? kv_net_memory_forward<T>(net, param, rhat) : KV_OK;
}

template <class T>
kv_status backward(kv_gpu_net *net, const float *param, const float *e, float *grad) {
    if (net->spec.recurrent) KV_RETURN(kv_net_memory_backward<T>(net, param, e, grad));
    return kv_net_tokens_backward<T>(net, param, e, grad);
}

// Rows of one lane: token of each, token that it reads for, borders of documents by chunk.
kv_status lay_out(kv_gpu_net *net, int32_t n_doc, const int64_t *doc_first) {
    std::vector<int32_t> token, read, edge;
    net->slack = kv_div_up(net->delay(), KV_CHUNK) * KV_CHUNK;
    token.assign((size_t)net->slack, -1);
    for (int32_t doc = 0; doc < n_doc; doc++) {
        const size_t first = token.size();
        for (int64_t t = doc_first[doc]; t < doc_first[doc + 1]; t++) token.push_back((int32_t)t);
        const size_t end = token.size();
        while (token.size() % KV_CHUNK) token.push_back(-1);
        read.resize(token.size(), -1);
        edge.resize(token.size() / KV_CHUNK, 0);
        for (size_t r = first + (size_t)net->delay(); r < end; r++)
            read[r] = token[r - (size_t)net->delay()];
        if (end == first) continue;
        edge[first / KV_CHUNK] |= 1;
        edge[token.size() / KV_CHUNK - 1] |= 2;
    }
    net->n_row = (int32_t)token.size();
    net->n_chunk = net->n_row / KV_CHUNK;
    read.resize(token.size(), -1);
    edge.resize((size_t)net->n_chunk, 0);
    const struct {
        kv_net_array array;
        const std::vector<int32_t> *from;
    } all[] = {{NET_TOKEN, &token}, {NET_READ, &read}, {NET_EDGE, &edge}};
    for (const auto &x : all) {
        KV_RETURN(net->reserve(x.array, x.from->size() * 4));
        KV_RETURN(kv_gpu_put(net->array[x.array], x.from->data(), x.from->size() * 4));
    }
    return KV_OK;
}

template <class T>
kv_status input(kv_gpu_net *net, const float *k, const float *v, const float *hidden) {
    const int ni = net->spec.n_input, groups = net->n_lane / net->group;
    if (net->spec.hidden_input) {
        KV_RETURN(kv_net_gather<T>(net, hidden, groups, ni, 0, ni, NET_X));
    } else if (v) {
        KV_RETURN(kv_net_gather<T>(net, k, net->n_lane, ni / 2, 0, ni, NET_X));
        KV_RETURN(kv_net_gather<T>(net, v, net->n_lane, ni / 2, ni / 2, ni, NET_X));
    } else {
        KV_RETURN(kv_net_gather<T>(net, k, net->n_lane, ni, 0, ni, NET_X));
    }
    if (!net->spec.hidden_gate) return KV_OK;
    return kv_net_gather<T>(net, hidden, groups, net->spec.n_hidden, 0, net->spec.n_hidden,
                            NET_HIDDEN);
}

} // namespace

kv_status kv_gpu_net::reserve(kv_net_array i, size_t bytes) {
    if (array[i] && array[i]->bytes >= bytes) return KV_OK;
    KV_RETURN(kv_gpu_free(array[i]));
    array[i] = nullptr;
    KV_RETURN(kv_gpu_new(gpu, bytes, &array[i]));
    // initcheck does not see what cuBLAS stores by bulk copies; guarded memory is NaN instead.
    if (!gpu->guard && bytes) KV_CUDA(cudaMemsetAsync(array[i]->data, 0, bytes, gpu->stream));
    return KV_OK;
}

kv_status kv_net_product(const kv_gpu_net *net, int m, int n, int64_t k, kv_net_matrix a,
                         kv_net_matrix b, bool add, kv_net_matrix c, int64_t count) {
    const float one = 1.0f, beta = add ? 1.0f : 0.0f;
    const auto type = [&](const kv_net_matrix &x) {
        return x.wide || net->exact ? CUDA_R_32F : CUDA_R_16BF;
    };
    // Column-major, as cuBLAS reads these arrays: C^T = B^T A^T.
    const cublasStatus_t status = net->blas->gemm_batched(
        net->blas->handle, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
        a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, (int)k, &one, b.data, type(b), (int)b.ld,
        b.stride, a.data, type(a), (int)a.ld, a.stride, &beta, const_cast<void *>(c.data), type(c),
        (int)c.ld, c.stride, (int)count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS)
        return KV_FAIL(KV_E_INTERNAL, "cuBLAS: %lld scorer products %d x %d x %lld failed (%d)",
                       (long long)count, m, n, (long long)k, (int)status);
    return KV_OK;
}

kv_status kv_gpu_net_new(kv_gpu *g, const kv_net_spec *spec, int32_t n_lane, int32_t group,
                         bool exact, kv_gpu_net **out) {
    *out = nullptr;
    if (n_lane < 1 || group < 1 || n_lane % group != 0)
        return KV_FAIL(KV_E_USAGE, "scorer network of %d lanes, %d of them share hidden states",
                       n_lane, group);
    kv_gpu_net *net = new (std::nothrow) kv_gpu_net();
    if (!net) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    net->gpu = g;
    net->spec = *spec;
    net->n_lane = n_lane;
    net->group = group;
    net->exact = exact;
    kv_net_describe(spec, &net->layout);
    for (int p = 0; p < KV_NET_PARTS; p++) {
        const int64_t cols = net->layout.part[p].cols;
        if (starts_group((kv_net_part)p)) net->n_packed = (net->n_packed + 7) / 8 * 8;
        net->packed_at[p] = net->n_packed;
        net->n_packed += net->layout.part[p].rows * (cols ? cols : 1);
    }
    net->n_packed = (net->n_packed + 7) / 8 * 8;
    const kv_status st = kv_gpu_blas(g, &net->blas);
    if (st == KV_OK)
        *out = net;
    else
        delete net;
    return st;
}

void kv_gpu_net_free(kv_gpu_net *net) {
    if (!net) return;
    for (kv_gpu_buffer *b : net->array) (void)kv_gpu_free(b);
    delete net;
}

kv_status kv_gpu_net_input(kv_gpu_net *net, int32_t n_token, int32_t n_doc,
                           const int64_t *doc_first, const kv_gpu_buffer *k, const kv_gpu_buffer *v,
                           const kv_gpu_buffer *hidden) {
    const kv_net_spec *spec = &net->spec;
    const size_t rows = (size_t)net->n_lane * (size_t)n_token,
                 shared = (size_t)(net->n_lane / net->group) * (size_t)n_token,
                 width = (size_t)spec->n_input;
    if (!spec->hidden_input) {
        KV_RETURN(kv_buffer_check(k, v ? "k" : "x", rows * (v ? width / 2 : width), sizeof(float)));
        KV_RETURN(kv_buffer_check(v, "v", rows * (width / 2), sizeof(float)));
    }
    if (spec->n_hidden && !hidden)
        return KV_FAIL(KV_E_USAGE, "these weights read hidden states, and none are given");
    KV_RETURN(kv_buffer_check(hidden, "hidden", shared * (size_t)spec->n_hidden, sizeof(float)));
    net->n_token = n_token;
    KV_RETURN(lay_out(net, n_doc, doc_first));
    return (net->exact ? input<float> : input<__nv_bfloat16>)(net, kv_data<float>(k),
                                                              kv_data<float>(v),
                                                              kv_data<float>(hidden));
}

kv_status kv_gpu_net_forward(kv_gpu_net *net, const kv_gpu_buffer *param, kv_gpu_buffer *rhat) {
    KV_RETURN(kv_buffer_check(param, "param", (size_t)(net->n_lane * net->layout.n_param),
                              sizeof(float)));
    KV_RETURN(
        kv_buffer_check(rhat, "rhat", (size_t)net->n_lane * (size_t)net->n_token, sizeof(float)));
    return (net->exact ? forward<float> : forward<__nv_bfloat16>)(net, kv_data<float>(param),
                                                                  kv_data<float>(rhat));
}

kv_status kv_gpu_net_backward(kv_gpu_net *net, const kv_gpu_buffer *param, const kv_gpu_buffer *e,
                              kv_gpu_buffer *grad) {
    const size_t count = (size_t)(net->n_lane * net->layout.n_param);
    KV_RETURN(kv_buffer_check(param, "param", count, sizeof(float)));
    KV_RETURN(kv_buffer_check(grad, "grad", count, sizeof(float)));
    KV_RETURN(kv_buffer_check(e, "e", (size_t)net->n_lane * (size_t)net->n_token, sizeof(float)));
    return (net->exact ? backward<float> : backward<__nv_bfloat16>)(net, kv_data<float>(param),
                                                                    kv_data<float>(e),
                                                                    kv_data<float>(grad));
}
