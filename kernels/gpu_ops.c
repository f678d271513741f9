/* The device table over host arrays: one device, one lock, opened early on threads of their own when asked. */
#include "kernels/gpu_ops.h"

#include <pthread.h>
#include <string.h>

#include "reference/core/mem.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static kv_gpu *device;

kv_gpu *kv_gpu_ops_enter(void) {
    pthread_mutex_lock(&lock);
    return device;
}

void kv_gpu_ops_leave(void) { pthread_mutex_unlock(&lock); }

kv_status kv_gpu_ops_fetch(const kv_gpu_buffer *from, size_t rows, size_t n, size_t stride,
                           size_t size, void *to) {
    kv_status st = KV_OK;
    char *packed = NULL;
    if (stride == n) return kv_gpu_get(from, to, rows * n * size);
    KV_NEW(packed, rows * n * size);
    KV_TRY(kv_gpu_get(from, packed, rows * n * size));
    for (size_t i = 0; i < rows; i++)
        memcpy((char *)to + i * stride * size, packed + i * n * size, n * size);
out:
    free(packed);
    return st;
}

kv_status kv_gpu_ops_send(kv_gpu *g, const void *from, size_t rows, size_t n, size_t stride,
                          kv_gpu_buffer **to) {
    kv_status st = KV_OK;
    char *packed = NULL;
    KV_TRY(kv_gpu_new(g, rows * n * 4, to));
    if (stride == n) return kv_gpu_put(*to, from, rows * n * 4);
    KV_NEW(packed, rows * n * 4);
    for (size_t i = 0; i < rows; i++)
        memcpy(packed + i * n * 4, (const char *)from + i * stride * 4, n * 4);
    KV_TRY(kv_gpu_put(*to, packed, rows * n * 4));
out:
    free(packed);
    return st;
}

kv_status kv_gpu_ops_free(kv_status st, kv_gpu_buffer *const *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const kv_status freed = kv_gpu_free(b[i]);
        if (st == KV_OK) st = freed;
    }
    return st;
}

kv_status kv_gpu_ops(const kv_ops **out) {
    static kv_ops table;
    kv_status st = KV_OK;
    *out = &kv_ops_cpu;
    pthread_mutex_lock(&lock);
    if (!device) st = kv_gpu_open(&device);
    if (st == KV_OK) {
        table = kv_ops_cpu;
        table.name = "gpu";
        table.resident = true;
        table.hold = kv_gpu_ops_hold;
        table.release = kv_gpu_ops_release;
        table.dense = kv_gpu_ops_dense;
        table.masked = kv_gpu_ops_masked;
        table.attend = kv_gpu_ops_attend;
        table.measure = kv_gpu_ops_measure;
        table.step_mass = kv_gpu_ops_step_mass;
        table.select = kv_gpu_ops_select;
        table.replay_attention = kv_gpu_ops_replay_attention;
        table.norm_priorities = kv_gpu_ops_norm_priorities;
        table.cosine_priorities = kv_gpu_ops_cosine_priorities;
        table.gate_logits = kv_gpu_ops_gate_logits;
        table.mlp_scores = kv_gpu_ops_mlp_scores;
        table.mlstm_scores = kv_gpu_ops_mlstm_scores;
        table.linear = kv_gpu_ops_linear;
        table.forward = kv_gpu_ops_forward;
        *out = &table;
    } else {
        kv_gpu_close(device);
        device = NULL;
    }
    pthread_mutex_unlock(&lock);
    return st == KV_OK ? st : kv_error_context(st, "--device gpu");
}

kv_status kv_gpu_shared(kv_gpu **out) {
    const kv_ops *table;
    const kv_status st = kv_gpu_ops(&table);
    *out = device;
    return st;
}

static struct {
    pthread_t thread;
    bool running;
} early[2];

static void *map_products(void *unused) {
    kv_gpu_blas_map();
    return unused;
}

/* The handle of cuBLAS is made outside the lock: the device can work meanwhile. */
static void *open_device(void *unused) {
    const kv_ops *table;
    if (kv_gpu_ops(&table) == KV_OK) kv_gpu_blas_warm(device);
    return unused;
}

void kv_gpu_begin(void) {
    static void *(*const work[])(void *) = {map_products, open_device};
    for (size_t i = 0; i < sizeof early / sizeof *early; i++)
        if (!early[i].running)
            early[i].running = pthread_create(&early[i].thread, NULL, work[i], NULL) == 0;
}

void kv_gpu_settle(void) {
    for (size_t i = 0; i < sizeof early / sizeof *early; i++) {
        if (early[i].running) pthread_join(early[i].thread, NULL);
        early[i].running = false;
    }
}
