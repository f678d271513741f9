/* Structure-aware: a valid trace is changed through HDF5's own functions as the input says, then read to the end. Any status but
 * success and "bad data" is a fault, and so is a value that is not finite. (Raw bytes of HDF5 files are not fuzzed: libhdf5 1.10 itself
 * does not survive that.) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "experiments/inspect.h"
#include "reference/core/log.h"
#include "tests/fuzz/bytes.h"
#include "tests/naive/mutate_hdf5.h"
#include "tests/naive/small_trace.h"

#define R "/requests/r00000/"

static const char *const object[] = {R "token",
                                     R "doc_start",
                                     R "position",
                                     R "kind",
                                     R "scored",
                                     R "query_pos",
                                     R "q",
                                     R "k",
                                     R "v",
                                     R "hidden",
                                     R "lse",
                                     R "gate",
                                     R "score",
                                     R "score/x",
                                     "/model",
                                     "/model/window",
                                     "/model/inv_freq",
                                     "/layer",
                                     "/kv_head",
                                     "/q_head",
                                     "/dim",
                                     "/requests",
                                     "/requests/r00000",
                                     "/",
                                     "/evict_at"};
static const char *const name[] = {
    "Conventions",   "schema_version",   "n_layer",      "n_q_head",  "n_kv_head",
    "head_dim",      "d_model",          "rope_theta",   "rope_kind", "softmax_scale",
    "logit_softcap", "keys_are_rotated", "content_xxh3", "trace_id",  "seed",
    "corpus",        "flag_meanings",    "flag_values",  "shift",     "delta"};
static const char *const text[] = {"",
                                   "KVTRACE-1.0",
                                   "KVTRACE-1.9",
                                   "KVTRACE-99999999999.0",
                                   "rotate_half",
                                   "reasoning/2",
                                   "a b c d e f g h i j",
                                   "%s%n"};
static const double number[] = {0, 1, -1, 2, 3, 8, 12, 0.5, 29, 30, 4096, 1e9, 1e19, -1e19, 1e300};
static const int64_t extent[] = {1, 2, 3, 4, 7, 8, 12, 29, 30, 31, 1000};

#define PICK(b, table) (table)[pick(b, sizeof(table) / sizeof *(table))]

enum { TOKENS = 30 };

static char path[64], *base;
static long base_size;

static void make_base(void) {
    small_trace *s = malloc(sizeof *s);
    small_trace_make(s);
    s->spec.n_token = TOKENS;
    s->doc_start[1] = 7, s->doc_start[2] = 20;
    snprintf(path, sizeof path, "%s/kvfuzz%ld.h5", access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm",
             (long)getpid());
    if (small_trace_write(s, path) != KV_OK) abort();
    free(s);
    FILE *f = fopen(path, "rb");
    fseek(f, 0, SEEK_END);
    base_size = ftell(f);
    rewind(f);
    base = malloc((size_t)base_size);
    if (fread(base, 1, (size_t)base_size, f) != (size_t)base_size) abort();
    fclose(f);
    kv_log_set_level(KV_LOG_ERROR);
}

static void remove_file(void) { unlink(path); }

static mutation decide(bytes *b) {
    mutation m = {.kind = (mutation_kind)pick(b, MAKE_GROUP + 1),
                  .object = PICK(b, object),
                  .name = PICK(b, name),
                  .text = PICK(b, text),
                  .number = PICK(b, number),
                  .index = take(b) | take(b) << 8,
                  .type = (element_type)pick(b, STRING + 1),
                  .store = (store)pick(b, NO_FILTER_CHUNKED + 1)};
    for (uint32_t i = 0, n = pick(b, 6); i < n; i++) m.dim[i] = PICK(b, extent);
    if (pick(b, 8) == 0) m.number = NAN;
    return m;
}

static void demand(kv_status st) {
    if (st == KV_OK || st == KV_E_DATA) return;
    fprintf(stderr, "status %d: %s\n", st, kv_error_message());
    abort();
}

static void read_all(kv_trace *t) {
    const kv_trace_info *info = kv_trace_get(t);
    char hash[33];
    for (int32_t i = 0; i < info->n_layer; i++) {
        kv_trace_layer l;
        kv_status st = kv_trace_read_layer(t, i, true, &l);
        demand(st);
        for (int64_t j = 0; st == KV_OK && j < info->n_kv_head * info->n_token * info->head_dim;
             j++)
            if (!isfinite(l.k[j]) || !isfinite(l.v[j])) abort();
        if (st == KV_OK) kv_trace_layer_free(&l);
    }
    demand(kv_trace_content_hash(t, hash));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    bytes b = {data, size};
    kv_trace *t = NULL;
    if (!base) {
        make_base();
        atexit(remove_file);
    }
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(base, 1, (size_t)base_size, f) != (size_t)base_size || fclose(f)) abort();
    for (int i = 0; i < 6 && b.left; i++) {
        mutation m = decide(&b);
        mutate(path, &m);
    }
    demand(kv_trace_open(path, &t));
    if (t) read_all(t);
    kv_trace_close(t);
    FILE *sink = fopen("/dev/null", "w");
    demand(kv_inspect(path, true, sink));
    fclose(sink);
    return 0;
}
