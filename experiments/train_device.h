/* What a training keeps on the GPU whatever its objective: parameters, their gradient and moments, the optimiser's step. */
#ifndef KV_EXPERIMENTS_TRAIN_DEVICE_H
#define KV_EXPERIMENTS_TRAIN_DEVICE_H

#include "experiments/train_loop.h"
#include "kernels/kernels.h"

typedef struct kv_train_device {
    kv_gpu *gpu;
    int64_t n;                             /* parameters of all lanes */
    kv_gpu_buffer *param, *grad, *m1, *m2; /* float [n_lane][n_param] */
    kv_gpu_buffer *sum;                    /* one double */
} kv_train_device;

/* *d zeroed. KV_E_UNAVAILABLE without a GPU. */
kv_status kv_train_device_open(kv_train_device *d, int64_t n);
void kv_train_device_close(kv_train_device *d);

/* As load, fetch and update of kv_train_objective. */
kv_status kv_train_device_load(kv_train_device *d, const kv_train_state *state);
kv_status kv_train_device_fetch(const kv_train_device *d, kv_train_state *state);
kv_status kv_train_device_update(kv_train_device *d, const kv_adamw *group, int64_t step,
                                 double clip, double *sum);

/* Traces on the device: they stay as long as half of the memory that was free at first has room for them, then the one that was
 * used longest ago leaves. */
typedef struct kv_train_shelf {
    int32_t n_trace, newest; /* newest: the one in use, -1: none */
    int64_t room, held, now;
    int64_t *bytes, *used; /* [n_trace]; bytes 0: not on the device */
    void *context;
    void (*drop)(void *context, int32_t trace);
} kv_train_shelf;

kv_status kv_train_shelf_open(kv_train_shelf *s, kv_gpu *g, int32_t n_trace, void *context,
                              void (*drop)(void *context, int32_t trace));
void kv_train_shelf_close(kv_train_shelf *s);
/* Marks a trace as in use. True: it is there. False: others have left, and the caller brings it, `bytes` large. */
bool kv_train_shelf_take(kv_train_shelf *s, int32_t trace, int64_t bytes);

#endif
