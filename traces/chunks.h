/* Chunks of a data set compressed by all threads. HDF5 runs its filters on one thread, which made writing a trace the serial part of
 * recording. The bytes are those that HDF5's own filters make. */
#ifndef KV_CHUNKS_H
#define KV_CHUNKS_H

#include "traces/h5.h"

/* Consecutive chunks along one axis of a data set made by kv_h5_chunked. */
typedef struct kv_chunk_rows {
    hid_t set;
    int axis;               /* chunks follow each other along `axis`; after it they are whole */
    hsize_t start[4];       /* first element; 0 at `axis` */
    size_t n_row, row_size; /* rows at hand, bytes of one */
    size_t stripe;          /* rows of a chunk; the last one is filled up with zeros */
    size_t element_size;
} kv_chunk_rows;

/* Writes all rows: data [n_row] of row_size bytes, little endian as stored. KV_E_IO with HDF5's reason. */
kv_status kv_h5_write_chunks(const kv_chunk_rows *c, const void *data);

/* Fletcher's checksum over big-endian 16-bit words, as H5_checksum_fletcher32 forms it; stored little endian behind the data. */
uint32_t kv_h5_fletcher32(const uint8_t *data, size_t n);

#endif
