/* Checked allocation: overflow-safe, 64-byte aligned, zero-filled; release with free(). */
#ifndef KV_CORE_MEM_H
#define KV_CORE_MEM_H

#include <stddef.h>
#include <stdlib.h>

#include "reference/core/status.h"

void *
kv_mem_new(size_t count,
           size_t size); /* NULL and an error record when memory is short; never NULL for count 0 */

/* p = zeroed array of n elements of *p, or `st = KV_E_INTERNAL; goto out`. */
#define KV_NEW(p, n) \
    do { \
        (p) = kv_mem_new((size_t)(n), sizeof *(p)); \
        if (!(p)) { \
            st = KV_E_INTERNAL; \
            goto out; \
        } \
    } while (0)

char *kv_strdup(const char *text); /* NULL and an error record when memory is short */

#endif
