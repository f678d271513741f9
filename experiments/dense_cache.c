/* Content-addressed cache of dense results: one file per group of arrays. */
#include "experiments/dense_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "experiments/files.h"
#include "experiments/version.h"
#include "reference/core/cpu.h"
#include "reference/core/log.h"
#include "reference/core/mem.h"

enum { MAX_ARRAYS = 3, FORMAT = 1 };
static const char magic[8] = "KVDENSE";
static const int64_t largest_file = (int64_t)1
                                    << 30; /* bytes; larger results are computed each time */

typedef struct header {
    char magic[8];
    uint32_t format, n_array;
    uint64_t key[2], checksum[2], bytes; /* checksum and bytes of the payload */
} header;

typedef struct part { /* arrays that are computed and stored together */
    char name[64];    /* with the settings they depend on */
    uint64_t key[2];
    int32_t n_array;
    void **array[MAX_ARRAYS]; /* where the pointers live in the kv_dense */
    size_t bytes[MAX_ARRAYS];
} part;

static void hash_heads(XXH3_state_t *h, const float *x, int32_t n_head, const kv_span *s) {
    size_t row = (size_t)s->head_dim * sizeof(float);
    for (int32_t i = 0; i < n_head; i++)
        XXH3_128bits_update(h, x + (size_t)(i * s->stride) * (size_t)s->head_dim,
                            (size_t)s->n_token * row);
}

static kv_status hash_span(const kv_ops *ops, const kv_span *s, uint64_t key[2]) {
    char about[512];
    XXH3_state_t *h = XXH3_createState();
    if (!h) return KV_FAIL(KV_E_INTERNAL, "out of memory");
    XXH3_128bits_reset(h);
    int n = snprintf(about, sizeof about, "%d %s %s %s | %d %lld %d %d %d %a %a", FORMAT, ops->name,
                     kv_isa_name(kv_cpu_isa()), kv_version_build.attention_sources, s->n_token,
                     (long long)s->stride, s->n_q_head, s->n_kv_head, s->head_dim, (double)s->scale,
                     (double)s->softcap);
    XXH3_128bits_update(h, about, (size_t)n);
    hash_heads(h, s->q, s->n_q_head, s);
    hash_heads(h, s->k, s->n_kv_head, s);
    hash_heads(h, s->v, s->n_kv_head, s);
    XXH128_hash_t d = XXH3_128bits_digest(h);
    XXH3_freeState(h);
    key[0] = d.high64;
    key[1] = d.low64;
    return KV_OK;
}

static void file_name(const char *folder, const part *p, char *path, size_t size) {
    snprintf(path, size, "%s/%016llx%016llx-%s", folder, (unsigned long long)p->key[0],
             (unsigned long long)p->key[1], p->name);
}

static size_t part_bytes(const part *p) {
    size_t n = 0;
    for (int32_t i = 0; i < p->n_array; i++) n += p->bytes[i];
    return n;
}

static void checksum_of(const part *p, uint64_t out[2]) {
    uint64_t sums[MAX_ARRAYS][2];
    for (int32_t i = 0; i < p->n_array; i++) {
        XXH128_hash_t d = XXH3_128bits(*p->array[i], p->bytes[i]);
        sums[i][0] = d.high64;
        sums[i][1] = d.low64;
    }
    XXH128_hash_t d = XXH3_128bits(sums, (size_t)p->n_array * sizeof *sums);
    out[0] = d.high64;
    out[1] = d.low64;
}

static void drop(part *p) {
    for (int32_t i = 0; i < p->n_array; i++) {
        free(*p->array[i]);
        *p->array[i] = NULL;
    }
}

/* True when the arrays were read whole and sound. Every failure means "not cached". */
static bool load(const char *folder, part *p) {
    char path[PATH_MAX];
    header h;
    uint64_t sum[2];
    file_name(folder, p, path, sizeof path);
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    bool good = fread(&h, sizeof h, 1, f) == 1 && memcmp(h.magic, magic, sizeof magic) == 0 &&
                h.format == FORMAT && h.n_array == (uint32_t)p->n_array && h.key[0] == p->key[0] &&
                h.key[1] == p->key[1] && h.bytes == part_bytes(p);
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

static void store(const char *folder, const part *p) {
    char path[PATH_MAX], temporary[PATH_MAX + 32];
    header h = {.format = FORMAT, .n_array = (uint32_t)p->n_array, .bytes = part_bytes(p)};
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.key, p->key, sizeof h.key);
    if ((int64_t)h.bytes > largest_file || kv_make_folders(folder) != KV_OK) return;
    checksum_of(p, h.checksum);
    file_name(folder, p, path, sizeof path);
    snprintf(temporary, sizeof temporary, "%s.%d.tmp", path, (int)getpid());
    FILE *f = fopen(temporary, "wb");
    bool good = f && fwrite(&h, sizeof h, 1, f) == 1;
    for (int32_t i = 0; good && i < p->n_array; i++)
        good = fwrite(*p->array[i], 1, p->bytes[i], f) == p->bytes[i];
    if (f && fclose(f) != 0) good = false;
    if (good && rename(temporary, path) == 0) return;
    kv_log(KV_LOG_INFO, "cache", "%s is not kept: %s", path, strerror(errno));
    unlink(temporary);
}

/* The parts of a request. The names carry what the numbers depend on besides the span. */
static int32_t list_parts(const kv_span *s, const kv_dense_request *r, kv_dense *d,
                          const uint64_t key[2], part *parts) {
    int32_t n = 0;
    size_t rows = (size_t)s->n_q_head * (size_t)s->stride;
    parts[n++] = (part){"lse", .n_array = 1, .array = {(void **)&d->lse}, .bytes = {rows * 4}};
    for (int32_t i = 0; i < r->n_power; i++) {
        part *p = &parts[n++];
        *p = (part){.n_array = 1, .array = {(void **)&d->column[i]}, .bytes = {rows * 8}};
        snprintf(p->name, sizeof p->name, "column-w%d-p%.17g", r->window, r->power[i]);
    }
    if (r->want_events) {
        part *p = &parts[n++];
        *p = (part){.n_array = 3,
                    .array = {(void **)&d->long_mass, (void **)&d->top_p, (void **)&d->top_t},
                    .bytes = {rows * 4, rows * 4, rows * 4}};
        snprintf(p->name, sizeof p->name, "events-s%d-w%d", r->sinks, r->window);
    }
    if (r->want_output)
        parts[n++] = (part){"o", .n_array = 1, .array = {(void **)&d->o},
                            .bytes = {rows * (size_t)s->head_dim * 4}};
    for (int32_t i = 0; i < n; i++) memcpy(parts[i].key, key, sizeof parts[i].key);
    return n;
}

/* One sweep for everything that is missing; its arrays move into `out`. */
static kv_status compute_missing(const kv_ops *ops, const kv_span *span,
                                 const kv_dense_request *request, kv_dense *out) {
    kv_status st = KV_OK;
    kv_dense fresh = {0};
    kv_dense_request r = *request;
    int32_t from[KV_DENSE_POWERS];
    r.n_power = 0;
    for (int32_t i = 0; i < request->n_power; i++)
        if (!out->column[i]) {
            from[r.n_power] = i;
            r.power[r.n_power++] = request->power[i];
        }
    r.want_events = request->want_events && !out->top_t;
    r.want_output = request->want_output && !out->o;
    KV_TRY(ops->dense(span, &r, &fresh));
    for (int32_t i = 0; i < r.n_power; i++) {
        out->column[from[i]] = fresh.column[i];
        fresh.column[i] = NULL;
    }
#define MOVE(member) \
    if (!out->member) { \
        out->member = fresh.member; \
        fresh.member = NULL; \
    }
    MOVE(lse)
    MOVE(long_mass)
    MOVE(top_p)
    MOVE(top_t)
    MOVE(o)
#undef MOVE
        out : kv_dense_free(&fresh);
    return st;
}

kv_status kv_dense_cached(const kv_ops *ops, const kv_span *span, const kv_dense_request *request,
                          const char *folder, kv_dense *out) {
    kv_status st = KV_OK;
    part parts[KV_DENSE_POWERS + 3];
    bool found[KV_DENSE_POWERS + 3] = {false}, complete = true;
    uint64_t key[2];
    if (!folder) return ops->dense(span, request, out);
    memset(out, 0, sizeof *out);
    out->request = *request;
    out->stride = span->stride;
    KV_TRY(hash_span(ops, span, key));
    int32_t n = list_parts(span, request, out, key, parts);
    for (int32_t i = 0; i < n; i++) complete &= found[i] = load(folder, &parts[i]);
    if (complete) goto out;
    KV_TRY(compute_missing(ops, span, request, out));
    for (int32_t i = 0; i < n; i++)
        if (!found[i]) store(folder, &parts[i]);
out:
    if (st != KV_OK) kv_dense_free(out);
    return st;
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

void kv_dense_cache_trim(const char *folder, int64_t limit) {
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
