/* Reads the decisions of one document of one layer from a file of decisions (traces/trace.h). */
#include <hdf5.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "traces/trace.h"

/* Opens /evict_at/<item>/b<budget>; negative when one of the three is absent. */
static hid_t open_item(hid_t file, const char *item, int32_t budget, char *name, size_t size) {
    static const char group[] = "/evict_at";
    hid_t set = -1;
    snprintf(name, size, "%s/%s", group, item);
    if (H5Lexists(file, group, H5P_DEFAULT) <= 0 || H5Lexists(file, name, H5P_DEFAULT) <= 0)
        return set;
    snprintf(name, size, "%s/%s/b%" PRId32, group, item, budget);
    if (H5Lexists(file, name, H5P_DEFAULT) > 0) set = H5Dopen2(file, name, H5P_DEFAULT);
    return set;
}

kv_status kv_evict_read_span(const char *path, const char *item, int32_t budget,
                             const kv_span *span, int32_t *out) {
    kv_status st = KV_OK;
    hid_t file = -1, set = -1, type = -1, space = -1, memory = -1;
    char name[512];
    hsize_t shape[3] = {0};
    H5E_BEGIN_TRY { file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT); }
    H5E_END_TRY
    if (file < 0) KV_RAISE(KV_E_NOINPUT, "%s cannot be opened as an HDF5 file of decisions", path);
    H5E_BEGIN_TRY { set = open_item(file, item, budget, name, sizeof name); }
    H5E_END_TRY
    if (set < 0)
        KV_RAISE(KV_E_NOINPUT, "%s has no /evict_at/%s/b%" PRId32 "; list it with h5ls -r", path,
                 item, budget);
    type = H5Dget_type(set);
    space = H5Dget_space(set);
    if (H5Tget_class(type) != H5T_INTEGER || H5Sget_simple_extent_ndims(space) != 3)
        KV_RAISE(KV_E_DATA, "%s: %s is not an integer array [layer][kv_head][token]", path, name);
    H5Sget_simple_extent_dims(space, shape, NULL);
    if ((hsize_t)span->layer_index >= shape[0] || shape[1] != (hsize_t)span->n_kv_head ||
        (hsize_t)(span->first + span->n_token) > shape[2])
        KV_RAISE(KV_E_DATA,
                 "%s: %s has shape [%llu][%llu][%llu]; the trace needs layer index %d, %d KV heads "
                 "and tokens up to %lld: it belongs to another trace",
                 path, name, (unsigned long long)shape[0], (unsigned long long)shape[1],
                 (unsigned long long)shape[2], span->layer_index, span->n_kv_head,
                 (long long)(span->first + span->n_token));
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        hsize_t start[3] = {(hsize_t)span->layer_index, (hsize_t)h, (hsize_t)span->first};
        hsize_t count[3] = {1, 1, (hsize_t)span->n_token};
        if (memory < 0) memory = H5Screate_simple(3, count, NULL);
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL);
        if (H5Dread(set, H5T_NATIVE_INT32, memory, space, H5P_DEFAULT, out + h * span->stride) < 0)
            KV_RAISE(KV_E_IO, "%s: reading %s, KV head %d failed", path, name, h);
    }
out:
    if (memory >= 0) H5Sclose(memory);
    if (space >= 0) H5Sclose(space);
    if (type >= 0) H5Tclose(type);
    if (set >= 0) H5Dclose(set);
    if (file >= 0) H5Fclose(file);
    return st;
}
