/* Checked allocation. */
#include "reference/core/mem.h"

#include <stdint.h>
#include <string.h>

enum { ALIGNMENT = 64 };

void *kv_mem_new(size_t count, size_t size) {
    if (size != 0 && count > (SIZE_MAX - ALIGNMENT) / size) {
        KV_FAIL(KV_E_INTERNAL, "cannot allocate %zu elements of %zu bytes: the size overflows",
                count, size);
        return NULL;
    }
    size_t bytes = (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (bytes == 0) bytes = ALIGNMENT;
    void *p = aligned_alloc(ALIGNMENT, bytes);
    if (!p) {
        KV_FAIL(KV_E_INTERNAL, "out of memory: %zu bytes could not be allocated", bytes);
        return NULL;
    }
    memset(p, 0, bytes);
    return p;
}

char *kv_strdup(const char *text) {
    size_t n = strlen(text) + 1;
    char *copy = kv_mem_new(n, 1);
    if (copy) memcpy(copy, text, n);
    return copy;
}
