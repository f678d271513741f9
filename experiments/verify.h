/* Frame of `kvlab verify`: operations run their cases and report comparisons, the frame counts, judges and prints.
 *
 * Adding an operation: one function that runs all its cases, one line in the table of verify.c. A function reports numbers that
 * differ and goes on; it returns a failure only when it could not work at all. */
#ifndef KV_EXPERIMENTS_VERIFY_H
#define KV_EXPERIMENTS_VERIFY_H

#include <stdio.h>

#include "kernels/kernels.h"

typedef struct kv_verify kv_verify;

/* Every operation once with the wgmma kernels (where the GPU has them) and once with the portable ones. KV_E_MISMATCH when a
 * comparison failed, KV_E_UNAVAILABLE without a GPU. only: name of one operation, NULL for all. small: the cases of few tokens alone,
 * for compute-sanitizer. */
kv_status kv_verify_run(FILE *out, const char *only, bool small);

/* True for a case of so many tokens in a small run. */
bool kv_verify_skips(const kv_verify *v, int32_t n_token);

/* The device under test, as a table and as a handle. */
const kv_ops *kv_verify_ops(const kv_verify *v);
kv_gpu *kv_verify_gpu(const kv_verify *v);

/* A new device buffer of that many bytes, filled with x unless that is NULL. */
kv_status kv_verify_send(kv_gpu *g, const void *x, size_t bytes, kv_gpu_buffer **out);

/* Names the case that the following comparisons belong to; printed with a failure. */
void kv_verify_case(kv_verify *v, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Arrays [rows][stride], of which n in each row count. Real class: |got - want| <= absolute + relative |want|, infinities equal.
 * The largest error in units of its tolerance is kept for the table. */
typedef struct kv_verify_shape {
    int32_t rows, n;
    int64_t stride;
} kv_verify_shape;
void kv_verify_f32(kv_verify *v, const char *what, kv_verify_shape shape, const float *got,
                   const float *want, double relative, double absolute);
void kv_verify_f64(kv_verify *v, const char *what, kv_verify_shape shape, const double *got,
                   const double *want, double relative, double absolute);
/* Exact class: equal, floats in their bits. */
void kv_verify_i32(kv_verify *v, const char *what, kv_verify_shape shape, const int32_t *got,
                   const int32_t *want);
void kv_verify_bits(kv_verify *v, const char *what, kv_verify_shape shape, const float *got,
                    const float *want);
/* `cells` decisions of which `near` differ where the reference itself is undecided within tolerance, and `wrong` differ elsewhere.
 * Near ties may be at most one in a thousand over the whole operation. */
void kv_verify_decisions(kv_verify *v, const char *what, int64_t cells, int64_t near,
                         int64_t wrong);
/* The current case cannot be computed by the device. Counted, never passed. */
void kv_verify_unsupported(kv_verify *v, const char *why);

/* kv_metrics_measure on the device, from the arrays of an item with dense results and masked. */
struct kv_metrics_item;
kv_status kv_verify_measure(kv_gpu *g, const kv_run *run, const struct kv_metrics_item *item,
                            kv_layer_sums *sums);

/* Operations, each in its own file. */
kv_status kv_verify_dense(kv_verify *v);
kv_status kv_verify_masked(kv_verify *v);
kv_status kv_verify_turned(kv_verify *v);
kv_status kv_verify_attend(kv_verify *v);
kv_status kv_verify_metrics(kv_verify *v);
kv_status kv_verify_step(kv_verify *v);
kv_status kv_verify_norms(kv_verify *v);
kv_status kv_verify_cosines(kv_verify *v);
kv_status kv_verify_select(kv_verify *v);
kv_status kv_verify_replay(kv_verify *v);
kv_status kv_verify_mlp(kv_verify *v);
kv_status kv_verify_mlstm(kv_verify *v);
kv_status kv_verify_gradients(kv_verify *v);
kv_status kv_verify_boundary(kv_verify *v);
kv_status kv_verify_adamw(kv_verify *v);
kv_status kv_verify_soft_mask(kv_verify *v);
kv_status kv_verify_gates(kv_verify *v);
kv_status kv_verify_gate_offset(kv_verify *v);
kv_status kv_verify_linear(kv_verify *v);
kv_status kv_verify_forward(kv_verify *v);

#endif
