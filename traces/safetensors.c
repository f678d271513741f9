/* safetensors files: read through mmap, written by rename.
 *
 * A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets; "__metadata__" holds text),
 * then the data. The header is untrusted: every number is checked against the file before a pointer is formed, and the ranges must
 * cover the data without holes or overlaps, as the reference implementation demands. */
#include "traces/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "reference/core/mem.h"

enum { LENGTH_BYTES = 8, HEADER_MAX = 100000000 };

static const struct {
    const char *name;
    kv_dtype type;
} known_dtype[] = {{"F32", KV_F32}, {"F16", KV_F16}, {"BF16", KV_BF16}};

typedef struct mapping {
    void *base;
    size_t size;
} mapping;

typedef struct mappings {
    int32_t n;
    mapping map[];
} mappings;

typedef struct range { /* bytes of one tensor, relative to the data section */
    uint64_t begin, end;
    const char *name;
} range;

static void unmap(void *backing) {
    mappings *m = backing;
    for (int32_t i = 0; i < m->n; i++) munmap(m->map[i].base, m->map[i].size);
    free(m);
}

/* The mapping is private and never written: its pages come back from the file. */
static void rest(void *backing) {
    const mappings *m = backing;
    for (int32_t i = 0; i < m->n; i++) madvise(m->map[i].base, m->map[i].size, MADV_DONTNEED);
}

/* Hashed in pieces that leave memory, for files larger than it. */
static void hash_file(const mapping *m, XXH3_state_t *hash) {
    const size_t piece = (size_t)16 << 20;
    for (size_t first = 0; first < m->size; first += piece) {
        const size_t n = m->size - first < piece ? m->size - first : piece;
        XXH3_128bits_update(hash, (const char *)m->base + first, n);
        madvise((char *)m->base + first, n, MADV_DONTNEED);
    }
}

static kv_status map_file(const char *path, mapping *out) {
    kv_status st = KV_OK;
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) KV_RAISE(KV_E_NOINPUT, "%s: cannot be opened: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        KV_RAISE(KV_E_NOINPUT, "%s: is not a regular file", path);
    if (info.st_size < LENGTH_BYTES)
        KV_RAISE(KV_E_DATA, "%s: %lld bytes, but a safetensors file starts with an 8-byte length",
                 path, (long long)info.st_size);
    out->size = (size_t)info.st_size;
    out->base = mmap(NULL, out->size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (out->base == MAP_FAILED) KV_RAISE(KV_E_IO, "%s: mmap failed: %s", path, strerror(errno));
out:
    if (fd >= 0) close(fd);
    return st;
}

/* header [length] and data section of a mapped file */
static kv_status split(const char *path, const mapping *m, const char **header, uint64_t *length) {
    const unsigned char *b = m->base;
    uint64_t n = 0;
    for (int i = LENGTH_BYTES - 1; i >= 0; i--) n = n << 8 | b[i];
    if (n > HEADER_MAX)
        return KV_FAIL(KV_E_DATA,
                       "%s: header of %" PRIu64 " bytes, at most %d are allowed: not a safetensors "
                       "file, or damaged",
                       path, n, HEADER_MAX);
    if (n > m->size - LENGTH_BYTES)
        return KV_FAIL(KV_E_DATA,
                       "%s: header of %" PRIu64 " bytes in a file of %zu bytes: the file is cut",
                       path, n, m->size);
    *header = (const char *)b + LENGTH_BYTES;
    *length = n;
    return KV_OK;
}

static kv_status parse_shape(const char *path, const char *name, const json_t *shape,
                             kv_tensor *t) {
    if (!json_is_array(shape) || json_array_size(shape) > KV_TENSOR_DIMS)
        return KV_FAIL(KV_E_DATA, "%s: tensor \"%s\": shape must be an array of at most %d numbers",
                       path, name, KV_TENSOR_DIMS);
    t->n_dim = (int32_t)json_array_size(shape);
    t->n_element = 1;
    for (int32_t i = 0; i < t->n_dim; i++) {
        const json_t *item = json_array_get(shape, (size_t)i);
        json_int_t extent = json_integer_value(item);
        if (!json_is_integer(item) || extent < 0 ||
            __builtin_mul_overflow(t->n_element, (int64_t)extent, &t->n_element))
            return KV_FAIL(KV_E_DATA,
                           "%s: tensor \"%s\": dimension %d is not a whole number >= 0 or the size "
                           "overflows",
                           path, name, i);
        t->shape[i] = extent;
    }
    return KV_OK;
}

static kv_status parse_tensor(const char *path, const char *name, const json_t *entry,
                              const char *data, uint64_t n_data, kv_tensor *t, range *r) {
    kv_status st = KV_OK;
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const json_t *low = json_array_get(offsets, 0), *high = json_array_get(offsets, 1);
    size_t known = 0, n_known = sizeof known_dtype / sizeof *known_dtype;
    if (!dtype) KV_RAISE(KV_E_DATA, "%s: tensor \"%s\" has no dtype", path, name);
    while (known < n_known && strcmp(dtype, known_dtype[known].name) != 0) known++;
    if (known == n_known)
        KV_RAISE(KV_E_DATA, "%s: tensor \"%s\" has dtype %s, supported are F32, F16, BF16", path,
                 name, dtype);
    t->type = known_dtype[known].type;
    KV_TRY(parse_shape(path, name, json_object_get(entry, "shape"), t));
    if (json_array_size(offsets) != 2 || !json_is_integer(low) || !json_is_integer(high) ||
        json_integer_value(low) < 0 || json_integer_value(high) < json_integer_value(low) ||
        (uint64_t)json_integer_value(high) > n_data)
        KV_RAISE(KV_E_DATA,
                 "%s: tensor \"%s\": data_offsets must be [begin, end] within the %" PRIu64
                 " data bytes of the file",
                 path, name, n_data);
    *r = (range){(uint64_t)json_integer_value(low), (uint64_t)json_integer_value(high), name};
    uint64_t bytes = r->end - r->begin, element = kv_dtype_size(t->type);
    if ((uint64_t)t->n_element != bytes / element || bytes % element != 0)
        KV_RAISE(KV_E_DATA,
                 "%s: tensor \"%s\": data_offsets span %" PRIu64 " bytes, shape and dtype need "
                 "%" PRId64 " elements of %" PRIu64,
                 path, name, bytes, t->n_element, element);
    t->data = data + r->begin;
    if ((uintptr_t)t->data % element != 0)
        KV_RAISE(KV_E_DATA,
                 "%s: tensor \"%s\" starts at an address that is not a multiple of %" PRIu64
                 ": save the file again with a current safetensors library, which aligns the data",
                 path, name, element);
    t->name = kv_strdup(name);
    if (!t->name) st = KV_E_INTERNAL;
out:
    return st;
}

static int compare_range(const void *a, const void *b) {
    const range *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static kv_status check_ranges(const char *path, range *r, size_t n, uint64_t n_data) {
    uint64_t covered = 0;
    if (n) qsort(r, n, sizeof *r, compare_range);
    for (size_t i = 0; i < n; i++) {
        if (r[i].begin != covered)
            return KV_FAIL(
                KV_E_DATA, "%s: tensor \"%s\" begins at byte %" PRIu64 ", expected %" PRIu64 ": %s",
                path, r[i].name, r[i].begin, covered,
                r[i].begin < covered ? "it overlaps another tensor" : "there is a hole before it");
        covered = r[i].end;
    }
    if (covered != n_data)
        return KV_FAIL(KV_E_DATA,
                       "%s: the tensors cover %" PRIu64 " of %" PRIu64 " data bytes: the file has "
                       "trailing bytes",
                       path, covered, n_data);
    return KV_OK;
}

static kv_status parse_meta(const char *path, json_t *meta, kv_tensors *out) {
    kv_status st = KV_OK;
    const char *key;
    json_t *value;
    if (!json_is_object(meta)) KV_RAISE(KV_E_DATA, "%s: __metadata__ is not an object", path);
    KV_NEW(out->key, json_object_size(meta));
    KV_NEW(out->value, json_object_size(meta));
    json_object_foreach(meta, key, value) {
        if (!json_is_string(value))
            KV_RAISE(KV_E_DATA, "%s: __metadata__ key \"%s\" does not hold text", path, key);
        int32_t at = out->n_meta++;
        /* Insertion keeps the keys sorted: metadata is a handful of entries. */
        for (; at > 0 && strcmp(out->key[at - 1], key) > 0; at--) {
            out->key[at] = out->key[at - 1];
            out->value[at] = out->value[at - 1];
        }
        out->key[at] = kv_strdup(key);
        out->value[at] = kv_strdup(json_string_value(value));
        if (!out->key[at] || !out->value[at]) {
            st = KV_E_INTERNAL;
            goto out;
        }
    }
out:
    return st;
}

/* Appends the tensors of one mapped file to `out`; metadata is taken from the first file. */
static kv_status parse_file(const char *path, const mapping *m, kv_tensors *out) {
    kv_status st = KV_OK;
    json_t *root = NULL;
    range *ranges = NULL;
    const char *header = NULL, *name;
    uint64_t length = 0;
    json_t *entry;
    json_error_t error;
    size_t n = 0;
    KV_TRY(split(path, m, &header, &length));
    root = json_loadb(header, length, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(root))
        KV_RAISE(KV_E_DATA, "%s: the header is not a JSON object: %s", path,
                 root ? "another type" : error.text);
    KV_NEW(ranges, json_object_size(root));
    kv_tensor *grown =
        realloc(out->tensor, ((size_t)out->n_tensor + json_object_size(root) + 1) * sizeof *grown);
    if (!grown) KV_RAISE(KV_E_INTERNAL, "out of memory for %zu tensors", json_object_size(root));
    out->tensor = grown;
    const char *data = header + length;
    uint64_t n_data = m->size - LENGTH_BYTES - length;
    json_object_foreach(root, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            if (out->n_meta == 0 && !out->key) KV_TRY(parse_meta(path, entry, out));
            continue;
        }
        kv_tensor *t = &out->tensor[out->n_tensor];
        *t = (kv_tensor){0};
        KV_TRY(parse_tensor(path, name, entry, data, n_data, t, &ranges[n]));
        out->n_tensor++;
        n++;
    }
    KV_TRY(check_ranges(path, ranges, n, n_data));
out:
    free(ranges);
    json_decref(root);
    return st;
}

static int compare_tensor(const void *a, const void *b) {
    return strcmp(((const kv_tensor *)a)->name, ((const kv_tensor *)b)->name);
}

static kv_status open_files(const char *path, char *const *file, int32_t n, kv_tensors *out) {
    kv_status st = KV_OK;
    XXH3_state_t *hash = XXH3_createState();
    mappings *m = kv_mem_new(1, sizeof *m + (size_t)n * sizeof *m->map);
    out->backing = m;
    out->release = m ? unmap : NULL;
    out->rest = m ? rest : NULL;
    out->path = kv_strdup(path);
    if (!hash || !m || !out->path) {
        st = KV_E_INTERNAL;
        goto out;
    }
    XXH3_128bits_reset(hash);
    for (int32_t i = 0; i < n; i++) {
        KV_TRY(map_file(file[i], &m->map[i]));
        m->n++;
        KV_TRY(parse_file(file[i], &m->map[i], out));
        hash_file(&m->map[i], hash);
    }
    XXH128_hash_t digest = XXH3_128bits_digest(hash);
    out->hash[0] = digest.high64;
    out->hash[1] = digest.low64;
    if (out->n_tensor)
        qsort(out->tensor, (size_t)out->n_tensor, sizeof *out->tensor, compare_tensor);
    for (int32_t i = 1; i < out->n_tensor; i++)
        if (strcmp(out->tensor[i - 1].name, out->tensor[i].name) == 0)
            KV_RAISE(KV_E_DATA, "%s: tensor \"%s\" stands in two shards", path,
                     out->tensor[i].name);
out:
    XXH3_freeState(hash);
    return st;
}

static int compare_text(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The distinct shard files of a weight map, sorted, as paths beside the index. */
static kv_status shard_files(const char *path, json_t *map, char ***out, int32_t *n_out) {
    kv_status st = KV_OK;
    const char *name, *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) + 1 : 0;
    json_t *value;
    char **file = NULL;
    size_t n = 0, kept = 0;
    if (!json_is_object(map) || json_object_size(map) == 0)
        KV_RAISE(KV_E_DATA, "%s: weight_map must be an object that names a file for every tensor",
                 path);
    KV_NEW(file, json_object_size(map));
    *out = file;
    json_object_foreach(map, name, value) {
        const char *shard = json_string_value(value);
        if (!shard || !*shard || strchr(shard, '/'))
            KV_RAISE(KV_E_DATA, "%s: weight_map of \"%s\" must be a file name in the same folder",
                     path, name);
        size_t size = (size_t)folder + strlen(shard) + 1;
        KV_NEW(file[n], size);
        snprintf(file[n++], size, "%.*s%s", folder, path, shard);
    }
    qsort(file, n, sizeof *file, compare_text);
    for (size_t i = 0; i < n; i++) {
        bool repeated = kept > 0 && strcmp(file[kept - 1], file[i]) == 0;
        char *f = file[i];
        file[i] = NULL;
        if (repeated)
            free(f);
        else
            file[kept++] = f;
    }
    *n_out = (int32_t)kept;
out:
    if (st != KV_OK && file) {
        for (size_t i = 0; i < n; i++) free(file[i]);
        free(file);
        *out = NULL;
    }
    return st;
}

static kv_status open_index(const char *path, kv_tensors *out) {
    kv_status st = KV_OK;
    json_error_t error;
    char **file = NULL;
    int32_t n = 0;
    const char *name;
    json_t *value, *root = NULL, *map;
    if (access(path, R_OK) != 0)
        KV_RAISE(KV_E_NOINPUT, "%s: cannot be opened: %s", path, strerror(errno));
    root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!root) KV_RAISE(KV_E_DATA, "%s:%d: %s", path, error.line, error.text);
    map = json_object_get(root, "weight_map");
    KV_TRY(shard_files(path, map, &file, &n));
    KV_TRY(open_files(path, file, n, out));
    json_object_foreach(map, name, value) {
        if (!kv_tensors_find(out, name))
            KV_RAISE(KV_E_DATA, "%s: tensor \"%s\" is not in any shard, expected in %s", path, name,
                     json_string_value(value));
    }
out:
    for (int32_t i = 0; i < n; i++) free(file[i]);
    free(file);
    json_decref(root);
    return st;
}

kv_status kv_safetensors_open(const char *path, kv_tensors *out) {
    static const char index_suffix[] = ".index.json";
    size_t n = strlen(path), suffix = sizeof index_suffix - 1;
    char *single = kv_strdup(path);
    kv_status st = single ? KV_OK : KV_E_INTERNAL;
    *out = (kv_tensors){0};
    if (st == KV_OK && n > suffix && strcmp(path + n - suffix, index_suffix) == 0)
        st = open_index(path, out);
    else if (st == KV_OK)
        st = open_files(path, &single, 1, out);
    if (st != KV_OK) kv_tensors_free(out);
    free(single);
    return st;
}
