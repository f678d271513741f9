/* HDF5's filters shuffle, deflate(1) and fletcher32 over many chunks at a time (chunks.h). */
#include "traces/chunks.h"

#include <omp.h>
#include <string.h>
#include <zlib.h>

#include "reference/core/cpu.h"
#include "reference/core/mem.h"

enum { BATCH = 64, CHECKSUM = 4, LEVEL = 1 };

/* Bytes 0 of all elements, then bytes 1, … */
static void shuffle(const uint8_t *from, size_t n, size_t element_size, uint8_t *to) {
    for (size_t b = 0; b < element_size; b++)
        for (size_t i = 0; i < n; i++) to[b * n + i] = from[i * element_size + b];
}

uint32_t kv_h5_fletcher32(const uint8_t *data, size_t n) {
    enum { BLOCK = 360 }; /* words whose sums stay within 32 bits */
    uint32_t sum1 = 0, sum2 = 0;
    for (size_t left = n / 2; left > 0;) {
        size_t words = left < BLOCK ? left : BLOCK;
        left -= words;
        for (; words > 0; words--, data += 2) {
            sum1 += (uint32_t)data[0] << 8 | data[1];
            sum2 += sum1;
        }
        sum1 = (sum1 & 0xffff) + (sum1 >> 16);
        sum2 = (sum2 & 0xffff) + (sum2 >> 16);
    }
    if (n % 2) {
        sum1 += (uint32_t)*data << 8;
        sum2 += sum1;
        sum1 = (sum1 & 0xffff) + (sum1 >> 16);
        sum2 = (sum2 & 0xffff) + (sum2 >> 16);
    }
    sum1 = (sum1 & 0xffff) + (sum1 >> 16);
    sum2 = (sum2 & 0xffff) + (sum2 >> 16);
    return sum2 << 16 | sum1;
}

/* One chunk through the filters; 0 when zlib fails. plain and shuffled are scratch of one chunk. */
static size_t pack(const kv_chunk_rows *c, const uint8_t *data, size_t chunk, uint8_t *plain,
                   uint8_t *shuffled, uint8_t *out, size_t room) {
    const size_t first = chunk * c->stripe, left = c->n_row - first,
                 rows = left < c->stripe ? left : c->stripe, size = c->stripe * c->row_size;
    const uint8_t *from = data + first * c->row_size;
    if (rows < c->stripe) {
        memcpy(plain, from, rows * c->row_size);
        memset(plain + rows * c->row_size, 0, size - rows * c->row_size);
        from = plain;
    }
    shuffle(from, size / c->element_size, c->element_size, shuffled);
    uLongf n = room - CHECKSUM;
    if (compress2(out, &n, shuffled, size, LEVEL) != Z_OK) return 0;
    const uint32_t sum = kv_h5_fletcher32(out, n);
    for (int i = 0; i < CHECKSUM; i++) out[n + (size_t)i] = (uint8_t)(sum >> (8 * i));
    return n + CHECKSUM;
}

kv_status kv_h5_write_chunks(const kv_chunk_rows *c, const void *data) {
    kv_status st = KV_OK;
    const size_t n_chunk = (c->n_row + c->stripe - 1) / c->stripe, size = c->stripe * c->row_size,
                 room = compressBound(size) + CHECKSUM;
    const int n_thread = kv_threads();
    uint8_t *scratch = NULL, *packed = NULL;
    size_t length[BATCH];
    KV_NEW(scratch, (size_t)n_thread * 2 * size);
    KV_NEW(packed, BATCH * room);
    for (size_t first = 0; first < n_chunk; first += BATCH) {
        const size_t n = n_chunk - first < BATCH ? n_chunk - first : BATCH;
#pragma omp parallel for schedule(dynamic, 1) num_threads(n_thread)
        for (size_t i = 0; i < n; i++) {
            uint8_t *own = scratch + (size_t)omp_get_thread_num() * 2 * size;
            length[i] = pack(c, data, first + i, own, own + size, packed + i * room, room);
        }
        for (size_t i = 0; i < n; i++) {
            hsize_t at[4];
            memcpy(at, c->start, sizeof at);
            at[c->axis] = (hsize_t)((first + i) * c->stripe);
            if (length[i] == 0) KV_RAISE(KV_E_INTERNAL, "zlib cannot compress a chunk");
            if (H5Dwrite_chunk(c->set, H5P_DEFAULT, 0, at, length[i], packed + i * room) < 0)
                KV_H5_RAISE(KV_E_IO, "a chunk cannot be written; is the disk full?");
        }
    }
out:
    free(scratch);
    free(packed);
    return st;
}
