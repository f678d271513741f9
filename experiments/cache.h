/* Arrays kept on disk between runs, found again by a 128-bit key.
 *
 * Whoever stores makes the key from everything that the arrays depend on (data, settings, instruction set, sources), so an old file can
 * never answer for changed input. Files carry a checksum; a corrupted or foreign file is ignored and written again. A cache that
 * cannot be written is no error. It leaves 256 MiB of the disk free, for results. */
#ifndef KV_EXPERIMENTS_CACHE_H
#define KV_EXPERIMENTS_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KV_CACHED_ARRAYS = 4 };

typedef struct kv_cached { /* arrays that are stored together in one file */
    char name[64];         /* part of the file's name */
    uint64_t key[2];
    int32_t n_array;
    void **array[KV_CACHED_ARRAYS]; /* where their pointers live; a load allocates them */
    size_t bytes[KV_CACHED_ARRAYS];
} kv_cached;

/* True when all arrays were read whole and sound; else their pointers are NULL. folder NULL: false. */
bool kv_cache_load(const char *folder, const kv_cached *c);
/* Arrays of more than 1 GiB together are not kept. folder NULL: nothing happens. */
void kv_cache_store(const char *folder, const kv_cached *c);

/* Removes the files that this process has stored and returns how many they were: for when a result finds no room. */
int kv_cache_drop_fresh(void);

/* Removes the longest unused files until at most `limit` bytes remain. */
void kv_cache_trim(const char *folder, int64_t limit);

#endif
