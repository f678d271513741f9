/* Changes to HDF5 files, one at a time. */
#include "tests/naive/mutate_hdf5.h"

#include <hdf5.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static hid_t float_type(size_t exponent, size_t mantissa, size_t bias) {
    hid_t t = H5Tcopy(H5T_IEEE_F32LE);
    H5Tset_fields(t, 15, mantissa, exponent, 0, mantissa);
    H5Tset_size(t, 2);
    H5Tset_ebias(t, bias);
    return t;
}

static hid_t make_type(element_type e) {
    switch (e) {
    case I8: return H5Tcopy(H5T_STD_I8LE);
    case I32: return H5Tcopy(H5T_STD_I32LE);
    case I64: return H5Tcopy(H5T_STD_I64LE);
    case U8: return H5Tcopy(H5T_STD_U8LE);
    case F16: return float_type(5, 10, 15);
    case BF16: return float_type(8, 7, 127);
    case F32: return H5Tcopy(H5T_IEEE_F32LE);
    case F64: return H5Tcopy(H5T_IEEE_F64LE);
    case I32_BIG: return H5Tcopy(H5T_STD_I32BE);
    case STRING: return H5Tcopy(H5T_C_S1);
    case F16_BIG: break;
    }
    hid_t t = float_type(5, 10, 15);
    H5Tset_order(t, H5T_ORDER_BE);
    return t;
}

static hid_t creation_list(const mutation *m, int n, const hsize_t *dim) {
    hid_t p = H5Pcreate(H5P_DATASET_CREATE);
    hsize_t chunk[5];
    for (int i = 0; i < n; i++) chunk[i] = i == 0 ? 1 : dim[i] > 8 ? 8 : dim[i];
    if (n == 1) chunk[0] = dim[0];
    switch (m->store) {
    case CONTIGUOUS: break;
    case COMPACT: H5Pset_layout(p, H5D_COMPACT); break;
    case EXTERNAL_FILE: H5Pset_external(p, "outside.bin", 0, H5F_UNLIMITED); break;
    case VIRTUAL: {
        hid_t s = H5Screate_simple(n, dim, NULL);
        H5Pset_virtual(p, s, "elsewhere.h5", "x", s);
        H5Sclose(s);
        break;
    }
    case UNKNOWN_FILTER: /* optional, so that writing works without it */
        H5Pset_chunk(p, n, chunk);
        H5Pset_filter(p, 31999, H5Z_FLAG_OPTIONAL, 0, NULL);
        break;
    case HUGE_CHUNK:
        for (int i = 0; i < n; i++) chunk[i] = i ? 1 : 100 << 20;
        H5Pset_chunk(p, n, chunk);
        break;
    case UNWRITTEN:
    case HALF_WRITTEN:
    case NO_FILTER_CHUNKED: H5Pset_chunk(p, n, chunk); break;
    case CHUNKED:
        H5Pset_chunk(p, n, chunk);
        H5Pset_deflate(p, 4);
        break;
    }
    return p;
}

static int write_set(hid_t file, const mutation *m, const char *path, int n, const hsize_t *dim,
                     const double *value) {
    hsize_t most[5], start[5] = {0}, count[5];
    for (int i = 0; i < n; i++) {
        most[i] = m->store == HUGE_CHUNK ? H5S_UNLIMITED : dim[i];
        count[i] = i ? dim[i] : 1;
    }
    hid_t space = H5Screate_simple(n, dim, most), type = make_type(m->type);
    hid_t list = creation_list(m, n, dim);
    hid_t set = H5Dcreate2(file, path, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    int ok = set < 0 ? -1 : 0;
    if (m->store == HALF_WRITTEN)
        H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL);
    bool skip =
        m->store == UNWRITTEN || m->store == HUGE_CHUNK || m->store == VIRTUAL || m->type == STRING;
    hid_t memory = m->store == HALF_WRITTEN ? H5Screate_simple(n, count, NULL) : H5Scopy(space);
    if (!ok && !skip && H5Dwrite(set, H5T_NATIVE_DOUBLE, memory, space, H5P_DEFAULT, value) < 0)
        ok = -1;
    H5Sclose(memory);
    H5Dclose(set);
    H5Pclose(list);
    H5Tclose(type);
    H5Sclose(space);
    return ok;
}

static double *ones(size_t n) {
    double *x = malloc((n ? n : 1) * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = 1;
    return x;
}

static int replace(hid_t file, const mutation *m) {
    hsize_t dim[5];
    int n = 0;
    size_t elements = 1;
    for (; m->dim[n]; n++) {
        dim[n] = (hsize_t)m->dim[n];
        if (m->store != UNWRITTEN) elements *= (size_t)dim[n];
    }
    if (H5Lexists(file, m->object, H5P_DEFAULT) > 0) H5Ldelete(file, m->object, H5P_DEFAULT);
    double *value = ones(elements);
    int ok = write_set(file, m, m->object, n, dim, value);
    free(value);
    return ok;
}

static double *read_all(hid_t file, const char *object, int *n, hsize_t *dim, size_t *elements) {
    hid_t set = H5Dopen2(file, object, H5P_DEFAULT), space = H5Dget_space(set);
    if (set < 0 || space < 0 || H5Sget_simple_extent_ndims(space) > 5) {
        H5Sclose(space);
        H5Dclose(set);
        return NULL;
    }
    *n = H5Sget_simple_extent_ndims(space);
    H5Sget_simple_extent_dims(space, dim, NULL);
    *elements = (size_t)H5Sget_simple_extent_npoints(space);
    double *value = ones(*elements);
    H5Dread(set, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, value);
    H5Sclose(space);
    H5Dclose(set);
    return value;
}

static int convert(hid_t file, const mutation *m) {
    hsize_t dim[5];
    size_t elements;
    int n;
    double *value = read_all(file, m->object, &n, dim, &elements);
    if (!value) return -1;
    H5Ldelete(file, m->object, H5P_DEFAULT);
    int ok = write_set(file, m, m->object, n, dim, value);
    free(value);
    return ok;
}

static int write_one(hid_t file, const mutation *m) {
    hsize_t dim[5];
    size_t elements;
    int n;
    double *value = read_all(file, m->object, &n, dim, &elements);
    if (!value || !elements) {
        free(value);
        return -1;
    }
    value[(size_t)m->index % elements] = m->number;
    hid_t set = H5Dopen2(file, m->object, H5P_DEFAULT);
    int ok = H5Dwrite(set, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, value) < 0 ? -1 : 0;
    H5Dclose(set);
    free(value);
    return ok;
}

static int set_attribute(hid_t object, const mutation *m) {
    hid_t scalar = H5Screate(H5S_SCALAR), type, memory;
    long long whole = fabs(m->number) < 1e18 ? (long long)m->number : 0;
    signed char truth = 1;
    const void *value = &m->number;
    if (m->kind == SET_INT) {
        type = H5Tcopy(H5T_STD_I64LE), memory = H5Tcopy(H5T_NATIVE_LLONG), value = &whole;
    } else if (m->kind == SET_REAL) {
        type = H5Tcopy(H5T_IEEE_F32LE), memory = H5Tcopy(H5T_NATIVE_DOUBLE);
    } else if (m->kind == SET_BOOL) {
        type = H5Tenum_create(H5T_STD_I8LE);
        signed char off = 0, on = 1;
        H5Tenum_insert(type, "FALSE", &off);
        H5Tenum_insert(type, "TRUE", &on);
        memory = H5Tcopy(type), value = &truth;
    } else {
        type = H5Tcopy(H5T_C_S1);
        H5Tset_size(type, H5T_VARIABLE);
        H5Tset_cset(type, H5T_CSET_UTF8);
        memory = H5Tcopy(type), value = &m->text;
    }
    if (H5Aexists(object, m->name) > 0) H5Adelete(object, m->name);
    hid_t a = H5Acreate2(object, m->name, type, scalar, H5P_DEFAULT, H5P_DEFAULT);
    int ok = H5Awrite(a, memory, value) < 0 ? -1 : 0;
    H5Aclose(a);
    H5Tclose(type);
    H5Tclose(memory);
    H5Sclose(scalar);
    return ok;
}

static int set_version(hid_t file, const mutation *m) {
    unsigned version[3];
    hid_t a = H5Aopen(file, "schema_version", H5P_DEFAULT);
    H5Aread(a, H5T_NATIVE_UINT, version);
    version[m->index % 3] = m->number >= 0 && m->number < 1e9 ? (unsigned)m->number : 0;
    int ok = H5Awrite(a, H5T_NATIVE_UINT, version) < 0 ? -1 : 0;
    H5Aclose(a);
    return ok;
}

static int relink(hid_t file, const mutation *m) {
    if (m->kind == EXTERNAL_LINK) {
        H5Ldelete(file, m->object, H5P_DEFAULT);
        return H5Lcreate_external("other.h5", "/x", file, m->object, H5P_DEFAULT, H5P_DEFAULT) < 0;
    }
    H5Lmove(file, m->object, file, "/moved", H5P_DEFAULT, H5P_DEFAULT);
    return H5Lcreate_soft("/moved", file, m->object, H5P_DEFAULT, H5P_DEFAULT) < 0 ? -1 : 0;
}

static int make_group(hid_t file, const mutation *m) {
    if (H5Lexists(file, m->object, H5P_DEFAULT) > 0) H5Ldelete(file, m->object, H5P_DEFAULT);
    hid_t g = H5Gcreate2(file, m->object, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    return H5Gclose(g) < 0 ? -1 : 0;
}

int mutate(const char *path, const mutation *m) {
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT), object = -1;
    int ok = file < 0 ? -1 : 0;
    char target[256] = "/requests/";
    switch (ok ? DROP + 100 : (int)m->kind) {
    case DROP_ATTRIBUTE:
        ok = H5Adelete_by_name(file, m->object, m->name, H5P_DEFAULT) < 0 ? -1 : 0;
        break;
    case SET_INT:
    case SET_REAL:
    case SET_TEXT:
    case SET_BOOL:
        object = H5Oopen(file, m->object, H5P_DEFAULT);
        ok = set_attribute(object, m);
        H5Oclose(object);
        break;
    case SET_VERSION: ok = set_version(file, m); break;
    case DROP: ok = H5Ldelete(file, m->object, H5P_DEFAULT) < 0 ? -1 : 0; break;
    case WRITE: ok = write_one(file, m); break;
    case REPLACE: ok = replace(file, m); break;
    case CONVERT: ok = convert(file, m); break;
    case SOFT_LINK:
    case EXTERNAL_LINK: ok = relink(file, m); break;
    case COPY_REQUEST:
        strncat(target, m->name, sizeof target - 16);
        ok = H5Ocopy(file, "/requests/r00000", file, target, H5P_DEFAULT, H5P_DEFAULT) < 0 ? -1 : 0;
        break;
    case MAKE_GROUP: ok = make_group(file, m); break;
    default: break;
    }
    if (file >= 0) H5Fclose(file);
    return ok;
}
