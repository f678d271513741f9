// The recurrent memory of the scorers, chunk by chunk, forward and backward (maths.md 6.5-6.7, 6.11; reference/scorer_memory_impl.h).
//
// A chunk's contribution to the memory, and to the memory's gradient, needs no other chunk: all chunks of all lanes work at once in
// strided batches of small matrix products; one scan forward and one backward tie them together. Levels and their differences are
// double until the exponential is taken, so no product sees a number larger than 1 times its inputs.
#include <algorithm>

#include "kernels/fused.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

unsigned blocks(int64_t n) {
    return (unsigned)std::min<int64_t>((n + THREADS - 1) / THREADS, 1 << 16);
}

// Columns of the projections times a factor of their row: key by fresh, value by fresh, query (of the token read for) by carried.
template <class T>
__global__ void scale_kernel(const T *project, const float4 *factor, bool carried, int shift,
                             int column, int width, int ld, int64_t first_row, int64_t rows,
                             T *out) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * width;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = first_row + i / width;
        const float4 f = factor[row];
        const float x = kv_wide(project[(row - shift) * ld + column + i % width]);
        out[row * width + i % width] = kv_slim<T>((carried ? f.y : f.x) * x);
    }
}

// Updates become running sums, chunk after chunk: reverse false: the memory at each chunk's start; true: the gradient at its end.
template <class T, bool REVERSE>
__global__ void scan_kernel(const float *update, const float *fade, const int32_t *edge,
                            int n_chunk, int first, int size, T *out) {
    constexpr int AHEAD = 8;
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size) return;
    const int64_t lane = (int64_t)blockIdx.y * n_chunk;
    const int count = n_chunk - first;
    float memory = 0;
    for (int c = 0; c < first; c++) out[(lane + c) * size + i] = kv_slim<T>(0.0f); // the slack
    for (int done = 0; done < count; done += AHEAD) {
        float fresh[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int c = REVERSE ? n_chunk - 1 - done - j : first + done + j;
            if (done + j < count) fresh[j] = update[(lane + c) * size + i];
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int c = REVERSE ? n_chunk - 1 - done - j : first + done + j;
            if (done + j >= count) break;
            if (edge[c] & (REVERSE ? 2 : 1)) memory = 0;
            out[(lane + c) * size + i] = kv_slim<T>(memory);
            memory = fmaf(fade[lane + c], memory, fresh[j]);
        }
    }
}

// x[chunk][j][i] times the decay from row i to row j times 1/sqrt(n_key); 0 where row j does not read or i lies behind it.
template <class T>
__global__ void weight_kernel(T *x, const double2 *from, const int32_t *read, int n_row,
                              float scale, int64_t first_chunk) {
    const int64_t chunk = first_chunk + blockIdx.x;
    __shared__ double back[KV_CHUNK];
    const double2 own = threadIdx.x < KV_CHUNK ? from[chunk * KV_CHUNK + threadIdx.x] : double2();
    __shared__ double ahead[KV_CHUNK];
    __shared__ bool reads[KV_CHUNK];
    if (threadIdx.x < KV_CHUNK) {
        ahead[threadIdx.x] = own.x;
        back[threadIdx.x] = own.y;
        reads[threadIdx.x] = read[(chunk * KV_CHUNK + threadIdx.x) % n_row] >= 0;
    }
    __syncthreads();
    T *tile = x + chunk * KV_CHUNK * KV_CHUNK;
    for (int k = (int)threadIdx.x; k < KV_CHUNK * KV_CHUNK; k += THREADS) {
        const int j = k / KV_CHUNK, i = k % KV_CHUNK;
        const bool sees = i <= j && reads[j];
        tile[k] =
            kv_slim<T>(sees ? kv_wide(tile[k]) * scale * expf((float)(ahead[j] + back[i])) : 0.0f);
    }
}

struct readout_args {
    const float *num; // [lane][row][n_augmented]
    float4 *factor;
    const int32_t *read;
    const float *a; // [n_value] of each lane
    int64_t a_stride, rows;
    float *rhat;
    int n_row, n_token, n_value, n_augmented;
    bool norm, add;
};

// h = num / divisor, rhat of the token read for; a warp per row. The divisor stays for the backward pass.
__global__ void readout_kernel(readout_args r) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= r.rows) return;
    const int64_t lane = row / r.n_row;
    const int t = r.read[row % r.n_row], own = (int)threadIdx.x % 32;
    if (t < 0) return;
    const float *x = r.num + row * r.n_augmented, *a = r.a + lane * r.a_stride;
    const float floor = r.factor[row].z;
    double size = 0;
    for (int c = own; c < r.n_value; c += 32) size += (double)x[c] * (double)x[c];
    size = kv_warp_sum(size);
    const double by = r.norm ? sqrt(size / r.n_value + 1e-6 * (double)floor * (double)floor)
                             : fmax(fabs((double)x[r.n_value]), (double)floor);
    const float inverse = (float)(1 / by);
    float score = 0;
    for (int c = own; c < r.n_value; c += 32) score = fmaf(a[c], kv_silu(x[c] * inverse), score);
    score = kv_warp_sum(score);
    if (own) return;
    r.factor[row].w = (float)by;
    float *to = &r.rhat[lane * r.n_token + t];
    *to = r.add ? *to + score : score;
}

template <class T> struct delta_args {
    readout_args r;
    const float *e; // [lane][n_token]
    T *delta, *delta_c;
};

// Gradient at num: through silu and the norm, or the division (maths.md 6.6); a warp per row.
template <class T> __global__ void delta_kernel(delta_args<T> d) {
    const readout_args &r = d.r;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= r.rows) return;
    const int64_t lane = row / r.n_row;
    const int t = r.read[row % r.n_row], own = (int)threadIdx.x % 32;
    T *delta = d.delta + row * r.n_augmented, *delta_c = d.delta_c + row * r.n_augmented;
    if (t < 0) {
        for (int c = own; c < r.n_augmented; c += 32) delta[c] = delta_c[c] = kv_slim<T>(0.0f);
        return;
    }
    const float4 f = r.factor[row];
    const float *x = r.num + row * r.n_augmented, *a = r.a + lane * r.a_stride;
    const float e = d.e[lane * r.n_token + t], inverse = 1 / f.w;
    float along = 0;
    for (int c = own; c < r.n_value; c += 32) {
        const float h = x[c] * inverse;
        along = fmaf(e * a[c] * kv_silu_slope(h), h, along);
    }
    along = kv_warp_sum(along);
    const float mean = r.norm ? along / (float)r.n_value : 0;
    for (int c = own; c < r.n_value; c += 32) {
        const float h = x[c] * inverse;
        const float y = (e * a[c] * kv_silu_slope(h) - mean * h) * inverse;
        delta[c] = kv_slim<T>(y);
        delta_c[c] = kv_slim<T>(f.y * y);
    }
    if (!r.norm && own == 0) {
        const float den = x[r.n_value];
        const float y = fabsf(den) > f.z ? -along * inverse * (den > 0 ? 1.0f : -1.0f) : 0.0f;
        delta[r.n_value] = kv_slim<T>(y);
        delta_c[r.n_value] = kv_slim<T>(f.y * y);
    }
}

struct readout_value { // e * silu(h)
    readout_args r;
    const float *e;
    __device__ float operator()(int lane, int row, int c) const {
        const int t = r.read[row];
        const int64_t at = (int64_t)lane * r.n_row + row;
        return t < 0 ? 0.0f
                     : e[(int64_t)lane * r.n_token + t] *
                           kv_silu(r.num[at * r.n_augmented + c] / r.factor[at].w);
    }
};

// Per row: q~.dq~ - k~.dk~ (of the token read for, and of the own one), and k~.dk~; also the narrow copy of the gradients.
template <class T>
__global__ void difference_kernel(const T *project, const float *d_project, const int32_t *read,
                                  int n_row, int delay, int n_key, int ld, int64_t rows,
                                  double *difference, float2 *d_gate, T *narrow) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const int own = (int)threadIdx.x % 32;
    const T *x = project + row * ld;
    const float *d = d_project + row * ld;
    float key = 0, query = 0;
    for (int c = own; c < n_key; c += 32) key = fmaf(kv_wide(x[n_key + c]), d[n_key + c], key);
    if (read[row % n_row] >= 0) {
        const T *y = project + (row - delay) * ld;
        const float *dy = d_project + (row - delay) * ld;
        for (int c = own; c < n_key; c += 32) query = fmaf(kv_wide(y[c]), dy[c], query);
    }
    key = kv_warp_sum(key);
    query = kv_warp_sum(query);
    for (int c = own; c < ld; c += 32) narrow[row * ld + c] = kv_slim<T>(d[c]);
    if (own) return;
    difference[row] = (double)query - (double)key;
    d_gate[row].x = key;
}

// Strided batches over the chunks of all lanes. The slack of the first lane is left out: nothing is read for there, and the rows
// before it do not exist.
template <class T> struct memory {
    kv_gpu_net *net;
    int64_t first, count; // chunks
    int nk, nv, na, np;

    explicit memory(kv_gpu_net *n)
        : net(n), first(n->slack / KV_CHUNK), count((int64_t)n->n_lane * n->n_chunk - first),
          nk(n->spec.n_key), nv(n->spec.n_value), na(n->n_augmented()), np(n->n_project()) {}

    int64_t rows() const { return count * KV_CHUNK; }
    int64_t first_row() const { return first * KV_CHUNK; }

    kv_net_matrix project(int column, int shift, bool transposed) const {
        return {net->at<T>(NET_PROJECT) + (first_row() - shift) * np + column, np,
                (int64_t)KV_CHUNK * np, transposed, false};
    }
    kv_net_matrix query(bool transposed) const { return project(0, net->delay(), transposed); }
    kv_net_matrix key(bool transposed) const { return project(nk, 0, transposed); }
    kv_net_matrix value(bool transposed) const { return project(2 * nk, 0, transposed); }
    kv_net_matrix by_row(kv_net_array i, int width, bool transposed) const {
        return {net->at<T>(i) + first_row() * width, width, (int64_t)KV_CHUNK * width, transposed,
                false};
    }
    kv_net_matrix by_chunk(kv_net_array i, bool transposed) const {
        return {net->at<T>(i) + first * KV_CHUNK * KV_CHUNK, KV_CHUNK, KV_CHUNK * KV_CHUNK,
                transposed, false};
    }
    kv_net_matrix state(kv_net_array i, bool transposed) const {
        return {net->at<T>(i) + first * nk * na, na, (int64_t)nk * na, transposed, false};
    }
    kv_net_matrix update() const {
        return {net->at<float>(NET_UPDATE) + first * nk * na, na, (int64_t)nk * na, false, true};
    }
    kv_net_matrix num() const {
        return {net->at<float>(NET_NUM) + first_row() * na, na, (int64_t)KV_CHUNK * na, false,
                true};
    }
    kv_net_matrix gradient(int column, int shift) const {
        return {net->at<float>(NET_D_PROJECT) + (first_row() - shift) * np + column, np,
                (int64_t)KV_CHUNK * np, false, true};
    }
    kv_status product(int m, int n, int k, kv_net_matrix a, kv_net_matrix b, bool add,
                      kv_net_matrix c) const {
        return kv_net_product(net, m, n, k, a, b, add, c, count);
    }

    kv_status scale(kv_net_array to, int column, int width, bool carried) const {
        KV_RETURN(net->reserve(to, (size_t)net->rows() * (size_t)width * sizeof(T)));
        scale_kernel<<<blocks(rows() * width), THREADS, 0, net->gpu->stream>>>(
            net->at<T>(NET_PROJECT), net->at<float4>(NET_SCALE), carried,
            carried ? net->delay() : 0, column, width, np, first_row(), rows(), net->at<T>(to));
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }
    kv_status weigh(kv_net_array x) const {
        weight_kernel<<<(unsigned)count, THREADS, 0, net->gpu->stream>>>(
            net->at<T>(x), net->at<double2>(NET_FROM), net->at<int32_t>(NET_READ), net->n_row,
            (float)(1 / sqrt((double)nk)), first);
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }
    template <bool REVERSE> kv_status scan(kv_net_array to) const {
        const int size = nk * na;
        KV_RETURN(net->reserve(to, (size_t)net->n_lane * (size_t)net->n_chunk * (size_t)size *
                                       sizeof(T)));
        scan_kernel<T, REVERSE><<<dim3((unsigned)kv_div_up(size, 128), (unsigned)net->n_lane), 128,
                                  0, net->gpu->stream>>>(
            net->at<float>(NET_UPDATE), net->at<float>(NET_FADE), net->at<int32_t>(NET_EDGE),
            net->n_chunk, (int)first, size, net->at<T>(to));
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }

    readout_args readout(const float *param, float *rhat) const {
        return {net->at<float>(NET_NUM),
                net->at<float4>(NET_SCALE),
                net->at<int32_t>(NET_READ),
                param + net->layout.part[KV_NET_READOUT].at,
                net->layout.n_param,
                net->rows(),
                rhat,
                net->n_row,
                net->n_token,
                nv,
                na,
                net->spec.norm,
                net->spec.n_mlp > 0};
    }

    kv_status forward(const float *param, float *rhat) const {
        const size_t chunks = (size_t)net->n_lane * (size_t)net->n_chunk;
        KV_RETURN(kv_net_levels(net, param, false, nullptr));
        KV_RETURN(scale(NET_SCALED, nk, nk, false));
        KV_RETURN(scale(NET_QUERY, 0, nk, true));
        KV_RETURN(net->reserve(NET_UPDATE, chunks * (size_t)(nk * na) * 4));
        KV_RETURN(
            product(nk, na, KV_CHUNK, by_row(NET_SCALED, nk, true), value(false), false, update()));
        KV_RETURN(scan<false>(NET_STATE));
        KV_RETURN(net->reserve(NET_WEIGHTED, chunks * KV_CHUNK * KV_CHUNK * sizeof(T)));
        KV_RETURN(product(KV_CHUNK, KV_CHUNK, nk, query(false), key(true), false,
                          by_chunk(NET_WEIGHTED, false)));
        KV_RETURN(weigh(NET_WEIGHTED));
        KV_RETURN(net->reserve(NET_NUM, (size_t)net->rows() * (size_t)na * 4));
        KV_RETURN(product(KV_CHUNK, na, nk, by_row(NET_QUERY, nk, false), state(NET_STATE, false),
                          false, num()));
        KV_RETURN(product(KV_CHUNK, na, KV_CHUNK, by_chunk(NET_WEIGHTED, false), value(false), true,
                          num()));
        // Tokens whose window never passes are not read for: their score is their own.
        if (!net->spec.n_mlp)
            KV_CUDA(cudaMemsetAsync(rhat, 0, (size_t)net->n_lane * (size_t)net->n_token * 4,
                                    net->gpu->stream));
        readout_kernel<<<(unsigned)((net->rows() + WARPS - 1) / WARPS), THREADS, 0,
                         net->gpu->stream>>>(readout(param, rhat));
        KV_CUDA(cudaGetLastError());
        return KV_OK;
    }

    kv_status deltas(const float *param, const float *e, float *grad) const {
        const size_t cells = (size_t)net->rows() * (size_t)na;
        KV_RETURN(net->reserve(NET_DELTA, cells * sizeof(T)));
        KV_RETURN(net->reserve(NET_DELTA_C, cells * sizeof(T)));
        const delta_args<T> d = {readout(param, nullptr), e, net->at<T>(NET_DELTA),
                                 net->at<T>(NET_DELTA_C)};
        delta_kernel<<<(unsigned)((net->rows() + WARPS - 1) / WARPS), THREADS, 0,
                       net->gpu->stream>>>(d);
        KV_CUDA(cudaGetLastError());
        return kv_column_sums(net, readout_value{d.r, e}, nv,
                              grad + net->layout.part[KV_NET_READOUT].at, net->layout.n_param);
    }

    kv_status gate_gradients() const {
        const size_t all = (size_t)net->rows();
        KV_RETURN(net->reserve(NET_DIFFERENCE, all * sizeof(double)));
        KV_RETURN(net->reserve(NET_D_GATE, all * sizeof(float2)));
        KV_RETURN(net->reserve(NET_D_NARROW, all * (size_t)np * sizeof(T)));
        difference_kernel<<<(unsigned)((net->rows() + WARPS - 1) / WARPS), THREADS, 0,
                            net->gpu->stream>>>(
            net->at<T>(NET_PROJECT), net->at<float>(NET_D_PROJECT), net->at<int32_t>(NET_READ),
            net->n_row, net->delay(), nk, np, net->rows(), net->at<double>(NET_DIFFERENCE),
            net->at<float2>(NET_D_GATE), net->at<T>(NET_D_NARROW));
        KV_CUDA(cudaGetLastError());
        return kv_net_gate_gradients(net);
    }

    kv_status backward(const float *param, const float *e, float *grad) const {
        const size_t chunks = (size_t)net->n_lane * (size_t)net->n_chunk;
        const size_t bytes = (size_t)net->rows() * (size_t)np * 4;
        KV_RETURN(deltas(param, e, grad));
        KV_RETURN(scale(NET_VALUE, 2 * nk, na, false));
        KV_RETURN(net->reserve(NET_MIX, chunks * KV_CHUNK * KV_CHUNK * sizeof(T)));
        KV_RETURN(product(KV_CHUNK, KV_CHUNK, na, by_row(NET_DELTA, na, false), value(true), false,
                          by_chunk(NET_MIX, false)));
        KV_RETURN(weigh(NET_MIX));
        KV_RETURN(product(nk, na, KV_CHUNK, query(true), by_row(NET_DELTA_C, na, false), false,
                          update()));
        KV_RETURN(scan<true>(NET_D_STATE));
        KV_RETURN(net->reserve(NET_D_PROJECT, bytes));
        KV_CUDA(cudaMemsetAsync(net->array[NET_D_PROJECT]->data, 0, bytes, net->gpu->stream));
        // dq~ (in the place of the token read for), dk~, dv~: through the memory, then inside the chunk
        KV_RETURN(product(KV_CHUNK, nk, na, by_row(NET_DELTA_C, na, false), state(NET_STATE, true),
                          false, gradient(0, net->delay())));
        KV_RETURN(product(KV_CHUNK, nk, KV_CHUNK, by_chunk(NET_MIX, false), key(false), true,
                          gradient(0, net->delay())));
        KV_RETURN(product(KV_CHUNK, nk, na, by_row(NET_VALUE, na, false), state(NET_D_STATE, true),
                          false, gradient(nk, 0)));
        KV_RETURN(product(KV_CHUNK, nk, KV_CHUNK, by_chunk(NET_MIX, true), query(false), true,
                          gradient(nk, 0)));
        KV_RETURN(product(KV_CHUNK, nv, nk, by_row(NET_SCALED, nk, false),
                          state(NET_D_STATE, false), false, gradient(2 * nk, 0)));
        KV_RETURN(product(KV_CHUNK, nv, KV_CHUNK, by_chunk(NET_WEIGHTED, true),
                          by_row(NET_DELTA, na, false), true, gradient(2 * nk, 0)));
        return gate_gradients();
    }
};

} // namespace

template <class T>
kv_status kv_net_memory_forward(kv_gpu_net *net, const float *param, float *rhat) {
    return kv_fused_memory(net) ? kv_fused_memory_forward(net, param, rhat)
                                : memory<T>(net).forward(param, rhat);
}
template <class T>
kv_status kv_net_memory_backward(kv_gpu_net *net, const float *param, const float *e, float *grad) {
    return kv_fused_memory(net) ? kv_fused_memory_backward(net, param, e, grad)
                                : memory<T>(net).backward(param, e, grad);
}

#define INSTANCE(T) \
    template kv_status kv_net_memory_forward<T>(kv_gpu_net *, const float *, float *); \
    template kv_status kv_net_memory_backward<T>(kv_gpu_net *, const float *, const float *, \
                                                 float *);
INSTANCE(float)
INSTANCE(__nv_bfloat16)
#undef INSTANCE
