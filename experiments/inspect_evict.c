/* Describes a file of decisions: every /evict_at/<item>/b<budget>. */
#include <stdlib.h>
#include <string.h>

#include "experiments/inspect.h"
#include "reference/core/mem.h"
#include "reference/core/param.h"
#include "traces/trace_file.h"

typedef struct listing {
    const char *path;
    bool deep;
    FILE *out;
    kv_status st;
} listing;

/* Decisions must lie after their token; returns the share of tokens that ever leave. */
static kv_status check_decisions(const char *path, const char *item, int32_t budget,
                                 const kv_found *f, double *leaving) {
    kv_status st = KV_OK;
    int64_t lanes = f->dim[0] * f->dim[1], n = f->dim[2], left = 0;
    int32_t *e = NULL;
    KV_NEW(e, lanes * n);
    KV_TRY(kv_evict_read(path, item, budget, (int32_t)f->dim[0], (int32_t)f->dim[1], n, e));
    for (int64_t i = 0; i < lanes * n; i++) {
        if (e[i] <= i % n)
            KV_RAISE(KV_E_DATA,
                     "%s: %s[%lld][%lld][%lld] is %d; a token leaves after its own position", path,
                     f->path, (long long)(i / n / f->dim[1]), (long long)(i / n % f->dim[1]),
                     (long long)(i % n), e[i]);
        left += e[i] != KV_NEVER;
    }
    *leaving = (double)left / (double)(lanes * n);
out:
    free(e);
    return st;
}

/* A name as decisions have it: "<policy>[:<variant>]/b<budget>". */
static bool names_decisions(const char *name, long long *budget) {
    const char *last = strrchr(name, '/');
    const bool yes =
        last && last[1] == 'b' && kv_parse_int(last + 2, 1, INT32_MAX, budget) == KV_OK;
    if (!yes) kv_error_clear();
    return yes;
}

static kv_status describe(hid_t group, const char *name, listing *l) {
    kv_status st = KV_OK;
    kv_found f = {0};
    char item[1024];
    long long budget;
    double leaving = 0;
    const bool named = names_decisions(name, &budget);
    KV_TRY(kv_found_describe(group, "/evict_at", name, &f));
    if (f.presence != KV_DATASET && !named) goto out;
    KV_TRY(kv_found_check(l->path, &f));
    const char *last = strrchr(name, '/');
    if (!named || f.presence != KV_DATASET || last - name >= (long)sizeof item || f.n_dim != 3 ||
        f.element != KV_EL_INT || f.dim[0] < 1 || f.dim[1] < 1 || f.dim[2] < 1)
        KV_RAISE(KV_E_DATA,
                 "%s: %s is not /evict_at/<policy>[:<variant>]/b<budget>, integers "
                 "[layer][kv_head][token]",
                 l->path, f.path);
    snprintf(item, sizeof item, "%.*s", (int)(last - name), name);
    fprintf(l->out, "decisions  %s, budget %lld: %lld layers, %lld KV heads, %lld tokens", item,
            budget, (long long)f.dim[0], (long long)f.dim[1], (long long)f.dim[2]);
    if (l->deep) {
        st = check_decisions(l->path, item, (int32_t)budget, &f, &leaving);
        if (st == KV_OK) fprintf(l->out, "; %.2f %% of the tokens leave", 100 * leaving);
    }
    fprintf(l->out, "\n");
out:
    free(f.path);
    return st;
}

static herr_t visit(hid_t group, const char *name, const H5L_info_t *info, void *context) {
    listing *l = context;
    long long budget;
    if (info->type == H5L_TYPE_HARD)
        l->st = describe(group, name, l);
    else if (names_decisions(name, &budget))
        l->st = KV_FAIL(KV_E_DATA, "%s: /evict_at/%s is a link, expected the data set itself",
                        l->path, name);
    return l->st == KV_OK ? 0 : -1;
}

kv_status kv_inspect_evict(const char *path, bool deep, FILE *out) {
    kv_status st = KV_OK;
    hid_t file = -1;
    listing l = {.path = path, .deep = deep, .out = out};
    KV_TRY(kv_h5_open(path, &file));
    fprintf(out, "file       %s: decisions of policies, positions at which tokens leave\n", path);
    herr_t visited =
        H5Lvisit_by_name(file, "/evict_at", H5_INDEX_NAME, H5_ITER_INC, visit, &l, H5P_DEFAULT);
    KV_TRY(l.st);
    if (visited < 0) KV_H5_RAISE(KV_E_DATA, "%s: /evict_at cannot be listed", path);
out:
    kv_h5_close(file);
    return st;
}
