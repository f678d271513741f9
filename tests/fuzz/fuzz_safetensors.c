/* Any bytes as a safetensors file: refused or readable to the last element. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/fuzz/bytes.h"
#include "traces/safetensors.h"

static char path[64];
static void remove_file(void) { unlink(path); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    kv_tensors set = {0};
    if (!path[0]) {
        snprintf(path, sizeof path, "%s/kvfuzz%ld.safetensors",
                 access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm", (long)getpid());
        atexit(remove_file);
    }
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f)) abort();
    kv_status st = kv_safetensors_open(path, &set);
    if (st != KV_OK && st != KV_E_DATA) abort();
    for (int32_t i = 0; st == KV_OK && i < set.n_tensor; i++) {
        const kv_tensor *t = &set.tensor[i];
        float *x = malloc((size_t)t->n_element * sizeof *x + 1);
        if (x && t->n_element) kv_tensor_read(&set, t, x);
        free(x);
        if (kv_tensors_find(&set, t->name) != t) abort();
    }
    if (st == KV_OK) kv_tensors_free(&set);
    return 0;
}
