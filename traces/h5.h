/* Thin layer over HDF5: its errors go into our record, identifiers close alike, attributes are read leniently (any integer or
 * float width, fixed or variable strings) and written in one exact form. */
#ifndef KV_H5_H
#define KV_H5_H

#include <hdf5.h>
#include <stdbool.h>

#include "reference/core/num.h"
#include "reference/core/status.h"

/* Turns HDF5's own printing off (it is per thread) and empties its error stack. First call of every public function here. */
void kv_h5_begin(void);

/* Closes any kind of identifier; negative ones are ignored. False when what it still held cannot be written. */
bool kv_h5_close(hid_t id);

/* KV_FAIL plus the innermost reason on HDF5's error stack. */
kv_status kv_h5_fail_at(const char *file, int line, kv_status code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define KV_H5_RAISE(code, ...) \
    do { \
        st = kv_h5_fail_at(__FILE__, __LINE__, (code), __VA_ARGS__); \
        goto out; \
    } while (0)
/* id = call, or KV_H5_RAISE */
#define KV_H5_TRY(id, call, code, ...) \
    do { \
        (id) = (call); \
        if ((id) < 0) KV_H5_RAISE((code), __VA_ARGS__); \
    } while (0)

/* Opens a file for reading: KV_E_NOINPUT when it is missing or unreadable, KV_E_DATA when it is not (whole) HDF5. */
kv_status kv_h5_open(const char *path, hid_t *file);

/* A new file beside `path`, written under *temporary (owned) until kv_h5_publish renames it. Object times are off: the same
 * content gives the same bytes. KV_E_CANTCREATE. */
kv_status kv_h5_create(const char *path, char **temporary, hid_t *file);
/* Closes *file and renames (KV_E_IO when the last bytes cannot be written). */
kv_status kv_h5_publish(hid_t *file, const char *temporary, const char *path);

/* Property lists of new objects; H5P_GROUP_CREATE or H5P_DATASET_CREATE with times off. */
hid_t kv_h5_creation(hid_t property_class);
/* A data set in chunks with the portable filters: shuffle, deflate(1), fletcher32. */
hid_t kv_h5_chunked(int n_dim, const hsize_t *chunk);

/* Attributes of `loc`, whose path `object` is for messages. Absent (or empty) attributes leave *present false. */
typedef struct kv_h5_number {
    bool present, whole; /* whole: stored as integer, or a float without fraction */
    double value;
    uint64_t bits; /* value of a stored integer, exact */
} kv_h5_number;
kv_status kv_h5_get_number(hid_t loc, const char *object, const char *name, kv_h5_number *out);
/* *out is owned by the caller, NULL when absent */
kv_status kv_h5_get_text(hid_t loc, const char *object, const char *name, char **out);
/* n numbers exactly; KV_E_DATA otherwise */
kv_status kv_h5_get_reals(hid_t loc, const char *object, const char *name, size_t n, bool *present,
                          double *out);

kv_status kv_h5_put_text(hid_t loc, const char *name, const char *text);
/* n = 0: a scalar */
kv_status kv_h5_put(hid_t loc, const char *name, hid_t file_type, hid_t memory_type, size_t n,
                    const void *value);

/* File type of an element, little endian; owned by the caller. */
hid_t kv_h5_float_type(kv_dtype type);

#endif
