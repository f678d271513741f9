/* Readers of the three token formats. */
#include "experiments/token_file.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/param.h"
#include "traces/trace_file.h"

static const char blank[] = " \t\r\n";
static const char npy_magic[] = "\x93NUMPY";

typedef struct id_list {
    const char *path;
    int32_t *id;
    int32_t n;
    size_t room;
} id_list;

/* `unit` and `at` say where the value stands, counted from 1: "line 7". */
static kv_status append(id_list *l, long long value, const char *unit, long long at) {
    if (value < 0 || value > INT32_MAX)
        return KV_FAIL(KV_E_DATA, "%s: %s %lld holds %lld, expected a token id 0..%d", l->path,
                       unit, at, value, INT32_MAX);
    if ((size_t)l->n == l->room) {
        size_t room = l->room ? 2 * l->room : 4096;
        if (room > INT32_MAX)
            return KV_FAIL(KV_E_DATA, "%s: holds more than %d tokens", l->path, INT32_MAX / 2);
        int32_t *grown = realloc(l->id, room * sizeof *grown);
        if (!grown) return KV_FAIL(KV_E_INTERNAL, "out of memory for %zu tokens", room);
        l->id = grown;
        l->room = room;
    }
    l->id[l->n++] = (int32_t)value;
    return KV_OK;
}

static kv_status read_text(FILE *f, id_list *l) {
    kv_status st = KV_OK;
    char *line = NULL;
    size_t size = 0;
    ssize_t length;
    for (long long number = 1; (length = getline(&line, &size, f)) >= 0; number++) {
        bool marked = number == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0; /* Windows editors */
        char *text = line + (marked ? 3 : 0);
        text += strspn(text, blank);
        char *rest = text + strcspn(text, blank);
        long long value;
        if (rest < line + length) *rest++ = '\0';
        if (!*text) continue;
        bool more = rest[strspn(rest, blank)];
        if (more || kv_parse_int(text, INT64_MIN, INT64_MAX, &value) != KV_OK)
            KV_RAISE(KV_E_DATA, "%s: line %lld holds '%.40s'%s, expected one token id per line",
                     l->path, number, text, more ? " and more" : "");
        KV_TRY(append(l, value, "line", number));
    }
    if (ferror(f)) KV_RAISE(KV_E_IO, "%s: reading failed: %s", l->path, strerror(errno));
out:
    free(line);
    return st;
}

/* Value of 'key' in the header, a Python dictionary as text; NULL if absent. */
static const char *npy_value(const char *header, const char *key) {
    const char *at = strstr(header, key);
    if (!at) return NULL;
    at += strlen(key);
    return at + strspn(at, "' :");
}

/* Characters of a tuple up to its bracket, at most 40 of one that has none. */
static int shape_length(const char *shape) {
    const size_t n = strcspn(shape, ")\n");
    return n < 40 ? (int)n + (shape[n] == ')') : 40;
}

static long long npy_integer(const unsigned char *raw, int size, bool is_signed, bool big) {
    uint64_t x = 0;
    for (int i = 0; i < size; i++) x |= (uint64_t)raw[big ? size - 1 - i : i] << 8 * i;
    if (is_signed && size < 8 && x >> (8 * size - 1)) x |= ~0ull << 8 * size;
    return !is_signed && x > INT64_MAX ? INT64_MAX : (long long)x;
}

static kv_status read_npy(FILE *f, id_list *l) {
    kv_status st = KV_OK;
    unsigned char head[12], raw[8];
    char *header = NULL;
    if (fread(head, 1, 8, f) != 8 || fread(head + 8, head[6] == 1 ? 2 : 4, 1, f) != 1)
        KV_RAISE(KV_E_DATA, "%s: ends within the .npy header; it is truncated", l->path);
    size_t length = head[8] | (size_t)head[9] << 8;
    if (head[6] != 1) length |= (size_t)head[10] << 16 | (size_t)head[11] << 24;
    if (length > 1 << 20) KV_RAISE(KV_E_DATA, "%s: .npy header of %zu bytes", l->path, length);
    KV_NEW(header, length + 1);
    if (fread(header, 1, length, f) != length)
        KV_RAISE(KV_E_DATA, "%s: ends within the .npy header; it is truncated", l->path);
    const char *type = npy_value(header, "'descr'"), *shape = npy_value(header, "'shape'");
    char order = 0, class = 0;
    int size = 0;
    long long n = 0;
    if (!type || sscanf(type, "%c%c%1d", &order, &class, &size) != 3 || !strchr("<>|=", order) ||
        !strchr("iu", class) || (size != 1 && size != 2 && size != 4 && size != 8))
        KV_RAISE(KV_E_DATA, "%s: holds .npy type '%.8s', expected integers", l->path,
                 type ? type : "");
    char end[2] = "";
    if (!shape || sscanf(shape, "(%lld, %1[)]", &n, end) != 2)
        KV_RAISE(KV_E_DATA, "%s: holds an array of shape %.*s, expected one dimension (n,)",
                 l->path, shape ? shape_length(shape) : 1, shape ? shape : "?");
    for (long long i = 0; i < n; i++) {
        if (fread(raw, 1, (size_t)size, f) != (size_t)size)
            KV_RAISE(KV_E_DATA, "%s: ends after %lld of %lld tokens; it is truncated", l->path, i,
                     n);
        KV_TRY(append(l, npy_integer(raw, size, class == 'i', order == '>'), "token", i + 1));
    }
out:
    free(header);
    return st;
}

/* /token of any HDF5 file. */
static kv_status read_plain_hdf5(const char *path, hid_t file, id_list *l) {
    kv_status st = KV_OK;
    int64_t *value = NULL;
    kv_found found = {0};
    kv_trace view = {.file = file, .path = (char *)path};
    KV_TRY(kv_found_describe(file, "/", "token", &found));
    KV_TRY(kv_found_check(path, &found));
    if (found.element != KV_EL_INT || found.n_dim != 1)
        KV_RAISE(KV_E_DATA, "%s: /token must hold integers in one dimension", path);
    KV_NEW(value, found.dim[0]);
    KV_TRY(kv_found_read_ints(&view, &found, value));
    for (int64_t i = 0; i < found.dim[0]; i++) KV_TRY(append(l, value[i], "/token, value", i + 1));
out:
    free(found.path);
    free(value);
    return st;
}

static kv_status read_hdf5(id_list *l) {
    kv_status st = KV_OK;
    hid_t file = -1;
    kv_trace *trace = NULL;
    KV_TRY(kv_h5_open(l->path, &file));
    if (H5Lexists(file, "token", H5P_DEFAULT) > 0) {
        KV_TRY(read_plain_hdf5(l->path, file, l));
        goto out;
    }
    KV_TRY(kv_trace_open(l->path, &trace));
    const kv_trace_info *info = kv_trace_get(trace);
    if (info->n_request != 1)
        KV_RAISE(KV_E_DATA, "%s: holds %d requests, tokens are taken from a trace of one", l->path,
                 info->n_request);
    for (int64_t i = 0; i < info->n_token; i++) KV_TRY(append(l, info->token[i], "token", i + 1));
out:
    kv_trace_close(trace);
    kv_h5_close(file);
    return st;
}

kv_status kv_token_file_read(const char *path, int32_t **token, int32_t *n) {
    kv_status st = KV_OK;
    id_list l = {.path = path};
    char magic[8] = "";
    FILE *f = fopen(path, "rb");
    *token = NULL;
    *n = 0;
    if (!f) KV_RAISE(KV_E_NOINPUT, "%s: cannot be read: %s", path, strerror(errno));
    size_t got = fread(magic, 1, sizeof magic, f);
    if (fseek(f, 0, SEEK_SET) != 0)
        KV_RAISE(KV_E_NOINPUT,
                 "%s: is a pipe, which cannot be read twice; write it to a file first", path);
    if (got == sizeof magic && memcmp(magic, "\x89HDF\r\n\x1a\n", 8) == 0)
        KV_TRY(read_hdf5(&l));
    else if (got == sizeof magic && memcmp(magic, npy_magic, 6) == 0)
        KV_TRY(read_npy(f, &l));
    else
        KV_TRY(read_text(f, &l));
    if (!l.n) KV_RAISE(KV_E_DATA, "%s: holds no tokens", path);
    *token = l.id;
    *n = l.n;
out:
    if (st != KV_OK) free(l.id);
    if (f) fclose(f);
    return st;
}
