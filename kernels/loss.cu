// Boundary pairs and loss of many KV heads in training (reference/loss_boundary.h, maths.md 4).
//
// Pairs come from the ranks and cutoffs of select.cu, document by document. The cutoff only moves towards better ranks (maths.md
// 3.6), so the pairs that share a worst kept token follow each other, and so do those that share a newcomer: a token's gradient
// is the sum of two runs, formed in a fixed order without atomics.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "kernels/block_sum.cuh"
#include "kernels/device.cuh"
#include "kernels/select.cuh"

struct kv_gpu_boundary {
    kv_gpu *gpu;
    kv_run run;
    kv_loss_options options;
    int32_t n_lane, n_token, longest, n_pair;
    std::vector<int64_t> doc_first;  // [n_doc + 1]
    std::vector<int32_t> query;      // [n_pair] within their documents
    std::vector<int32_t> pair_first; // [n_doc + 1]
    kv_gpu_buffer *target;           // float [n_lane][n_token]
    // [n_pair], double [n_lane], kv_pair [n_lane][n_pair]
    kv_gpu_buffer *query_there, *log_gamma, *pair;
    kv_gpu_buffer *priority, *rank, *at, *evict_at, *tau; // of one document, [n_lane][its tokens]
    kv_gpu_buffer *slope;               // double [n_lane][n_pair], dL/dDelta of each pair
    kv_gpu_buffer *by_fresh, *by_bound; // double [n_lane][n_token], sums of slopes
};

namespace {

constexpr int THREADS = 256, LOSS_THREADS = 1024;

struct document { // of one lane: n tokens from `first` on, pairs from `pair_first` on
    int first, n, n_token, pair_first, n_pair, all_pairs;
};

// priority [n_lane][n] (kv_static_priority)
__global__ void priority_kernel(document d, const float *target, const double *log_gamma,
                                float *priority) {
    const size_t lane = blockIdx.y;
    const int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (t >= d.n) return;
    const float r = target[lane * (size_t)d.n_token + (size_t)(d.first + t)];
    priority[lane * (size_t)d.n + (size_t)t] = (float)fma(-(double)t, log_gamma[lane], (double)r);
}

struct pair_args {
    document d;
    const int32_t *query, *rank, *at, *tau; // [n_pair of the document], [n_lane][n]
    const float *target;
    const double *log_gamma;
    kv_pair *pair;
    int window;
};

__global__ void pair_kernel(pair_args a) {
    const size_t lane = blockIdx.y, plane = lane * (size_t)a.d.n;
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= a.d.n_pair) return;
    const int q = a.query[i], fresh = q - a.window, cut = a.tau[plane + (size_t)q],
              bound = a.at[plane + (size_t)cut];
    const float *r = a.target + lane * (size_t)a.d.n_token + (size_t)a.d.first;
    const double apart = __dadd_rn((double)r[fresh], -(double)r[bound]),
                 age = __dmul_rn((double)(bound - fresh), a.log_gamma[lane]);
    kv_pair p;
    p.fresh = fresh + a.d.first;
    p.bound = bound + a.d.first;
    p.keep = a.rank[plane + (size_t)fresh] <= cut;
    p.margin = fabs(__dadd_rn(apart, age));
    a.pair[lane * (size_t)a.d.all_pairs + (size_t)(a.d.pair_first + i)] = p;
}

struct loss_args {
    const kv_pair *pair; // [n_lane][n_pair]
    const float *rhat;   // [n_lane][n_token]
    const double *log_gamma;
    double *slope; // [n_lane][n_pair]
    kv_loss *loss; // [n_lane]
    int n_pair, n_token;
    double margin, temp;
    bool balance;
};

__device__ double weight_of(const kv_pair &p, double margin) {
    if (p.fresh == p.bound) return 0;
    return margin > 0 ? fmin(1.0, p.margin / margin) : 1.0;
}

__device__ double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }

// One block per lane.
__global__ void __launch_bounds__(LOSS_THREADS) loss_kernel(loss_args a) {
    __shared__ double shared[32];
    const size_t lane = blockIdx.x;
    const kv_pair *pair = a.pair + lane * (size_t)a.n_pair;
    const float *rhat = a.rhat + lane * (size_t)a.n_token;
    double *slope = a.slope + lane * (size_t)a.n_pair;
    const double log_gamma = a.log_gamma[lane];
    double weights[2] = {0, 0}, factor[2] = {1, 1}, z = 0;
    for (int i = (int)threadIdx.x; i < a.n_pair; i += LOSS_THREADS)
        weights[pair[i].keep] += weight_of(pair[i], a.margin);
    for (double &w : weights) w = kv_block_sum(w, shared);
    if (a.balance && weights[0] > 0 && weights[1] > 0)
        for (int y = 0; y < 2; y++)
            factor[y] = fmin(10.0, (weights[0] + weights[1]) / (2 * weights[y]));
    for (int y = 0; y < 2; y++) z += factor[y] * weights[y];
    double loss = 0, by_gamma = 0, right = 0, keep = 0, n = 0;
    for (int i = (int)threadIdx.x; i < a.n_pair; i += LOSS_THREADS) {
        const kv_pair p = pair[i];
        const double weight = z == 0 ? 0 : weight_of(p, a.margin) * factor[p.keep] / z;
        double c = 0;
        if (weight != 0) {
            const double sign = p.keep ? 1 : -1;
#ifdef KV_BREAK_BOUNDARY
            const double age = 0;
#else
            const double age = p.bound - p.fresh;
#endif
            // Rounded step by step, as on the CPU: its sign is a decision.
            const double delta = __dadd_rn(__dadd_rn((double)rhat[p.fresh], -(double)rhat[p.bound]),
                                           __dmul_rn(age, log_gamma));
            c = -weight * sign / a.temp / (1 + exp(sign * delta / a.temp));
            loss += weight * softplus(-sign * delta / a.temp);
            by_gamma += c * age;
            n += 1;
            keep += p.keep;
            right += (delta > 0) == p.keep;
        }
        slope[i] = c;
    }
    loss = kv_block_sum(loss, shared);
    by_gamma = kv_block_sum(by_gamma, shared);
    right = kv_block_sum(right, shared);
    keep = kv_block_sum(keep, shared);
    n = kv_block_sum(n, shared);
    if (threadIdx.x == 0)
        a.loss[lane] =
            kv_loss{loss, by_gamma, n > 0 ? right / n : 0, n > 0 ? keep / n : 0, (int64_t)n};
}

// Sums of slopes by newcomer and by worst kept token. A warp looks at 32 neighbouring pairs and sums the runs that begin there.
__global__ void run_kernel(const kv_pair *pairs, const double *slopes, int n_pair, int n_token,
                           double *by_fresh, double *by_bound) {
    const size_t lane = blockIdx.y;
    const int own = (int)threadIdx.x % 32, i = (int)(blockIdx.x * THREADS + threadIdx.x),
              base = i - own;
    if (base >= n_pair) return;
    const kv_pair *pair = pairs + lane * (size_t)n_pair;
    const double *slope = slopes + lane * (size_t)n_pair;
    const bool here = i < n_pair;
    if (here && (i == 0 || pair[i - 1].fresh != pair[i].fresh)) {
        double sum = 0;
        for (int j = i; j < n_pair && pair[j].fresh == pair[i].fresh; j++) sum += slope[j];
        by_fresh[lane * (size_t)n_token + (size_t)pair[i].fresh] = sum;
    }
    uint32_t starts = __ballot_sync(~0u, here && (i == 0 || pair[i - 1].bound != pair[i].bound));
    while (starts) {
        const int first = base + __ffs((int)starts) - 1, bound = pair[first].bound;
        starts &= starts - 1;
        double sum = 0;
        int j = first + own;
        for (bool in = true; __any_sync(~0u, in); j += 32) {
            in = in && j < n_pair && pair[j].bound == bound;
            if (in) sum += slope[j];
        }
        sum = kv_lanes_sum(sum);
        if (own == 0) by_bound[lane * (size_t)n_token + (size_t)bound] = sum;
    }
}

__global__ void gradient_kernel(const double *by_fresh, const double *by_bound, size_t n,
                                double share, float *e) {
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        e[i] = (float)((by_fresh[i] - by_bound[i]) / share);
}

// Queries of every document at a step: query, pair_first, n_pair.
void choose_queries(kv_gpu_boundary *b, int32_t step) {
    const int32_t docs = (int32_t)b->doc_first.size() - 1;
    std::vector<int32_t> some((size_t)b->longest);
    b->query.clear();
    b->pair_first.assign(1, 0);
    for (int32_t doc = 0; doc < docs; doc++) {
        const int32_t n = (int32_t)(b->doc_first[(size_t)doc + 1] - b->doc_first[(size_t)doc]);
        const int32_t count =
            kv_boundary_queries(n, &b->run, &b->options, b->run.seed, step, doc, some.data());
        b->query.insert(b->query.end(), some.begin(), some.begin() + count);
        b->pair_first.push_back((int32_t)b->query.size());
    }
    b->n_pair = (int32_t)b->query.size();
}

kv_status put_queries(kv_gpu_boundary *b) {
    return b->n_pair ? kv_gpu_put(b->query_there, b->query.data(), b->query.size() * 4) : KV_OK;
}

kv_status form_pairs(kv_gpu_boundary *b, size_t doc) {
    kv_gpu *g = b->gpu;
    document d = {};
    d.first = (int)b->doc_first[doc];
    d.n = (int)(b->doc_first[doc + 1] - b->doc_first[doc]);
    d.n_token = b->n_token;
    d.pair_first = b->pair_first[doc];
    d.n_pair = b->pair_first[doc + 1] - d.pair_first;
    d.all_pairs = b->n_pair;
    if (d.n_pair == 0) return KV_OK;
    const unsigned lanes = (unsigned)b->n_lane;
    int32_t *rank = kv_data<int32_t>(b->rank), *at = kv_data<int32_t>(b->at),
            *tau = kv_data<int32_t>(b->tau);
    priority_kernel<<<dim3((unsigned)kv_div_up(d.n, THREADS), lanes), THREADS, 0, g->stream>>>(
        d, kv_data<float>(b->target), kv_data<double>(b->log_gamma), kv_data<float>(b->priority));
    KV_CUDA(cudaGetLastError());
    KV_RETURN(kv_rank_device(g, b->n_lane, d.n, kv_data<float>(b->priority), rank, at));
    KV_RETURN(
        kv_cutoff_device(g, b->n_lane, d.n, &b->run, rank, at, kv_data<int32_t>(b->evict_at), tau));
    const pair_args a = {d,
                         kv_data<int32_t>(b->query_there) + d.pair_first,
                         rank,
                         at,
                         tau,
                         kv_data<float>(b->target),
                         kv_data<double>(b->log_gamma),
                         kv_data<kv_pair>(b->pair),
                         b->run.window};
    pair_kernel<<<dim3((unsigned)kv_div_up(d.n_pair, THREADS), lanes), THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

kv_status allocate(kv_gpu_boundary *b, const float *target) {
    const size_t lanes = (size_t)b->n_lane, tokens = lanes * (size_t)b->n_token,
                 one = lanes * (size_t)b->longest, pairs = (size_t)b->n_pair;
    const struct {
        kv_gpu_buffer **to;
        size_t bytes;
    } all[] = {{&b->target, tokens * sizeof(float)},    {&b->query_there, pairs * sizeof(int32_t)},
               {&b->log_gamma, lanes * sizeof(double)}, {&b->pair, lanes * pairs * sizeof(kv_pair)},
               {&b->priority, one * sizeof(float)},     {&b->rank, one * sizeof(int32_t)},
               {&b->at, one * sizeof(int32_t)},         {&b->evict_at, one * sizeof(int32_t)},
               {&b->tau, one * sizeof(int32_t)},        {&b->slope, lanes * pairs * sizeof(double)},
               {&b->by_fresh, tokens * sizeof(double)}, {&b->by_bound, tokens * sizeof(double)}};
    for (const auto &x : all) KV_RETURN(kv_gpu_new(b->gpu, x.bytes, x.to));
    // Pairs are fetched whole, padding included.
    KV_CUDA(cudaMemsetAsync(b->pair->data, 0, lanes * pairs * sizeof(kv_pair), b->gpu->stream));
    KV_RETURN(kv_gpu_put(b->target, target, tokens * sizeof(float)));
    return put_queries(b);
}

} // namespace

kv_status kv_gpu_boundary_new(kv_gpu *g, const kv_run *run, const kv_loss_options *o,
                              int32_t n_lane, int32_t n_token, int32_t n_doc,
                              const int64_t *doc_first, const float *target,
                              kv_gpu_boundary **out) {
    *out = nullptr;
    if (run->budget <= run->sinks + run->window)
        return KV_FAIL(KV_E_USAGE,
                       "boundary loss: budget %d leaves no slot beside %d sinks and window %d",
                       run->budget, run->sinks, run->window);
    for (int64_t i = 0; i < (int64_t)n_lane * n_token; i++)
        if (std::isnan(target[i]))
            return KV_FAIL(KV_E_DATA,
                           "boundary loss: the target of token %d of lane %d is not a number; look "
                           "for damaged inputs with `kvlab inspect --deep`",
                           (int)(i % n_token), (int)(i / n_token));
    kv_gpu_boundary *b = new (std::nothrow) kv_gpu_boundary();
    if (!b) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    b->gpu = g;
    b->run = *run;
    b->options = *o;
    b->n_lane = n_lane;
    b->n_token = n_token;
    b->doc_first.assign(doc_first, doc_first + n_doc + 1);
    for (int32_t i = 0; i < n_doc; i++)
        b->longest = std::max(b->longest, (int32_t)(doc_first[i + 1] - doc_first[i]));
    choose_queries(b, 0);
    const kv_status st = allocate(b, target);
    if (st == KV_OK)
        *out = b;
    else
        kv_gpu_boundary_free(b);
    return st;
}

void kv_gpu_boundary_free(kv_gpu_boundary *b) {
    if (!b) return;
    kv_gpu_buffer *const owned[] = {b->target,   b->query_there, b->log_gamma, b->pair,
                                    b->priority, b->rank,        b->at,        b->evict_at,
                                    b->tau,      b->slope,       b->by_fresh,  b->by_bound};
    for (kv_gpu_buffer *x : owned) (void)kv_gpu_free(x);
    delete b;
}

kv_status kv_gpu_boundary_pairs(kv_gpu_boundary *b, int32_t step, const double *log_gamma) {
    KV_RETURN(kv_gpu_put(b->log_gamma, log_gamma, (size_t)b->n_lane * sizeof(double)));
    if (b->options.sample > 0) {
        choose_queries(b, step);
        KV_RETURN(put_queries(b));
    }
    for (size_t doc = 0; doc + 1 < b->doc_first.size(); doc++) KV_RETURN(form_pairs(b, doc));
    return KV_OK;
}

kv_status kv_gpu_boundary_get(const kv_gpu_boundary *b, int32_t *n_pair, kv_pair *pair) {
    *n_pair = b->n_pair;
    const size_t bytes = (size_t)b->n_lane * (size_t)b->n_pair * sizeof *pair;
    return pair && bytes ? kv_gpu_get(b->pair, pair, bytes) : KV_OK;
}

kv_status kv_gpu_boundary_loss(kv_gpu_boundary *b, const kv_gpu_buffer *rhat, kv_gpu_buffer *e,
                               kv_gpu_buffer *loss) {
    kv_gpu *g = b->gpu;
    const size_t tokens = (size_t)b->n_lane * (size_t)b->n_token;
    const unsigned lanes = (unsigned)b->n_lane;
    KV_RETURN(kv_buffer_check(rhat, "rhat", tokens, sizeof(float)));
    KV_RETURN(kv_buffer_check(e, "e", tokens, sizeof(float)));
    KV_RETURN(kv_buffer_check(loss, "loss", (size_t)b->n_lane, sizeof(kv_loss)));
    const loss_args a = {kv_data<kv_pair>(b->pair),
                         kv_data<float>(rhat),
                         kv_data<double>(b->log_gamma),
                         kv_data<double>(b->slope),
                         kv_data<kv_loss>(loss),
                         b->n_pair,
                         b->n_token,
                         b->options.margin,
                         b->options.temp,
                         b->options.balance};
    loss_kernel<<<lanes, LOSS_THREADS, 0, g->stream>>>(a);
    KV_CUDA(cudaGetLastError());
    if (!e) return KV_OK;
    double *fresh = kv_data<double>(b->by_fresh), *bound = kv_data<double>(b->by_bound);
    KV_CUDA(cudaMemsetAsync(fresh, 0, tokens * sizeof(double), g->stream));
    KV_CUDA(cudaMemsetAsync(bound, 0, tokens * sizeof(double), g->stream));
    if (b->n_pair) {
        run_kernel<<<dim3((unsigned)kv_div_up(b->n_pair, THREADS), lanes), THREADS, 0, g->stream>>>(
            a.pair, a.slope, b->n_pair, b->n_token, fresh, bound);
        KV_CUDA(cudaGetLastError());
    }
    gradient_kernel<<<1024, THREADS, 0, g->stream>>>(fresh, bound, tokens, (double)b->n_lane,
                                                     kv_data<float>(e));
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}
