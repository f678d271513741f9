/* One deliberate change to an HDF5 file through the library's own functions: how the tests make traces that break one rule. */
#ifndef KV_NAIVE_MUTATE_HDF5_H
#define KV_NAIVE_MUTATE_HDF5_H

#include <stdint.h>

typedef enum mutation_kind {
    DROP_ATTRIBUTE, /* object, name */
    SET_INT,        /* object, name, number: attribute of 64-bit integer */
    SET_REAL,       /* object, name, number: attribute of type f32 */
    SET_TEXT,       /* object, name, text: attribute of variable length */
    SET_BOOL,       /* object, name: attribute as h5py writes True */
    SET_VERSION,    /* number, index: schema_version[index] */
    DROP,           /* object */
    WRITE,          /* object, index, number: one element */
    REPLACE,        /* object, type, dim, store: a data set of ones in its place */
    CONVERT,        /* object, type, store: the same values in another type and storage */
    SOFT_LINK,      /* object becomes a soft link to a copy beside it */
    EXTERNAL_LINK,  /* object becomes an external link */
    COPY_REQUEST,   /* /requests/r00000 once more under name */
    MAKE_GROUP,     /* object becomes an empty group */
} mutation_kind;

typedef enum element_type {
    I8,
    I32,
    I64,
    U8,
    F16,
    BF16,
    F32,
    F64,
    F16_BIG,
    I32_BIG,
    STRING
} element_type;
typedef enum store {
    CONTIGUOUS,
    CHUNKED,
    COMPACT,
    EXTERNAL_FILE,
    VIRTUAL,
    UNWRITTEN,
    HALF_WRITTEN,
    UNKNOWN_FILTER,
    HUGE_CHUNK,
    NO_FILTER_CHUNKED
} store;

typedef struct mutation {
    mutation_kind kind;
    const char *object, *name, *text;
    double number;
    int64_t index;
    element_type type;
    store store;
    int64_t dim[6]; /* ends with 0 */
} mutation;

/* Returns 0, or -1 when HDF5 refused (a fault of the test). */
int mutate(const char *path, const mutation *m);

#endif
