/* Content-addressed cache of arrays: one file each, by rename. */
#include "experiments/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include "experiments/files.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"

enum { FORMAT = 1 };
static const char magic[8] = "KVCACHE";
static const int64_t largest_file = (int64_t)1
                                    << 30; /* bytes; larger results are computed each time */

static const uint64_t reserve = (uint64_t)256 << 20; /* bytes that stay free on the disk */

/* Files of this process, newest first. */
typedef struct fresh {
    struct fresh *next;
    char path[];
} fresh;
static fresh *fresh_files;

typedef struct header {
    char magic[8];
    uint32_t format, n_array;
    uint64_t key[2], checksum[2], bytes; /* checksum and bytes of the payload */
} header;

static void file_name(const char *folder, const kv_cached *p, char *path, size_t size) {
    snprintf(path, size, "%s/%016llx%016llx-%s", folder, (unsigned long long)p->key[0],
             (unsigned long long)p->key[1], p->name);
}

static size_t total_bytes(const kv_cached *p) {
    size_t n = 0;
    for (int32_t i = 0; i < p->n_array; i++) n += p->bytes[i];
    return n;
}

static void checksum_of(const kv_cached *p, uint64_t out[2]) {
    uint64_t sums[KV_CACHED_ARRAYS][2];
    for (int32_t i = 0; i < p->n_array; i++) {
        XXH128_hash_t d = XXH3_128bits(*p->array[i], p->bytes[i]);
        sums[i][0] = d.high64;
        sums[i][1] = d.low64;
    }
    XXH128_hash_t d = XXH3_128bits(sums, (size_t)p->n_array * sizeof *sums);
    out[0] = d.high64;
    out[1] = d.low64;
}

static void drop(const kv_cached *p) {
    for (int32_t i = 0; i < p->n_array; i++) {
        free(*p->array[i]);
        *p->array[i] = NULL;
    }
}

bool kv_cache_load(const char *folder, const kv_cached *p) {
    char path[PATH_MAX];
    header h;
    uint64_t sum[2];
    if (!folder) return false;
    file_name(folder, p, path, sizeof path);
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    bool good = fread(&h, sizeof h, 1, f) == 1 && memcmp(h.magic, magic, sizeof magic) == 0 &&
                h.format == FORMAT && h.n_array == (uint32_t)p->n_array && h.key[0] == p->key[0] &&
                h.key[1] == p->key[1] && h.bytes == total_bytes(p);
    for (int32_t i = 0; good && i < p->n_array; i++) {
        *p->array[i] = kv_mem_new(p->bytes[i], 1);
        good = *p->array[i] && fread(*p->array[i], 1, p->bytes[i], f) == p->bytes[i];
    }
    good = good && fgetc(f) == EOF;
    fclose(f);
    if (good) {
        checksum_of(p, sum);
        good = sum[0] == h.checksum[0] && sum[1] == h.checksum[1];
    }
    if (!good) {
        kv_log(KV_LOG_INFO, "cache", "%s is damaged or foreign and is made again", path);
        drop(p);
        return false;
    }
    utimensat(AT_FDCWD, path, NULL, 0); /* age decides which file goes first when space is short */
    return true;
}

static void remember(const char *path) {
    const size_t n = strlen(path) + 1;
    fresh *f = malloc(sizeof *f + n);
    if (!f) return;
    memcpy(f->path, path, n);
    f->next = fresh_files;
    fresh_files = f;
}

int kv_cache_drop_fresh(void) {
    int n = 0;
    while (fresh_files) {
        fresh *f = fresh_files;
        n += unlink(f->path) == 0;
        fresh_files = f->next;
        free(f);
    }
    return n;
}

static bool has_room(const char *folder, uint64_t bytes) {
    struct statvfs disk;
    return statvfs(folder, &disk) != 0 ||
           (uint64_t)disk.f_bavail * disk.f_frsize >= bytes + reserve;
}

void kv_cache_store(const char *folder, const kv_cached *p) {
    char path[PATH_MAX], temporary[PATH_MAX + 32];
    header h = {.format = FORMAT, .n_array = (uint32_t)p->n_array, .bytes = total_bytes(p)};
    if (!folder) return;
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.key, p->key, sizeof h.key);
    if ((int64_t)h.bytes > largest_file || kv_make_folders(folder) != KV_OK) return;
    if (!has_room(folder, h.bytes)) {
        kv_log(KV_LOG_INFO, "cache", "%s is nearly full: %s is not kept", folder, p->name);
        return;
    }
    checksum_of(p, h.checksum);
    file_name(folder, p, path, sizeof path);
    snprintf(temporary, sizeof temporary, "%s.%d.tmp", path, (int)getpid());
    FILE *f = fopen(temporary, "wb");
    bool good = f && fwrite(&h, sizeof h, 1, f) == 1;
    for (int32_t i = 0; good && i < p->n_array; i++)
        good = fwrite(*p->array[i], 1, p->bytes[i], f) == p->bytes[i];
    if (f && fclose(f) != 0) good = false;
    if (good && rename(temporary, path) == 0) {
        remember(path);
        return;
    }
    kv_log(KV_LOG_INFO, "cache", "%s is not kept: %s", path, strerror(errno));
    unlink(temporary);
}

typedef struct aged {
    char *path;
    int64_t bytes;
    struct timespec used;
} aged;

static int by_age(const void *a, const void *b) {
    const struct timespec *x = &((const aged *)a)->used, *y = &((const aged *)b)->used;
    if (x->tv_sec != y->tv_sec) return x->tv_sec < y->tv_sec ? -1 : 1;
    return (x->tv_nsec > y->tv_nsec) - (x->tv_nsec < y->tv_nsec);
}

void kv_cache_trim(const char *folder, int64_t limit) {
    aged *list = NULL;
    size_t n = 0;
    int64_t total = 0;
    DIR *dir = opendir(folder);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        char path[PATH_MAX];
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) continue;
        aged *grown = realloc(list, (n + 1) * sizeof *grown);
        if (!grown) break;
        list = grown;
        list[n] = (aged){strdup(path), info.st_size, info.st_mtim};
        if (list[n].path) n++;
        total += info.st_size;
    }
    if (dir) closedir(dir);
    if (n) qsort(list, n, sizeof *list, by_age);
    for (size_t i = 0; i < n; i++) {
        if (total > limit && unlink(list[i].path) == 0) total -= list[i].bytes;
        free(list[i].path);
    }
    free(list);
}
