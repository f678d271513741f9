/* From an HDF5 file to the plain description that trace_check.c judges: metadata only, no data set is read. */
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "traces/trace_file.h"

static const struct {
    size_t size, exponent_at, exponent, mantissa, bias;
    kv_element element;
} float_format[] = {{2, 10, 5, 10, 15, KV_EL_F16},
                    {2, 7, 8, 7, 127, KV_EL_BF16},
                    {4, 23, 8, 23, 127, KV_EL_F32},
                    {8, 52, 11, 52, 1023, KV_EL_F64}};

static kv_element element_of(hid_t type) {
    H5T_class_t class = H5Tget_class(type);
    if (class == H5T_INTEGER) return H5Tget_size(type) <= 8 ? KV_EL_INT : KV_EL_OTHER;
    if (class != H5T_FLOAT) return KV_EL_OTHER;
    size_t sign, exponent_at, exponent, mantissa_at, mantissa;
    if (H5Tget_fields(type, &sign, &exponent_at, &exponent, &mantissa_at, &mantissa) < 0 ||
        H5Tget_norm(type) != H5T_NORM_IMPLIED || mantissa_at != 0)
        return KV_EL_OTHER;
    for (size_t i = 0; i < sizeof float_format / sizeof *float_format; i++)
        if (H5Tget_size(type) == float_format[i].size && sign == 8 * float_format[i].size - 1 &&
            exponent_at == float_format[i].exponent_at && exponent == float_format[i].exponent &&
            mantissa == float_format[i].mantissa && H5Tget_ebias(type) == float_format[i].bias)
            return float_format[i].element;
    return KV_EL_OTHER;
}

static void describe_filters(hid_t creation, kv_found *f) {
    f->n_filter = H5Pget_nfilters(creation);
    for (int i = 0; i < f->n_filter && i < KV_FOUND_FILTERS; i++) {
        unsigned flags, config;
        size_t n_value = 0;
        H5Z_filter_t id =
            H5Pget_filter2(creation, (unsigned)i, &flags, &n_value, NULL, 0, NULL, &config);
        f->filter[i] = id;
        if (id < 0 || H5Zfilter_avail(id) <= 0) f->filter_missing |= 1u << i;
    }
}

static kv_status describe_storage(hid_t set, hid_t space, hid_t creation, kv_found *f) {
    kv_status st = KV_OK;
    hsize_t dim[H5S_MAX_RANK] = {0};
    f->n_dim = H5Sget_simple_extent_ndims(space);
    if (f->n_dim < 0 || H5Sget_simple_extent_dims(space, dim, NULL) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: shape cannot be read", f->path);
    for (int32_t i = 0; i < f->n_dim && i < KV_FOUND_DIMS; i++)
        f->dim[i] = dim[i] > INT64_MAX ? INT64_MAX : (int64_t)dim[i];
    f->n_external = H5Pget_external_count(creation);
    H5D_layout_t layout = H5Pget_layout(creation);
    f->layout = layout == H5D_CHUNKED      ? KV_CHUNKED
                : layout == H5D_CONTIGUOUS ? KV_CONTIGUOUS
                                           : KV_OTHER_LAYOUT;
    if (f->layout == KV_CONTIGUOUS) f->bytes_stored = (int64_t)H5Dget_storage_size(set);
    if (f->layout != KV_CHUNKED || f->n_dim > KV_FOUND_DIMS) goto out;
    hsize_t chunks = 0;
    if (H5Pget_chunk(creation, f->n_dim, dim) < 0 || H5Dget_num_chunks(set, space, &chunks) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: chunks cannot be read", f->path);
    for (int32_t i = 0; i < f->n_dim; i++) f->chunk[i] = (int64_t)dim[i];
    f->chunks_written = (int64_t)chunks;
    describe_filters(creation, f);
out:
    return st;
}

/* Opens `name` below `group` if it is a hard link; *object stays -1 otherwise and *presence says why. */
static kv_status open_hard(hid_t group, const char *path, const char *name, hid_t *object,
                           kv_presence *presence) {
    kv_status st = KV_OK;
    H5L_info_t link;
    *object = -1;
    *presence = KV_ABSENT;
    htri_t exists = H5Lexists(group, name, H5P_DEFAULT);
    if (exists < 0) KV_H5_RAISE(KV_E_DATA, "%s: cannot be looked up", path);
    if (!exists) goto out;
    if (H5Lget_info(group, name, &link, H5P_DEFAULT) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: cannot be looked up", path);
    *presence = KV_LINKED;
    if (link.type != H5L_TYPE_HARD) goto out;
    KV_H5_TRY(*object, H5Oopen(group, name, H5P_DEFAULT), KV_E_DATA, "%s: cannot be opened", path);
    *presence = H5Iget_type(*object) == H5I_DATASET ? KV_DATASET : KV_NOT_DATASET;
out:
    return st;
}

kv_status kv_found_describe(hid_t group, const char *group_path, const char *name, kv_found *f) {
    kv_status st = KV_OK;
    hid_t set = -1, space = -1, type = -1, creation = -1;
    size_t size = strlen(group_path) + strlen(name) + 2;
    *f = (kv_found){0};
    KV_NEW(f->path, size);
    snprintf(f->path, size, "%s/%s", strcmp(group_path, "/") == 0 ? "" : group_path, name);
    KV_TRY(open_hard(group, f->path, name, &set, &f->presence));
    if (f->presence != KV_DATASET) goto out;
    KV_H5_TRY(space, H5Dget_space(set), KV_E_DATA, "%s: has no shape", f->path);
    KV_H5_TRY(type, H5Dget_type(set), KV_E_DATA, "%s: has no type", f->path);
    KV_H5_TRY(creation, H5Dget_create_plist(set), KV_E_DATA, "%s: has no layout", f->path);
    f->element = element_of(type);
    f->element_size = (int32_t)H5Tget_size(type);
    KV_TRY(describe_storage(set, space, creation, f));
out:
    kv_h5_close(creation);
    kv_h5_close(type);
    kv_h5_close(space);
    kv_h5_close(set);
    return st;
}

/* Names of the links in a group, in name order. */
static kv_status list_links(hid_t group, const char *path, char ***name, int32_t *n) {
    enum { MOST = 1 << 20 };
    kv_status st = KV_OK;
    H5G_info_t info;
    *name = NULL;
    *n = 0;
    if (H5Gget_info(group, &info) < 0) KV_H5_RAISE(KV_E_DATA, "%s: cannot be listed", path);
    if (info.nlinks > MOST)
        KV_RAISE(KV_E_DATA, "%s holds %llu objects, at most %d are read", path,
                 (unsigned long long)info.nlinks, MOST);
    KV_NEW(*name, info.nlinks);
    for (hsize_t i = 0; i < info.nlinks; i++) {
        ssize_t length =
            H5Lget_name_by_idx(group, ".", H5_INDEX_NAME, H5_ITER_INC, i, NULL, 0, H5P_DEFAULT);
        if (length < 0 || length > 4096) KV_H5_RAISE(KV_E_DATA, "%s: cannot be listed", path);
        KV_NEW((*name)[i], length + 1);
        (*n)++;
        if (H5Lget_name_by_idx(group, ".", H5_INDEX_NAME, H5_ITER_INC, i, (*name)[i],
                               (size_t)length + 1, H5P_DEFAULT) < 0)
            KV_H5_RAISE(KV_E_DATA, "%s: cannot be listed", path);
    }
out:
    return st;
}

static void free_names(char **name, int32_t n) {
    for (int32_t i = 0; name && i < n; i++) free(name[i]);
    free(name);
}

static kv_status describe_scores(hid_t group, kv_found_request *r) {
    kv_status st = KV_OK;
    hid_t scores = -1;
    kv_presence presence;
    char path[512], **name = NULL;
    int32_t n = 0;
    snprintf(path, sizeof path, "%.480s/score", r->path);
    KV_TRY(open_hard(group, path, "score", &scores, &presence));
    if (scores < 0 || H5Iget_type(scores) != H5I_GROUP) goto out;
    KV_TRY(list_links(scores, path, &name, &n));
    KV_NEW(r->score, n);
    for (int32_t i = 0; i < n; i++) {
        r->n_score++;
        KV_TRY(kv_found_describe(scores, path, name[i], &r->score[i]));
    }
out:
    free_names(name, n);
    kv_h5_close(scores);
    return st;
}

static kv_status describe_request(hid_t group, kv_found_request *r) {
    kv_status st = KV_OK;
    for (int32_t i = 0; i < KV_REQUEST_ITEMS; i++)
        KV_TRY(kv_found_describe(group, r->path, kv_request_item_name[i], &r->item[i]));
    KV_TRY(describe_scores(group, r));
out:
    return st;
}

/* Every group below /requests is a request; anything else there is ignored. */
static kv_status describe_requests(hid_t file, kv_trace_desc *d) {
    kv_status st = KV_OK;
    hid_t requests = -1, group = -1;
    kv_presence presence;
    char **name = NULL;
    int32_t n = 0;
    KV_TRY(open_hard(file, "/requests", "requests", &requests, &presence));
    if (requests < 0 || H5Iget_type(requests) != H5I_GROUP)
        KV_RAISE(KV_E_DATA, "/requests is missing or not a group; a trace keeps its tensors there");
    KV_TRY(list_links(requests, "/requests", &name, &n));
    KV_NEW(d->request, n);
    for (int32_t i = 0; i < n; i++) {
        kv_found_request *r = &d->request[d->n_request];
        size_t size = strlen(name[i]) + 16;
        kv_h5_close(group);
        KV_TRY(open_hard(requests, name[i], name[i], &group, &presence));
        if (group < 0 || H5Iget_type(group) != H5I_GROUP) continue;
        d->n_request++;
        KV_NEW(r->path, size);
        snprintf(r->path, size, "/requests/%s", name[i]);
        KV_TRY(describe_request(group, r));
    }
out:
    free_names(name, n);
    kv_h5_close(group);
    kv_h5_close(requests);
    return st;
}

static kv_status describe_model(hid_t file, kv_trace_desc *d) {
    kv_status st = KV_OK;
    hid_t model = -1;
    kv_presence presence;
    KV_TRY(open_hard(file, "/model", "model", &model, &presence));
    if (model < 0 || H5Iget_type(model) != H5I_GROUP)
        KV_RAISE(KV_E_DATA, "/model is missing or not a group; a trace keeps its attributes there");
    for (int32_t i = 0; i < KV_MODEL_ATTRIBUTES; i++) {
        kv_h5_number x;
        KV_TRY(kv_h5_get_number(model, "/model", kv_model_attribute_name[i], &x));
        d->attribute[i] = (kv_found_attribute){x.present, x.whole, x.value};
    }
    KV_TRY(kv_h5_get_text(model, "/model", "rope_kind", &d->rope_kind));
    for (int32_t i = 0; i < KV_MODEL_ITEMS; i++) {
        const char *name = strrchr(kv_model_item_path[i], '/') + 1;
        bool below_model = strncmp(kv_model_item_path[i], "/model/", 7) == 0;
        KV_TRY(kv_found_describe(below_model ? model : file, below_model ? "/model" : "/", name,
                                 &d->model[i]));
    }
out:
    kv_h5_close(model);
    return st;
}

kv_status kv_trace_describe(hid_t file, const char *path, kv_trace_desc *out) {
    kv_status st = KV_OK;
    *out = (kv_trace_desc){.file = path};
    KV_TRY(kv_h5_get_text(file, "/", "Conventions", &out->conventions));
    if (!out->conventions) goto out; /* not a trace: the check says so */
    KV_TRY(kv_h5_get_reals(file, "/", "schema_version", 3, &out->has_version, out->version));
    KV_TRY(describe_model(file, out));
    KV_TRY(describe_requests(file, out));
out:
    return st == KV_OK ? st : kv_error_context(st, "%s", path);
}

void kv_trace_desc_free(kv_trace_desc *d) {
    for (int32_t i = 0; i < d->n_request; i++) {
        kv_found_request *r = &d->request[i];
        for (int32_t j = 0; j < KV_REQUEST_ITEMS; j++) free(r->item[j].path);
        for (int32_t j = 0; j < r->n_score; j++) free(r->score[j].path);
        free(r->score);
        free(r->path);
    }
    for (int32_t i = 0; i < KV_MODEL_ITEMS; i++) free(d->model[i].path);
    free(d->request);
    free(d->conventions);
    free(d->rope_kind);
    *d = (kv_trace_desc){0};
}
