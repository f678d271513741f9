/* Any bytes as a token file (text or .npy; HDF5 is fuzz_trace's business). */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "experiments/token_file.h"
#include "tests/fuzz/bytes.h"

static char path[64];
static void remove_file(void) { unlink(path); }

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int32_t *token, n;
    if (size >= 4 && memcmp(data, "\x89HDF", 4) == 0) return 0;
    if (!path[0]) {
        snprintf(path, sizeof path, "%s/kvfuzz%ld.tokens",
                 access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm", (long)getpid());
        atexit(remove_file);
    }
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f)) abort();
    kv_status st = kv_token_file_read(path, &token, &n);
    if (st != KV_OK && st != KV_E_DATA) abort();
    for (int32_t i = 0; st == KV_OK && i < n; i++)
        if (token[i] < 0) abort();
    free(token);
    return 0;
}
