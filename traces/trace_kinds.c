/* Names of kinds: flag_meanings of each request, or the standard ones of contract.md 4. Requests that number their kinds differently
 * are brought to one numbering, so that pooled counts stand under the right names. */
#include <stdio.h>
#include <string.h>

#include "reference/core/mem.h"
#include "traces/trace_file.h"

static const char *const standard_kind[] = {"special",   "value",  "scratch", "name",
                                            "structure", "filler", "equation"};
enum { N_STANDARD_KIND = sizeof standard_kind / sizeof *standard_kind };

typedef struct names { /* by value; NULL: nameless */
    char *of[KV_MOST_KINDS];
} names;

static void names_free(names *n) {
    for (int32_t i = 0; i < KV_MOST_KINDS; i++) free(n->of[i]);
    *n = (names){0};
}

static kv_status set_name(names *n, int32_t at, const char *word) {
    free(n->of[at]);
    n->of[at] = kv_strdup(word);
    return n->of[at] ? KV_OK : KV_E_INTERNAL;
}

/* flag_meanings names the values flag_values (default 0, 1, …) of a data set, as CF conventions do. */
static kv_status read_meanings(const kv_trace *t, hid_t set, const char *path, char *meanings,
                               names *out) {
    kv_status st = KV_OK;
    char *word[KV_MOST_KINDS], *rest = NULL;
    double value[KV_MOST_KINDS];
    bool has_values;
    size_t n = 0;
    for (char *w = strtok_r(meanings, " ", &rest); w && n < KV_MOST_KINDS;
         w = strtok_r(NULL, " ", &rest))
        word[n++] = w;
    st = kv_h5_get_reals(set, path, "flag_values", n, &has_values, value);
    if (st != KV_OK) return kv_error_context(st, "%s", t->path);
    for (size_t i = 0; i < n; i++) {
        if (!has_values) value[i] = (double)i;
        if (!(value[i] >= 0 && value[i] < KV_MOST_KINDS))
            KV_RAISE(KV_E_DATA, "%s: %s attribute flag_values holds %g, expected 0..%d", t->path,
                     path, value[i], KV_MOST_KINDS - 1);
        KV_TRY(set_name(out, (int32_t)value[i], word[i]));
    }
out:
    return st;
}

static kv_status read_names(const kv_trace *t, int32_t request, names *out) {
    kv_status st = KV_OK;
    hid_t set = -1;
    char *meanings = NULL;
    const kv_found *f = &t->desc.request[request].item[KV_ITEM_KIND];
    if (t->kind) {
        KV_H5_TRY(set, H5Dopen2(t->file, f->path, H5P_DEFAULT), KV_E_DATA,
                  "%s: %s cannot be opened", t->path, f->path);
        st = kv_h5_get_text(set, f->path, "flag_meanings", &meanings);
        if (st != KV_OK) KV_TRY(kv_error_context(st, "%s", t->path));
    }
    if (meanings) KV_TRY(read_meanings(t, set, f->path, meanings, out));
    for (int32_t i = 0; !meanings && i < N_STANDARD_KIND; i++)
        KV_TRY(set_name(out, i, standard_kind[i]));
out:
    free(meanings);
    kv_h5_close(set);
    return st;
}

static bool same_name(const char *a, const char *b) { return a && b ? strcmp(a, b) == 0 : a == b; }

/* The value that `name` has in `all`, or a free one that now gets it; -1 when none is free or memory is short. taken: values that some
 * request uses without a name. */
static int32_t place(names *all, const bool *taken, const char *name) {
    int32_t room = -1;
    for (int32_t i = KV_MOST_KINDS - 1; i >= 0; i--) {
        if (all->of[i] && strcmp(all->of[i], name) == 0) return i;
        if (!all->of[i] && !taken[i]) room = i;
    }
    return room >= 0 && set_name(all, room, name) == KV_OK ? room : -1;
}

/* Renumbers the kinds of request r, whose names are `own`, to those of `all`. */
static kv_status renumber(kv_trace *t, int32_t r, const names *own, names *all, const bool *taken) {
    kv_status st = KV_OK;
    int32_t to[KV_MOST_KINDS];
    for (int32_t i = 0; i < KV_MOST_KINDS; i++) to[i] = -2; /* not met yet */
    for (int64_t x = t->request_first[r]; x < t->request_first[r + 1]; x++) {
        const uint8_t kind = t->kind[x];
        char number[16];
        snprintf(number, sizeof number, "%d", kind);
        if (to[kind] == -2)
            to[kind] = same_name(own->of[kind], all->of[kind])
                           ? kind
                           : place(all, taken, own->of[kind] ? own->of[kind] : number);
        if (to[kind] < 0)
            KV_RAISE(KV_E_DATA,
                     "%s: the requests name more than %d kinds of tokens; that is the most",
                     t->path, KV_MOST_KINDS);
        t->kind[x] = (uint8_t)to[kind];
    }
out:
    return st;
}

kv_status kv_trace_load_kinds(kv_trace *t) {
    kv_status st = KV_OK;
    const int32_t n = t->kind ? t->desc.n_request : 1;
    names all = {0}, own = {0};
    bool taken[KV_MOST_KINDS] = {false};
    char number[16];
    KV_NEW(t->kind_name, KV_MOST_KINDS);
    t->info.kind_name = (const char *const *)t->kind_name;
    KV_TRY(read_names(t, 0, &all));
    for (int32_t r = 0; r < n && t->kind; r++) {
        names_free(&own);
        KV_TRY(read_names(t, r, &own));
        for (int64_t x = t->request_first[r]; x < t->request_first[r + 1]; x++)
            taken[t->kind[x]] |= !own.of[t->kind[x]];
    }
    for (int32_t r = 1; r < n; r++) {
        names_free(&own);
        KV_TRY(read_names(t, r, &own));
        KV_TRY(renumber(t, r, &own, &all, taken));
    }
    for (int32_t i = 0; i < KV_MOST_KINDS; i++)
        if (all.of[i]) t->info.n_kind_name = i + 1;
    for (int32_t i = 0; i < t->info.n_kind_name; i++) {
        snprintf(number, sizeof number, "%d", i);
        if (!all.of[i]) KV_TRY(set_name(&all, i, number));
        t->kind_name[i] = all.of[i];
        all.of[i] = NULL;
    }
out:
    names_free(&own);
    names_free(&all);
    return st;
}
