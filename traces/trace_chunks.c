/* Reading chunks as they lie in the file and undoing their filters in parallel: the inverse of chunks.c for any shape of chunk. */
#include "traces/trace_chunks.h"

#include <string.h>
#include <zlib.h>

#include "reference/core/mem.h"
#include "traces/chunks.h"

enum { DIMS = KV_FOUND_DIMS, CHECKSUM = 4 };

typedef struct job {
    const kv_found *f;
    int64_t first, count;
    kv_dtype type;
    float *out;
    size_t size, bytes; /* of an element, of a whole decoded chunk */
    bool shuffled, deflated, summed;
    /* first chunk index and number of chunks by dimension */
    int64_t low[DIMS], grid[DIMS], n_chunk;
    size_t *at; /* [n_chunk + 1] where a stored chunk begins in raw */
    uint8_t *raw;
} job;

static bool list_filters(job *j) {
    int last = -1;
    static const int32_t order[] = {H5Z_FILTER_SHUFFLE, H5Z_FILTER_DEFLATE, H5Z_FILTER_FLETCHER32};
    bool *const found[] = {&j->shuffled, &j->deflated, &j->summed};
    if (j->f->n_filter > KV_FOUND_FILTERS) return false;
    for (int32_t i = 0; i < j->f->n_filter; i++) {
        int at = last + 1;
        while (at < 3 && order[at] != j->f->filter[i]) at++;
        if (at == 3) return false;
        *found[at] = true;
        last = at;
    }
    return true;
}

static bool lay_out(job *j) {
    const kv_found *f = j->f;
    if (f->layout != KV_CHUNKED || f->n_dim < 1 || f->n_dim > DIMS || !list_filters(j))
        return false;
    j->bytes = j->size;
    j->n_chunk = 1;
    for (int32_t i = 0; i < f->n_dim; i++) {
        const int64_t from = i ? 0 : j->first, to = i ? f->dim[i] : j->first + j->count;
        if (f->chunk[i] < 1) return false;
        j->low[i] = from / f->chunk[i];
        j->grid[i] = (to + f->chunk[i] - 1) / f->chunk[i] - j->low[i];
        j->n_chunk *= j->grid[i];
        j->bytes *= (size_t)f->chunk[i];
    }
    return j->n_chunk > 0;
}

/* Where chunk c begins, by dimension. */
static void place(const job *j, int64_t c, int64_t *start) {
    for (int32_t i = j->f->n_dim - 1; i >= 0; c /= j->grid[i], i--)
        start[i] = (j->low[i] + c % j->grid[i]) * j->f->chunk[i];
}

static void offset_of(const job *j, int64_t c, hsize_t *offset) {
    int64_t start[DIMS] = {0};
    place(j, c, start);
    for (int32_t i = 0; i < j->f->n_dim; i++) offset[i] = (hsize_t)start[i];
}

static bool is_little_endian(hid_t set) {
    const hid_t type = H5Dget_type(set);
    const bool little = type >= 0 && H5Tget_order(type) == H5T_ORDER_LE;
    kv_h5_close(type);
    return little;
}

/* The stored bytes of all chunks; false: leave it to HDF5. */
static bool load(job *j, hid_t set) {
    hsize_t offset[DIMS], bytes;
    uint32_t skipped;
    if (!is_little_endian(set)) return false;
    for (int64_t c = 0; c < j->n_chunk; c++) {
        offset_of(j, c, offset);
        if (H5Dget_chunk_storage_size(set, offset, &bytes) < 0 || bytes == 0 ||
            bytes > 2 * j->bytes + 1024)
            return false;
        j->at[c + 1] = j->at[c] + (size_t)bytes;
    }
    j->raw = malloc(j->at[j->n_chunk]);
    if (!j->raw) return false;
    for (int64_t c = 0; c < j->n_chunk; c++) {
        offset_of(j, c, offset);
        if (H5Dread_chunk(set, H5P_DEFAULT, offset, &skipped, j->raw + j->at[c]) < 0 || skipped)
            return false;
    }
    return true;
}

static void unshuffle(const uint8_t *x, size_t size, size_t n, uint8_t *y) {
    if (size == 2) {
        for (size_t i = 0; i < n; i++) {
            y[2 * i] = x[i];
            y[2 * i + 1] = x[n + i];
        }
        return;
    }
    for (size_t b = 0; b < size; b++)
        for (size_t i = 0; i < n; i++) y[i * size + b] = x[b * n + i];
}

/* A stored chunk -> its elements, in one of the two buffers [bytes]. NULL: it looks wrong. */
static const uint8_t *decode(const job *j, int64_t c, uint8_t *one, uint8_t *two) {
    const uint8_t *x = j->raw + j->at[c];
    size_t n = j->at[c + 1] - j->at[c];
    if (j->summed) {
        if (n < CHECKSUM) return NULL;
        n -= CHECKSUM;
        const uint8_t *s = x + n;
        const uint32_t stored =
            s[0] | (uint32_t)s[1] << 8 | (uint32_t)s[2] << 16 | (uint32_t)s[3] << 24;
        if (kv_h5_fletcher32(x, n) != stored) return NULL;
    }
    if (j->deflated) {
        uLongf length = j->bytes;
        if (uncompress(one, &length, x, n) != Z_OK) return NULL;
        x = one;
        n = length;
    }
    if (n != j->bytes) return NULL;
    if (!j->shuffled || j->size == 1) return x;
    unshuffle(x, j->size, n / j->size, two);
    return two;
}

/* The part of a decoded chunk that was asked for, widened to its place in out. Trailing dimensions that a chunk spans wholly are
 * copied in one run. */
static void put(const job *j, int64_t c, const uint8_t *x) {
    const kv_found *f = j->f;
    int64_t start[DIMS] = {0}, from[DIMS] = {0}, n[DIMS] = {0}, index[DIMS] = {0};
    place(j, c, start);
    for (int32_t i = 0; i < f->n_dim; i++) {
        const int64_t low = i ? 0 : j->first, high = i ? f->dim[i] : j->first + j->count,
                      end = start[i] + f->chunk[i];
        from[i] = start[i] < low ? low - start[i] : 0;
        n[i] = (end < high ? end : high) - start[i] - from[i];
    }
    int32_t k = f->n_dim - 1;
    int64_t run = n[k];
    while (k > 0 && f->chunk[k] == f->dim[k]) run *= n[--k];
    for (bool more = true; more;) {
        size_t source = 0, target = 0;
        for (int32_t i = 0; i < f->n_dim; i++) {
            const int64_t inside = from[i] + index[i];
            source = source * (size_t)f->chunk[i] + (size_t)inside;
            target = target * (size_t)(i ? f->dim[i] : j->count) +
                     (size_t)(start[i] + inside - (i ? 0 : j->first));
        }
        kv_widen(j->type, x + source * j->size, j->out + target, (size_t)run);
        more = false;
        for (int32_t i = k - 1; i >= 0 && !more; i--) {
            more = ++index[i] < n[i];
            if (!more) index[i] = 0;
        }
    }
}

static bool decode_all(const job *j) {
    bool good = true;
#pragma omp parallel reduction(&& : good)
    {
        uint8_t *one = malloc(j->bytes), *two = malloc(j->bytes);
        good = one && two;
#pragma omp for schedule(dynamic, 4)
        for (int64_t c = 0; c < j->n_chunk; c++) {
            const uint8_t *x = good ? decode(j, c, one, two) : NULL;
            if (x) put(j, c, x);
            good = good && x;
        }
        free(one);
        free(two);
    }
    return good;
}

kv_status kv_chunks_read(const kv_trace *t, const kv_found *f, int64_t first, int64_t count,
                         kv_dtype type, float *out, bool *done) {
    kv_status st = KV_OK;
    hid_t set = -1;
    job j = {.f = f,
             .first = first,
             .count = count,
             .type = type,
             .out = out,
             .size = kv_dtype_size(type)};
    *done = false;
    kv_h5_begin();
    if (!lay_out(&j)) goto out;
    KV_NEW(j.at, j.n_chunk + 1);
    KV_H5_TRY(set, H5Dopen2(t->file, f->path, H5P_DEFAULT), KV_E_DATA, "%s: %s cannot be opened",
              t->path, f->path);
    *done = load(&j, set) && decode_all(&j);
    H5Eclear2(H5E_DEFAULT);
out:
    kv_h5_close(set);
    free(j.at);
    free(j.raw);
    return st;
}
