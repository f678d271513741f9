/* Part of dms.h, once for each element type: gate logits and attention under the soft mask, forward and backward. No include guard:
 * REAL and NAME(x) differ each time. */

/* One query head over its KV head, n tokens of one document or training window. */
typedef struct NAME(kv_dms_head) {
    int32_t n, dim, window;
    const REAL *q, *k, *v; /* [n] rows of dim elements, this far apart: */
    int64_t q_stride, kv_stride;
    /* logit = scale * q.k, then softcap * tanh(logit / softcap) if softcap > 0 */
    double scale, softcap;
    const REAL *log_keep; /* [n] log(1 - alpha) */
} NAME(kv_dms_head);

/* logit [n] from x [n][n_input]. *tape starts NULL and is freed with kv_net_tape_free. */
kv_status NAME(kv_dms_logits)(const kv_dms_spec *spec, const REAL *param, int32_t n, const REAL *x,
                              NAME(kv_net_tape) * *tape, REAL *logit);
/* grad [kv_dms_param] = dL/dparam for e = dL/dlogit [n], which is overwritten. */
kv_status NAME(kv_dms_logits_backward)(const kv_dms_spec *spec, const REAL *param, int32_t n,
                                       const REAL *x, NAME(kv_net_tape) * tape, REAL *e,
                                       REAL *grad);

/* Queries [first, first + rows): o [rows][dim] under the mask, dense [rows][dim] without it, and the probabilities under the mask
 * p [rows][first + rows], which the backward pass wants. scratch as large as p. */
void NAME(kv_dms_rows)(const NAME(kv_dms_head) * head, int32_t first, int32_t rows, REAL *o,
                       REAL *dense, REAL *p, REAL *scratch);
/* d_keep [n] += dL/dlog_keep for d_o [rows][dim] (maths.md 7.3). */
void NAME(kv_dms_rows_backward)(const NAME(kv_dms_head) * head, int32_t first, int32_t rows,
                                const REAL *p, const REAL *o, const REAL *d_o, REAL *scratch,
                                REAL *d_keep);
