/* HDF5 errors, files, attributes and the two half-width float types that HDF5 1.10 does not predefine. */
#include "traces/h5.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "reference/core/mem.h"
#include "traces/output.h"

void kv_h5_begin(void) {
    /* After a failed write (a full disk) HDF5's exit handler crashes on what it could not close. Everything is closed without it. */
    H5dont_atexit();
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    H5Eclear2(H5E_DEFAULT);
}

bool kv_h5_close(hid_t id) { return id < 0 || H5Idec_ref(id) >= 0; }

enum { REASON = 1200 };

static herr_t keep_first(unsigned n, const H5E_error2_t *error, void *text) {
    if (n == 0 && error->desc) snprintf(text, REASON, "%s", error->desc);
    return 0;
}

/* "file write failed: time = ..., filename = ..., error message = 'No space left on device', ..." says more than fits a line. */
static void shorten(char *reason) {
    char *details = strstr(reason, ": time = ");
    const char *said = details ? strstr(details, "error message = '") : NULL;
    if (!details) return;
    if (said) {
        said += strlen("error message = '");
        size_t n = strcspn(said, "'");
        memmove(details + 2, said, n);
        details[2 + n] = '\0';
    } else {
        *details = '\0';
    }
}

kv_status kv_h5_fail_at(const char *file, int line, kv_status code, const char *format, ...) {
    char reason[REASON] = "", message[1500];
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first, reason);
    shorten(reason);
    H5Eclear2(H5E_DEFAULT);
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return kv_fail_at(file, line, code, reason[0] ? "%s (HDF5: %s)" : "%s%s", message, reason);
}

kv_status kv_h5_open(const char *path, hid_t *file) {
    kv_status st = KV_OK;
    hid_t access_list = -1;
    *file = -1;
    kv_h5_begin();
    if (access(path, R_OK) != 0)
        KV_RAISE(KV_E_NOINPUT, "%s: cannot be read: %s; check the path", path, strerror(errno));
    KV_H5_TRY(access_list, H5Pcreate(H5P_FILE_ACCESS), KV_E_INTERNAL, "%s: no property list", path);
    /* A damaged file makes HDF5 leak identifiers on its error paths; closing the file then closes them too. */
    H5Pset_fclose_degree(access_list, H5F_CLOSE_STRONG);
    KV_H5_TRY(*file, H5Fopen(path, H5F_ACC_RDONLY, access_list), KV_E_DATA,
              "%s: is not a readable HDF5 file; it may be truncated or of another format", path);
out:
    kv_h5_close(access_list);
    return st;
}

hid_t kv_h5_creation(hid_t property_class) {
    hid_t list = H5Pcreate(property_class);
    if (list >= 0) H5Pset_obj_track_times(list, 0);
    return list;
}

hid_t kv_h5_chunked(int n_dim, const hsize_t *chunk) {
    hid_t list = kv_h5_creation(H5P_DATASET_CREATE);
    if (list >= 0 && H5Pset_chunk(list, n_dim, chunk) >= 0 && H5Pset_shuffle(list) >= 0 &&
        H5Pset_deflate(list, 1) >= 0 && H5Pset_fletcher32(list) >= 0)
        return list;
    kv_h5_close(list);
    return -1;
}

kv_status kv_h5_create(const char *path, char **temporary, hid_t *file) {
    kv_status st = KV_OK;
    hid_t creation = -1, access_list = -1;
    *file = -1;
    kv_h5_begin();
    KV_TRY(kv_output_begin(path, temporary));
    KV_H5_TRY(creation, kv_h5_creation(H5P_FILE_CREATE), KV_E_INTERNAL, "%s: no property list",
              path);
    KV_H5_TRY(access_list, H5Pcreate(H5P_FILE_ACCESS), KV_E_INTERNAL, "%s: no property list", path);
    H5Pset_libver_bounds(access_list, H5F_LIBVER_V18, H5F_LIBVER_V110);
    H5Pset_fclose_degree(access_list, H5F_CLOSE_STRONG);
    errno = 0;
    *file = H5Fcreate(*temporary, H5F_ACC_TRUNC, creation, access_list);
    if (*file < 0)
        KV_RAISE(KV_E_CANTCREATE, "%s: cannot be created: %s; check the folder and its permissions",
                 path, errno ? strerror(errno) : "HDF5 refused");
out:
    kv_h5_close(creation);
    kv_h5_close(access_list);
    return st;
}

kv_status kv_h5_publish(hid_t *file, const char *temporary, const char *path) {
    kv_status st = KV_OK;
    herr_t flushed = H5Fflush(*file, H5F_SCOPE_GLOBAL);
    herr_t closed = flushed < 0 ? -1 : H5Fclose(*file);
    if (closed < 0) KV_H5_RAISE(KV_E_IO, "%s: writing failed; is the disk full?", path);
    *file = -1;
    if (rename(temporary, path) != 0)
        KV_RAISE(KV_E_CANTCREATE, "%s: cannot be created from %s: %s", path, temporary,
                 strerror(errno));
out:
    return st;
}

/* Attribute, its type and number of elements; *attribute stays -1 when it is absent or empty. */
static kv_status open_attribute(hid_t loc, const char *object, const char *name, hid_t *attribute,
                                hid_t *type, hssize_t *n) {
    kv_status st = KV_OK;
    hid_t space = -1;
    *attribute = *type = -1;
    *n = 0;
    htri_t exists = H5Aexists(loc, name);
    if (exists < 0) KV_H5_RAISE(KV_E_DATA, "%s: attribute %s cannot be looked up", object, name);
    if (!exists) goto out;
    KV_H5_TRY(*attribute, H5Aopen(loc, name, H5P_DEFAULT), KV_E_DATA,
              "%s: attribute %s cannot be opened", object, name);
    KV_H5_TRY(*type, H5Aget_type(*attribute), KV_E_DATA, "%s: attribute %s has no type", object,
              name);
    KV_H5_TRY(space, H5Aget_space(*attribute), KV_E_DATA, "%s: attribute %s has no shape", object,
              name);
    *n = H5Sget_simple_extent_npoints(space);
    if (*n <= 0) {
        kv_h5_close(*attribute);
        *attribute = -1;
    }
out:
    kv_h5_close(space);
    return st;
}

static bool is_number(H5T_class_t class) {
    return class == H5T_INTEGER || class == H5T_FLOAT || class == H5T_ENUM; /* booleans of h5py */
}

kv_status kv_h5_get_number(hid_t loc, const char *object, const char *name, kv_h5_number *out) {
    kv_status st = KV_OK;
    hid_t attribute, type;
    hssize_t n;
    *out = (kv_h5_number){0};
    KV_TRY(open_attribute(loc, object, name, &attribute, &type, &n));
    if (attribute < 0) goto out;
    H5T_class_t class = H5Tget_class(type);
    if (n != 1 || !is_number(class))
        KV_RAISE(KV_E_DATA, "%s: attribute %s must be one number", object, name);
    if (H5Aread(attribute, H5T_NATIVE_DOUBLE, &out->value) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: attribute %s cannot be read", object, name);
    out->whole = class != H5T_FLOAT || out->value == floor(out->value);
    if (class != H5T_FLOAT && H5Aread(attribute, H5T_NATIVE_UINT64, &out->bits) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: attribute %s cannot be read", object, name);
    out->present = true;
out:
    kv_h5_close(attribute);
    kv_h5_close(type);
    return st;
}

kv_status kv_h5_get_reals(hid_t loc, const char *object, const char *name, size_t n, bool *present,
                          double *out) {
    kv_status st = KV_OK;
    hid_t attribute, type;
    hssize_t found;
    *present = false;
    KV_TRY(open_attribute(loc, object, name, &attribute, &type, &found));
    if (attribute < 0) goto out;
    if ((size_t)found != n || !is_number(H5Tget_class(type)))
        KV_RAISE(KV_E_DATA, "%s: attribute %s must hold %zu numbers, it has %lld elements", object,
                 name, n, (long long)found);
    if (H5Aread(attribute, H5T_NATIVE_DOUBLE, out) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: attribute %s cannot be read", object, name);
    *present = true;
out:
    kv_h5_close(attribute);
    kv_h5_close(type);
    return st;
}

kv_status kv_h5_get_text(hid_t loc, const char *object, const char *name, char **out) {
    enum { LONGEST = 1 << 20 };
    kv_status st = KV_OK;
    hid_t attribute, type, space = -1;
    hssize_t n;
    char *variable = NULL;
    *out = NULL;
    KV_TRY(open_attribute(loc, object, name, &attribute, &type, &n));
    if (attribute < 0) goto out;
    if (H5Tget_class(type) != H5T_STRING || n != 1)
        KV_RAISE(KV_E_DATA, "%s: attribute %s must be one string", object, name);
    if (H5Tis_variable_str(type) > 0) {
        KV_H5_TRY(space, H5Aget_space(attribute), KV_E_DATA, "%s: attribute %s has no shape",
                  object, name);
        if (H5Aread(attribute, type, &variable) < 0)
            KV_H5_RAISE(KV_E_DATA, "%s: attribute %s cannot be read", object, name);
        *out = kv_strdup(variable ? variable : "");
        H5Dvlen_reclaim(type, space, H5P_DEFAULT, &variable);
        if (!*out) KV_TRY(KV_E_INTERNAL);
        goto out;
    }
    size_t size = H5Tget_size(type);
    if (size == 0 || size > LONGEST)
        KV_RAISE(KV_E_DATA, "%s: attribute %s has %zu bytes, at most %d are read", object, name,
                 size, LONGEST);
    KV_NEW(*out, size + 1);
    if (H5Aread(attribute, type, *out) < 0)
        KV_H5_RAISE(KV_E_DATA, "%s: attribute %s cannot be read", object, name);
    if (H5Tget_strpad(type) == H5T_STR_SPACEPAD)
        while (size && (*out)[size - 1] == ' ') (*out)[--size] = '\0';
out:
    if (st != KV_OK) {
        free(*out);
        *out = NULL;
    }
    kv_h5_close(attribute);
    kv_h5_close(type);
    kv_h5_close(space);
    return st;
}

kv_status kv_h5_put(hid_t loc, const char *name, hid_t file_type, hid_t memory_type, size_t n,
                    const void *value) {
    kv_status st = KV_OK;
    hid_t attribute = -1;
    hsize_t dim = n;
    hid_t space = n ? H5Screate_simple(1, &dim, NULL) : H5Screate(H5S_SCALAR);
    KV_H5_TRY(attribute, H5Acreate2(loc, name, file_type, space, H5P_DEFAULT, H5P_DEFAULT), KV_E_IO,
              "attribute %s cannot be created", name);
    if (H5Awrite(attribute, memory_type, value) < 0)
        KV_H5_RAISE(KV_E_IO, "attribute %s cannot be written", name);
out:
    kv_h5_close(attribute);
    kv_h5_close(space);
    return st;
}

kv_status kv_h5_put_text(hid_t loc, const char *name, const char *text) {
    size_t size = strlen(text);
    hid_t type = H5Tcopy(H5T_C_S1);
    H5Tset_size(type, size ? size : 1);
    H5Tset_cset(type, H5T_CSET_UTF8);
    H5Tset_strpad(type, H5T_STR_NULLPAD);
    kv_status st = kv_h5_put(loc, name, type, type, 0, text);
    kv_h5_close(type);
    return st;
}

hid_t kv_h5_float_type(kv_dtype type) {
    if (type == KV_F32) return H5Tcopy(H5T_IEEE_F32LE);
    /* From f32: first shrink the fields, then the size. sign, exponent at, wide, mantissa at, wide */
    hid_t id = H5Tcopy(H5T_IEEE_F32LE);
    herr_t ok =
        type == KV_F16 ? H5Tset_fields(id, 15, 10, 5, 0, 10) : H5Tset_fields(id, 15, 7, 8, 0, 7);
    if (ok < 0 || H5Tset_size(id, 2) < 0 || H5Tset_ebias(id, type == KV_F16 ? 15 : 127) < 0) {
        kv_h5_close(id);
        return -1;
    }
    return id;
}
