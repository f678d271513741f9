/* The GPU: one C interface over the CUDA kernels, opaque handles, device-resident buffers. Layer 5 of the house.
 *
 * Each operation mirrors a function of reference/ (named in its comment) and is checked against it by `kvlab verify`. All work of
 * one kv_gpu runs on one stream in call order; a call returns before the work is done, kv_gpu_get and kv_gpu_sync wait for it.
 * One thread at a time per kv_gpu. Results are the same bytes on every run of one device: no floating-point atomics.
 *
 * Errors, besides those named: KV_E_UNAVAILABLE (no device, no driver, shape outside what the kernels take), KV_E_USAGE (a buffer
 * too small), KV_E_INTERNAL (out of device memory, a kernel failed). On a build without nvcc every function returns KV_E_UNAVAILABLE. */
#ifndef KV_KERNELS_H
#define KV_KERNELS_H

#include "reference/adamw.h"
#include "reference/dms.h"
#include "reference/loss_boundary.h"
#include "reference/metrics_sums.h"
#include "reference/ops.h"
#include "reference/priority.h"
#include "reference/scorer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device table: kv_ops_cpu with the operations below in place of the CPU's. One process-wide device, opened on first use,
 * serialised by a lock. KV_E_UNAVAILABLE says what is missing. */
kv_status kv_gpu_ops(const kv_ops **out);

/* Starts to open the device and the library of products, on threads of their own; kv_gpu_ops then waits for what is missing. Call
 * kv_gpu_settle before the process ends. Failures show in kv_gpu_ops. */
void kv_gpu_begin(void);
void kv_gpu_settle(void);

/* The device behind kv_gpu_ops, for callers that keep data on it; not to be closed. */
struct kv_gpu;
kv_status kv_gpu_shared(struct kv_gpu **out);

typedef struct kv_gpu kv_gpu;               /* device, stream, memory pool */
typedef struct kv_gpu_buffer kv_gpu_buffer; /* device memory */
typedef struct kv_gpu_span kv_gpu_span; /* q, k, v of one document of one layer, device format */
typedef struct kv_gpu_plan kv_gpu_plan; /* which keys each block of 64 queries visits */

typedef struct kv_gpu_info {
    char name[128];
    int32_t sm_count, cc_major, cc_minor;
    int64_t bytes_total, bytes_free;
    bool hopper; /* the wgmma path is in use; KV_GPU_PATH=portable turns it off */
} kv_gpu_info;

/* KV_GPU_GUARD=1: every buffer lies between poisoned borders that kv_gpu_free checks, and is filled with NaN when new. */
kv_status kv_gpu_open(kv_gpu **out);
void kv_gpu_close(kv_gpu *g); /* NULL is legal */
void kv_gpu_describe(kv_gpu *g, kv_gpu_info *out);
/* Chooses between wgmma and mma.sync kernels from here on; KV_E_UNAVAILABLE where the device has no wgmma. */
kv_status kv_gpu_use_hopper(kv_gpu *g, bool hopper);
/* The closed loop shares each set of decisions among n blocks (1..8) from here on where the device has clusters, one otherwise; 0: as
 * many as it expects to be fastest. For verification: short documents would never take several. */
void kv_gpu_use_loop_blocks(kv_gpu *g, int32_t n);
kv_status kv_gpu_sync(kv_gpu *g);

kv_status kv_gpu_new(kv_gpu *g, size_t bytes, kv_gpu_buffer **out);
/* KV_E_MISMATCH when a guarded border was overwritten. NULL is legal. */
kv_status kv_gpu_free(kv_gpu_buffer *b);
size_t kv_gpu_bytes(const kv_gpu_buffer *b);
kv_status kv_gpu_put(kv_gpu_buffer *b, const void *host, size_t bytes);
kv_status kv_gpu_get(const kv_gpu_buffer *b, void *host, size_t bytes);

/* Device clock: tick i (0..15) is stamped in stream order; ms between two ticks. */
kv_status kv_gpu_tick(kv_gpu *g, int i);
kv_status kv_gpu_ms(kv_gpu *g, int from, int to, float *ms);

/* Ceilings of this card at this moment, medians: device-to-device copy of `bytes`, bytes read plus written, TB/s; cuBLAS bf16
 * product of random n x n matrices with fp32 accumulation, TFLOP/s (KV_E_UNAVAILABLE without libcublas). */
kv_status kv_gpu_copy_ceiling(kv_gpu *g, size_t bytes, double *tb_per_s);
kv_status kv_gpu_matmul_ceiling(kv_gpu *g, int32_t n, double *tflop_per_s);

/* Uploads a span. q, k, v become half or bfloat16 where every value is exactly representable, so that products are exact and only
 * the fp32 accumulation rounds; otherwise they stay fp32 and the operations use split tf32 (error about that of fp32). head_dim up
 * to 128, padded with zeros to 64 or 128; larger: KV_E_UNAVAILABLE. softcap and any scale are accepted. want_v false: v is left
 * out. */
kv_status kv_gpu_span_upload(kv_gpu *g, const kv_span *span, bool want_v, kv_gpu_span **out);
/* The same from fp32 arrays on the device, q [n_q_head][n_token][head_dim], k, v [n_kv_head][n_token][head_dim]; of `span` only
 * shapes, scale and softcap are read. */
kv_status kv_gpu_span_adopt(kv_gpu *g, const kv_span *span, const kv_gpu_buffer *q,
                            const kv_gpu_buffer *k, const kv_gpu_buffer *v, kv_gpu_span **out);
/* k, v as they were uploaded, fp32 [n_kv_head][n_token][head_dim], in new buffers. */
kv_status kv_gpu_span_floats(const kv_gpu_span *s, kv_gpu_buffer **k, kv_gpu_buffer **v);
/* Normal random q (deviation 1), k, v of the given shape and type (KV_F16, KV_BF16, KV_F32), for benchmarks. head_dim 64 or 128. */
kv_status kv_gpu_span_random(kv_gpu *g, int32_t n_q_head, int32_t n_kv_head, int32_t n_token,
                             int32_t head_dim, kv_dtype type, uint64_t seed, kv_gpu_span **out);
void kv_gpu_span_free(kv_gpu_span *s); /* NULL is legal */
kv_dtype kv_gpu_span_type(const kv_gpu_span *s);
/* head_dim as uploaded; NULL: not wanted. */
void kv_gpu_span_shape(const kv_gpu_span *s, int32_t *n_q_head, int32_t *n_token,
                       int32_t *head_dim);

/* Rows of the dense sweep (kv_dense_compute): lse [n_q_head][n_token] fp32, natural. With long_mass, top_p (fp32) and top_t (int32,
 * same shape; all three or none) the events of E(u) = {sinks <= t <= u - window}. Tokens are dense in device arrays: no stride. */
kv_status kv_gpu_lse(const kv_gpu_span *s, int32_t sinks, int32_t window, kv_gpu_buffer *lse,
                     kv_gpu_buffer *long_mass, kv_gpu_buffer *top_p, kv_gpu_buffer *top_t);

/* Column sums of the dense sweep: column [n_q_head][n_token] double, sum over u >= t + window of exp(power (l - lse_u)) or, for
 * power INFINITY, the maximum. lse [n_q_head][n_token] is the normaliser; sparse: it may lie below the row's maximum, so
 * probabilities may exceed 1 (maths.md 2.4). */
kv_status kv_gpu_column(const kv_gpu_span *s, int32_t window, double power,
                        const kv_gpu_buffer *lse, bool sparse, kv_gpu_buffer *column);

/* kv_target_mass + kv_target_log of a column: r [n_kv_head][n_token] fp32 = log(eps + m), m the maximum or mean over the group of
 * column / max(1, n_token - t - window) (no division when `maximum`). */
kv_status kv_gpu_target(const kv_gpu_span *s, int32_t window, bool maximum, bool mean, double eps,
                        const kv_gpu_buffer *column, kv_gpu_buffer *r);

/* Key lists of evict_at [n_kv_head][n_token] int32 for kv_gpu_attend. */
kv_status kv_gpu_plan_new(kv_gpu *g, int32_t n_kv_head, int32_t n_token, int32_t sinks,
                          int32_t window, const kv_gpu_buffer *evict_at, kv_gpu_plan **out);
/* Rebuilds the lists of a plan for another evict_at of the same shape. */
kv_status kv_gpu_plan_fill(kv_gpu_plan *p, const kv_gpu_buffer *evict_at);
void kv_gpu_plan_free(kv_gpu_plan *p); /* NULL is legal */
/* (64-query block, key) visits of a plan times 64 times the group, that is the query-key pairs that kv_gpu_attend works on. */
kv_status kv_gpu_plan_pairs(kv_gpu_plan *p, int32_t n_q_head, double *pairs);

/* Attention forward (kv_masked_compute; plan NULL: dense causal, kv_attend). o [n_q_head][n_token][head_dim as uploaded or
 * generated] fp32, lse and lse_long [n_q_head][n_token] fp32; each may be NULL, lse_long needs a plan. A row without keys has o 0
 * and lse -inf. exact: probabilities enter the second product as high and low halves (error 2^-21 instead of 2^-11 or 2^-8). */
kv_status kv_gpu_attend(const kv_gpu_span *s, const kv_gpu_plan *plan, bool exact, kv_gpu_buffer *o,
                        kv_gpu_buffer *lse, kv_gpu_buffer *lse_long);

/* Attention under evict_at [n_kv_head][n_token] int32 (on the device) with every key turned to its place in the cache
 * (kv_masked_request.rerotate): o, lse as above, with exact probabilities. position [n_token] (NULL: 0..n_token-1) and
 * inv_freq [head_dim/2] on the host. KV_E_DATA without frequencies; KV_E_UNAVAILABLE when positions lie so far apart that the table
 * of angles would take more than a gigabyte. */
kv_status kv_gpu_attend_turned(const kv_gpu_span *s, const kv_gpu_buffer *evict_at,
                               const int32_t *position, const double *inv_freq, kv_gpu_buffer *o,
                               kv_gpu_buffer *lse);

/* Sums behind the metrics of one document (kv_metrics_measure), added to `sums`. Arrays [n_q_head][n_token] (o with [head_dim]) or
 * [n_kv_head][n_token]; mass double, kind uint8 [n_token]; evict_own and kind may be NULL. Integer sums equal the CPU's, sums of
 * doubles have another order. Waits for the result. */
typedef struct kv_gpu_measure_input {
    int32_t n_q_head, n_kv_head, n_token, head_dim;
    const kv_gpu_buffer *dense_lse, *long_mass, *top_p, *top_t, *dense_o, *lse, *lse_long, *o;
    const kv_gpu_buffer *evict_at, *evict_oracle, *evict_own, *mass, *kind;
} kv_gpu_measure_input;
kv_status kv_gpu_measure(kv_gpu *g, const kv_run *run, const kv_gpu_measure_input *in,
                         kv_layer_sums *sums);

/* kv_oracle_step_mass: mass [n_kv_head][n_token] double, from the dense lse [n_q_head][n_token] fp32. */
kv_status kv_gpu_step_mass(const kv_gpu_span *s, const kv_run *run, const kv_gpu_buffer *lse,
                           kv_gpu_buffer *mass);

/* Priorities from the keys alone, the CPU's bytes: priority [n_kv_head][n_token] fp32 (kv_norm_priorities; kv_cosine_priorities, where
 * token t is compared with the mean direction of the keys 0 to min(t + lead, n_token - 1)). */
kv_status kv_gpu_norm_priorities(const kv_gpu_span *s, kv_gpu_buffer *priority);
kv_status kv_gpu_cosine_priorities(const kv_gpu_span *s, int32_t lead, kv_gpu_buffer *priority);

/* Ranks and running cutoffs of n_head heads (kv_select): priority [n_head][n_token] fp32 without NaN -> evict_at [n_head][n_token]
 * int32. Heads of several layers may lie one after another. */
kv_status kv_gpu_select(kv_gpu *g, int32_t n_head, int32_t n_token, const kv_run *run,
                        const kv_gpu_buffer *priority, kv_gpu_buffer *evict_at);

/* Scores of every token (kv_mlp_scores, kv_mlstm_scores): k, v [n_kv_head][n_token][head_dim] fp32, hidden [n_token][n_hidden] fp32
 * or NULL when the network does not read it -> rhat [n_kv_head][n_token] fp32. */
kv_status kv_gpu_scores(kv_gpu *g, const kv_scorer *s, int32_t n_token, const kv_gpu_buffer *k,
                        const kv_gpu_buffer *v, const kv_gpu_buffer *hidden, kv_gpu_buffer *rhat);

/* Scorer networks of n_lane KV heads in training (kv_net_forward_f32, kv_net_backward_f32; parameters laid out as there). Neighbouring
 * `group` lanes share a hidden state (the heads of a layer). exact: fp32 throughout; otherwise the operands of matrix products are
 * bfloat16, sums, levels, memory and gradients stay fp32 or wider. KV_E_UNAVAILABLE without libcublas. */
typedef struct kv_gpu_net kv_gpu_net;
kv_status kv_gpu_net_new(kv_gpu *g, const kv_net_spec *spec, int32_t n_lane, int32_t group,
                         bool exact, kv_gpu_net **out);
void kv_gpu_net_free(kv_gpu_net *net); /* NULL is legal */
/* Tokens of the passes to come; doc_first [n_doc + 1]. k, v [n_lane][n_token][n_input/2], or v NULL and k = x
 * [n_lane][n_token][n_input] (both ignored with hidden input); hidden [n_lane/group][n_token][n_hidden] or NULL. All fp32. */
kv_status kv_gpu_net_input(kv_gpu_net *net, int32_t n_token, int32_t n_doc,
                           const int64_t *doc_first, const kv_gpu_buffer *k, const kv_gpu_buffer *v,
                           const kv_gpu_buffer *hidden);
/* rhat [n_lane][n_token]; then for e = dL/drhat: grad [n_lane][n_param] is set to dL/dparam. One backward per forward pass. */
kv_status kv_gpu_net_forward(kv_gpu_net *net, const kv_gpu_buffer *param, kv_gpu_buffer *rhat);
kv_status kv_gpu_net_backward(kv_gpu_net *net, const kv_gpu_buffer *param, const kv_gpu_buffer *e,
                              kv_gpu_buffer *grad);

/* Boundary loss of a trace on many KV heads ("lanes") in training (kv_boundary_queries, kv_boundary_pairs, kv_boundary_loss).
 * doc_first [n_doc + 1]; target [n_lane][n_token] on the host, copied. KV_E_DATA on a NaN target. */
typedef struct kv_gpu_boundary kv_gpu_boundary;
kv_status kv_gpu_boundary_new(kv_gpu *g, const kv_run *run, const kv_loss_options *o,
                              int32_t n_lane, int32_t n_token, int32_t n_doc,
                              const int64_t *doc_first, const float *target, kv_gpu_boundary **out);
void kv_gpu_boundary_free(kv_gpu_boundary *b); /* NULL is legal */
/* Pairs of every lane at a step, which addresses the random draws, under the decays log_gamma [n_lane] on the host. */
kv_status kv_gpu_boundary_pairs(kv_gpu_boundary *b, int32_t step, const double *log_gamma);
/* Copies the pairs: pair [n_lane][*n_pair] on the host, NULL: tells only how many a lane has. */
kv_status kv_gpu_boundary_get(const kv_gpu_boundary *b, int32_t *n_pair, kv_pair *pair);
/* Losses of the scores rhat [n_lane][n_token] fp32 on the last pairs and decays: loss kv_loss [n_lane]; e [n_lane][n_token] fp32, NULL:
 * not wanted, is set to the gradient of the lanes' mean loss. */
kv_status kv_gpu_boundary_loss(kv_gpu_boundary *b, const kv_gpu_buffer *rhat, kv_gpu_buffer *e,
                               kv_gpu_buffer *loss);

/* A step of AdamW on a group of n parameters (kv_clip_factor, kv_adamw_step; step from 1): param, moment1, moment2 are updated from
 * grad, scaled down to the norm `clip` (0: never). sum: one double, the sum of the squares of grad; unless it is finite, nothing
 * changes. */
kv_status kv_gpu_adamw(kv_gpu *g, const kv_adamw *o, int64_t step, double clip, int64_t n,
                       const kv_gpu_buffer *grad, kv_gpu_buffer *param, kv_gpu_buffer *moment1,
                       kv_gpu_buffer *moment2, kv_gpu_buffer *sum);

/* Training of dms (reference/dms.h). A training window: tokens [first, first + n) of every head of a span that may hold the heads of
 * several layers; of its blocks of 64 queries those numbered from, from + every, … count. Rows of other queries are neither read
 * nor written. */
typedef struct kv_gpu_window {
    int32_t first, n, window, from, every; /* window: as in kv_dms_head */
} kv_gpu_window;
/* Attention of the window under the soft mask and without it (kv_dms_rows): log_keep [n_kv_head][n] -> o, dense [n_q_head][n][head_dim],
 * lse [n_q_head][n] under the mask. All fp32. */
kv_status kv_gpu_soft_attend(const kv_gpu_span *s, const kv_gpu_window *w,
                             const kv_gpu_buffer *log_keep, kv_gpu_buffer *o, kv_gpu_buffer *dense,
                             kv_gpu_buffer *lse);
/* d_keep [n_q_head][n] is set to dL/dlog_keep by way of each query head, for d_o [n_q_head][n][head_dim] (kv_dms_rows_backward). */
kv_status kv_gpu_soft_backward(const kv_gpu_span *s, const kv_gpu_window *w,
                               const kv_gpu_buffer *log_keep, const kv_gpu_buffer *o,
                               const kv_gpu_buffer *lse, const kv_gpu_buffer *d_o,
                               kv_gpu_buffer *d_keep);
/* Squared error of every query head: off double [n_q_head][2] gets |o - dense|^2 and |dense|^2; dense becomes 2 (o - dense). */
kv_status kv_gpu_soft_match(const kv_gpu_span *s, const kv_gpu_window *w, const kv_gpu_buffer *o,
                            kv_gpu_buffer *dense, kv_gpu_buffer *off);

/* Gates of many KV heads ("lanes"), parameters [n_lane][kv_dms_param]; neighbouring `group` lanes share hidden states. fp32.
 * KV_E_UNAVAILABLE without libcublas. */
typedef struct kv_gpu_gates kv_gpu_gates;
kv_status kv_gpu_gates_new(kv_gpu *g, const kv_dms_spec *spec, int32_t n_lane, int32_t group,
                           kv_gpu_gates **out);
void kv_gpu_gates_free(kv_gpu_gates *gates); /* NULL is legal */
/* The n tokens from `first` on of x (kv_dms_input) [n_lane][n_token][n_input], of hidden states [n_lane/group][n_token][n_input]. */
kv_status kv_gpu_gates_input(kv_gpu_gates *gates, const kv_gpu_buffer *x, int32_t n_token,
                             int32_t first, int32_t n);
/* logit [n_lane][n] (kv_dms_logits). */
kv_status kv_gpu_gates_logits(kv_gpu_gates *gates, const kv_gpu_buffer *param,
                              kv_gpu_buffer *logit);
/* Relaxed decisions (kv_dms_noise, kv_dms_alpha): log_keep [n_lane][n]; marked int32 [n_lane], tokens with alpha above 1/2. */
typedef struct kv_gpu_draw {
    uint64_t seed;
    uint32_t step;
    int32_t shift; /* the gate of token t + shift decides about token t; those without one stay */
    double temp;
} kv_gpu_draw;
kv_status kv_gpu_gates_decide(kv_gpu_gates *gates, const kv_gpu_draw *draw,
                              const kv_gpu_buffer *logit, kv_gpu_buffer *log_keep,
                              kv_gpu_buffer *marked);
/* grad [n_lane][kv_dms_param] of the lanes' mean loss for the last logits and decisions: d_keep and off of kv_gpu_soft_backward and _match with
 * `queries` query heads a lane, each counting by its error relative to |dense|^2; push: minus dL/dalpha of every
 * token by the ratio loss (maths.md 7.5). */
kv_status kv_gpu_gates_backward(kv_gpu_gates *gates, int32_t queries, const kv_gpu_buffer *d_keep,
                                const kv_gpu_buffer *off, double push, kv_gpu_buffer *grad);

/* Inputs of a whole document from its keys and values, fp32 [n_lane][n_token][head_dim] (gates that read hidden states: not these). */
kv_status kv_gpu_gates_input_keys(kv_gpu_gates *gates, const kv_gpu_buffer *k,
                                  const kv_gpu_buffer *v, int32_t n_token, int32_t head_dim);
/* What an offset of all logits [n_lane][n_token] does to the cache (kv_dms_kept, kv_dms_gap); cache and its doc_first are on the
 * host. Waits for the result. */
kv_status kv_gpu_gate_kept(kv_gpu *g, const kv_dms_cache *cache, int64_t n_lane,
                           const kv_gpu_buffer *logit, double offset, int64_t *kept);
kv_status kv_gpu_gate_gap(kv_gpu *g, int64_t n, const kv_gpu_buffer *logit, double offset,
                          float *below, float *above);

/* C[m][n] = A[m][k] W[n][k]^T in fp32 (kv_linear). W is a host array in its stored format; its fp32 copy stays on the device and is
 * known again by address, size and content. KV_E_UNAVAILABLE without libcublas. */
kv_status kv_gpu_linear(kv_gpu *g, int32_t m, int32_t n, int32_t k, const kv_gpu_buffer *a,
                        kv_dtype w_type, const void *w, kv_gpu_buffer *c);

/* Closed loop over slots (kv_replay_attention): evict_at [n_kv_head][n_token] int32. The span may hold the heads of several layers,
 * `layer_heads` KV heads each; a per-layer rule decides for each of them. Lockstep: the victims come from forced [set][n_token]
 * int32 (position that leaves after query u, read for budget <= u < n_token - 1; a set is a KV head or a layer), and
 * gap [set][n_token] fp32 tells by which share the victim's statistic lay above the least one. Both NULL: decides itself. Waits for
 * the result; KV_E_DATA when attention is not a number. */
kv_status kv_gpu_replay_attention(const kv_gpu_span *s, const kv_attention_rule *rule,
                                  int32_t layer_heads, int32_t budget, const kv_gpu_buffer *forced,
                                  kv_gpu_buffer *gap, kv_gpu_buffer *evict_at);

#ifdef __cplusplus
}
#endif

#endif
