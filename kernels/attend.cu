// Attention forward: dense causal (kv_attend) or under evict_at by gathered key lists (kv_masked_compute), with output and
// log-sum-exps over all visible keys and over those of the long range.
//
// Work follows the lists of kept.cu, not the triangle: blocks of 64 queries share one list, keys that all of them see need no mask.
// Probabilities carry a common factor 2^7..2^15, so that half precision loses nothing to its subnormals; the factor leaves with
// the division by the sum. A row's shift moves only when its maximum has grown by 2^8.
#include "kernels/attend_hopper.cuh"
#include "kernels/attend_portable.cuh"

using namespace attend;

namespace {

template <class T, int D, bool EXACT>
kv_status launch_hopper(const kv_gpu_span *s, attend_args a) {
    kv_gpu *g = s->gpu;
    CUtensorMap q_map;
    kv_scratch next;
    const size_t bytes = sizeof(attend_shared<D>);
    const int items = a.n_kv_head * a.n_block * parts_of(a);
    KV_RETURN(kv_tile_map(s, s->q, s->n_q_head, 64, &q_map));
    KV_RETURN(next.reserve_zeros(g, sizeof(int)));
    a.next = next.as<int>();
    KV_RETURN(kv_allow_shared(g, attend_hopper<T, D, EXACT>, bytes));
    attend_hopper<T, D, EXACT><<<min(g->sm_count, items), 384, bytes, g->stream>>>(
        q_map, kv_data<T>(s->k), kv_data<T>(s->v), a);
    KV_CUDA(cudaGetLastError());
    return KV_OK;
}

template <class T, int D>
kv_status launch(const kv_gpu_span *s, bool exact, const attend_args &a) {
    if constexpr (sizeof(T) == 2) {
        if (s->gpu->hopper && s->softcap == 0 && s->scale > 0)
            return exact ? launch_hopper<T, D, true>(s, a) : launch_hopper<T, D, false>(s, a);
    }
    return portable::launch_rows<T, D>(s, 2, attend_portable<T, D>, kv_data<T>(s->q),
                                       kv_data<T>(s->k), kv_data<T>(s->v), exact, a);
}

template <class T> kv_status launch_size(const kv_gpu_span *s, bool exact, const attend_args &a) {
    return s->head_dim == 64 ? launch<T, 64>(s, exact, a) : launch<T, 128>(s, exact, a);
}

} // namespace

kv_status kv_gpu_attend(const kv_gpu_span *s, const kv_gpu_plan *plan, bool exact,
                        kv_gpu_buffer *o, kv_gpu_buffer *lse, kv_gpu_buffer *lse_long) {
    const size_t cells = (size_t)s->n_q_head * (size_t)s->n_token;
    KV_RETURN(kv_buffer_check(o, "o", cells * (size_t)s->head_dim_in, sizeof(float)));
    KV_RETURN(kv_buffer_check(lse, "lse", cells, sizeof(float)));
    KV_RETURN(kv_buffer_check(lse_long, "lse_long", cells, sizeof(float)));
    if (!s->v) return KV_FAIL(KV_E_USAGE, "kv_gpu_attend: the span was uploaded without v");
    if (plan && (plan->n_kv_head != s->n_kv_head || plan->n_token != s->n_token))
        return KV_FAIL(KV_E_USAGE, "kv_gpu_attend: plan of %d heads, %d tokens; span of %d, %d",
                       plan->n_kv_head, plan->n_token, s->n_kv_head, s->n_token);
    if (lse_long && !plan)
        return KV_FAIL(KV_E_USAGE, "kv_gpu_attend: lse_long needs a plan");
    attend_args a = {};
    a.n_token = s->n_token;
    a.n_q_head = s->n_q_head;
    a.n_kv_head = s->n_kv_head;
    a.n_block = kv_div_up(s->n_token, KV_BLOCK);
    a.head_dim_out = s->head_dim_in;
    a.unit = s->scale * KV_LOG2E;
    a.scale = s->scale;
    a.softcap = s->softcap;
    if (plan) {
        a.block = kv_data<kept_block>(plan->block);
        a.list = kv_data<int>(plan->list);
        a.evict_at = kv_data<int>(plan->evict_at);
        a.sinks = plan->sinks;
        a.window = plan->window;
    }
    a.o = kv_data<float>(o);
    a.lse = kv_data<float>(lse);
    a.lse_long = kv_data<float>(lse_long);
    if (s->type == KV_F16) return launch_size<__half>(s, exact, a);
    if (s->type == KV_BF16) return launch_size<__nv_bfloat16>(s, exact, a);
    return launch_size<float>(s, exact, a);
}
