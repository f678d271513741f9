/* What goes wrong around a trace: full disks, truncated files, flipped bits. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "tests/naive/small_folder.h"

TestSuite(trace_damage, .init = small_folder_enter, .fini = small_folder_leave);

static bool equal(const void *a, const void *b, size_t n) { return memcmp(a, b, n) == 0; }

static char *slurp(const char *path, long *n) {
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    fseek(f, 0, SEEK_END);
    *n = ftell(f);
    rewind(f);
    char *x = malloc((size_t)*n);
    cr_assert_eq(fread(x, 1, (size_t)*n, f), (size_t)*n);
    fclose(f);
    return x;
}

/* libhdf5 1.10 itself loses memory when a checksum is wrong or a file cannot be closed; under the sanitizers that is not ours to report. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
static void ignore_leaks(bool on) {
    if (on)
        __lsan_disable();
    else
        __lsan_enable();
}
#else
static void ignore_leaks(bool on) { (void)on; }
#endif

/* A file-size limit stands for a full disk: at every size the writer may meet it, in another of its calls. */
Test(trace_damage, a_full_disk_is_an_error_and_leaves_nothing) {
    struct stat found;
    ignore_leaks(true);
    signal(SIGXFSZ, SIG_IGN);
    small_folder_write("a.h5");
    cr_assert_eq(stat("a.h5", &found), 0);
    for (off_t size = 0; size < found.st_size; size += found.st_size / 40) {
        const struct rlimit limit = {(rlim_t)size, RLIM_INFINITY};
        setrlimit(RLIMIT_FSIZE, &limit);
        kv_status st = small_trace_write(small, "b.h5");
        cr_expect(st == KV_E_IO || (st == KV_E_CANTCREATE && size < 100), "%lld bytes: %d %s",
                  (long long)size, st, kv_error_message());
        cr_expect(strstr(kv_error_message(), "b.h5"), "%s", kv_error_message());
        cr_expect_neq(system("ls -A | grep -v '^a.h5$' | grep -q ."), 0,
                      "%lld bytes: a file is left", (long long)size);
    }
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){RLIM_INFINITY, RLIM_INFINITY});
    small_folder_write("b.h5");
}

/* Reads everything of a possibly damaged file; the result must be an error, or the original data, or data whose hash tells. */
static void expect_no_silent_damage(const char *what) {
    kv_trace *t = NULL;
    kv_status st = kv_trace_open("b.h5", &t);
    char hash[33] = "";
    bool same = true;
    if (t) same = equal(kv_trace_get(t)->token, small->token, sizeof small->token);
    for (int l = 0; l < FX_LAYER && st == KV_OK; l++) {
        kv_trace_layer x;
        st = kv_trace_read_layer(t, l, true, &x);
        if (st != KV_OK) break;
        same = same && equal(x.q, small->q[l], sizeof small->q[l]) &&
               equal(x.k, small->k[l], sizeof small->k[l]) &&
               equal(x.v, small->v[l], sizeof small->v[l]);
        kv_trace_layer_free(&x);
    }
    if (st == KV_OK) st = kv_trace_content_hash(t, hash);
    cr_expect(st == KV_OK || st == KV_E_DATA, "%s: status %d, %s", what, st, kv_error_message());
    if (st == KV_OK && !same) cr_expect_str_neq(hash, kv_trace_get(t)->content_hash, "%s", what);
    kv_trace_close(t);
}

static void put_file(const char *path, const char *data, long n) {
    FILE *f = fopen(path, "wb");
    cr_assert_eq(fwrite(data, 1, (size_t)n, f), (size_t)n);
    fclose(f);
}

Test(trace_damage, truncated_and_flipped_files_are_noticed) {
    long n;
    char what[64];
    ignore_leaks(true);
    small_folder_write("a.h5");
    char *x = slurp("a.h5", &n);
    for (long size = 0; size < n; size += n / 37) {
        kv_trace *t = NULL;
        put_file("b.h5", x, size);
        kv_status st = kv_trace_open("b.h5", &t);
        cr_expect_eq(st, KV_E_DATA, "%ld of %ld bytes: %d", size, n, st);
        cr_expect(strstr(kv_error_message(), "b.h5"), "%s", kv_error_message());
    }
    int refused = 0, total = 0;
    for (long at = 8; at < n; at += 173, total++) {
        snprintf(what, sizeof what, "bit %ld of byte %ld", at % 8, at);
        x[at] = (char)(x[at] ^ 1 << at % 8);
        put_file("b.h5", x, n);
        expect_no_silent_damage(what);
        kv_trace *t = NULL;
        refused += kv_trace_open("b.h5", &t) != KV_OK;
        kv_trace_close(t);
        x[at] = (char)(x[at] ^ 1 << at % 8);
    }
    ignore_leaks(false);
    cr_expect(refused > 0 && refused < total, "%d of %d refused at once", refused, total);
    free(x);
}
