/* Chunks compressed by all threads are the bytes that HDF5's own filters make, and HDF5 reads them back. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/cpu.h"
#include "reference/core/rand.h"
#include "tests/naive/test_folder.h"
#include "traces/chunks.h"

TestSuite(chunks, .init = test_folder_enter, .fini = test_folder_leave);

enum { HEADS = 3, ROWS = 1000, MOST = 12 };

/* A data set [HEADS][ROWS][width] of bytes in elements of `size`, with head 1 at hand. */
static hid_t make_set(hid_t file, const char *name, size_t size, hsize_t width, hsize_t stripe) {
    const hsize_t shape[] = {HEADS, ROWS, width}, chunk[] = {1, stripe, width};
    hid_t space = H5Screate_simple(3, shape, NULL), list = kv_h5_chunked(3, chunk);
    hid_t type = size == 2 ? H5T_STD_U16LE : H5T_STD_U32LE;
    hid_t set = H5Dcreate2(file, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    cr_assert_geq(set, 0);
    kv_h5_close(list);
    kv_h5_close(space);
    return set;
}

static void write_plainly(hid_t set, hid_t type, hsize_t width, const void *data) {
    const hsize_t start[] = {1, 0, 0}, count[] = {1, ROWS, width};
    hid_t file_space = H5Dget_space(set), memory = H5Screate_simple(3, count, NULL);
    H5Sselect_hyperslab(file_space, H5S_SELECT_SET, start, NULL, count, NULL);
    cr_assert_geq(H5Dwrite(set, type, memory, file_space, H5P_DEFAULT, data), 0);
    H5Dflush(set);
    kv_h5_close(file_space);
    kv_h5_close(memory);
}

static size_t raw_chunk(hid_t set, hsize_t row, uint8_t **out) {
    const hsize_t at[] = {1, row, 0};
    hsize_t n = 0;
    uint32_t skipped = 1;
    cr_assert_geq(H5Dget_chunk_storage_size(set, at, &n), 0);
    *out = malloc(n);
    cr_assert_geq(H5Dread_chunk(set, H5P_DEFAULT, at, &skipped, *out), 0);
    cr_assert_eq(skipped, 0);
    return n;
}

static void compare(hid_t file, size_t size, hsize_t width, hsize_t stripe, bool noise) {
    static uint8_t data[ROWS * MOST * 4], back[sizeof data];
    const size_t n = ROWS * width * size;
    char name[2][32];
    hid_t set[2], type = size == 2 ? H5T_NATIVE_UINT16 : H5T_NATIVE_UINT32;
    kv_rng rng = kv_rng_make(7, 0);
    for (size_t i = 0; i < n; i++)
        data[i] = noise ? (uint8_t)kv_rng_below(&rng, 256) : (uint8_t)(i / 50);
    for (int i = 0; i < 2; i++) {
        snprintf(name[i], sizeof name[i], "s%zu-%d-%d-%d-%d", size, (int)width, (int)stripe, noise,
                 i);
        set[i] = make_set(file, name[i], size, width, stripe);
    }
    write_plainly(set[0], type, width, data);
    const kv_chunk_rows rows = {.set = set[1],
                                .axis = 1,
                                .start = {1},
                                .n_row = ROWS,
                                .row_size = (size_t)width * size,
                                .stripe = stripe,
                                .element_size = size};
    cr_assert_eq(kv_h5_write_chunks(&rows, data), KV_OK, "%s", kv_error_message());
    for (hsize_t row = 0; row < ROWS; row += stripe) {
        uint8_t *a, *b;
        size_t x = raw_chunk(set[0], row, &a), y = raw_chunk(set[1], row, &b);
        cr_expect(x == y && memcmp(a, b, x) == 0, "%s, chunk of row %d", name[0], (int)row);
        free(a);
        free(b);
    }
    const hsize_t start[] = {1, 0, 0}, count[] = {1, ROWS, width};
    hid_t space = H5Dget_space(set[1]), memory = H5Screate_simple(3, count, NULL);
    H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL);
    cr_assert_geq(H5Dread(set[1], type, memory, space, H5P_DEFAULT, back), 0, "%s", name[1]);
    cr_expect_eq(memcmp(back, data, n), 0, "%s", name[1]);
    kv_h5_close(space);
    kv_h5_close(memory);
    for (int i = 0; i < 2; i++) kv_h5_close(set[i]);
}

Test(chunks, bytes_are_those_of_hdf5) {
    char *temporary = NULL;
    hid_t file = -1;
    cr_assert_eq(kv_h5_create("x.h5", &temporary, &file), KV_OK, "%s", kv_error_message());
    for (int threads = 1; threads <= 3; threads += 2) {
        kv_threads_set(threads);
        for (int noise = 0; noise < 2; noise++) {
            const hsize_t width = threads == 1 ? 1 : 12;
            compare(file, 2, width, 1000, noise);
            compare(file, 4, width, 64, noise); /* the last chunk is not full */
            compare(file, 2, width, 7, noise);  /* more chunks than one batch, odd sizes */
        }
    }
    kv_h5_close(file);
    free(temporary);
}
