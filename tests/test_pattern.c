/* Eviction patterns and keep/drop decisions, counted again token by token. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "experiments/decisions.h"
#include "experiments/pattern.h"
#include "reference/core/rand.h"

static char *slurp(const char *folder, const char *name) {
    static char text[1 << 18];
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

static int lines(const char *text) {
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static void remove_folder(const char *folder) {
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    cr_assert_eq(system(command), 0);
}

enum { LAYERS = 3, HEADS = 2, SHORT = 20, LONG = 150, BOTH = SHORT + LONG + SHORT, KINDS = 5 };

/* Three documents, the longest in the middle; evict_at as any policy might give it. */
typedef struct world {
    int64_t doc_first[4];
    uint8_t kind[BOTH];
    int32_t layer_id[LAYERS];
    int32_t evict_at[LAYERS][HEADS][BOTH]; /* relative to the document */
} world;

static void make_world(world *w) {
    *w = (world){.doc_first = {0, SHORT, SHORT + LONG, BOTH}};
    for (uint32_t i = 0; i < BOTH; i++)
        w->kind[i] = (uint8_t)(KINDS * kv_rand_uniform(i, 0, 0, 0, 1));
    for (uint32_t l = 0; l < LAYERS; l++) {
        w->layer_id[l] = 10 + (int32_t)l;
        for (uint32_t h = 0; h < HEADS; h++)
            for (int doc = 0; doc < 3; doc++)
                for (int64_t i = w->doc_first[doc]; i < w->doc_first[doc + 1]; i++) {
                    int32_t t = (int32_t)(i - w->doc_first[doc]);
                    int32_t after = (int32_t)(200 * kv_rand_uniform(7, (uint32_t)i, l, h, 2));
                    bool ends = t + 1 + after >= w->doc_first[doc + 1] - w->doc_first[doc];
                    w->evict_at[l][h][i] = ends ? KV_NEVER : t + 1 + after;
                }
    }
}

/* Value in the line that starts with `key`. */
static double value_of(const char *text, const char *key) {
    char start[128];
    snprintf(start, sizeof start, "\n%s,", key);
    const char *const line = strstr(text, start);
    cr_assert_not_null(line, "no line %s", key);
    return atof(line + strlen(start));
}

/* Everything counted from the definition in maths.md 10.3 and 10.5. */
static void check_pattern(const world *w, const char *folder, int32_t sinks, int32_t window) {
    static const char *const names[] = {"special", "value", "2", "3", "4"};
    char key[128];
    const char *text = slurp(folder, "pattern.csv");
    const int32_t last = LONG - window - 1;
    int32_t first = LONG - window - KV_PATTERN_TOKENS;
    if (first < sinks) first = sinks;
    cr_assert_eq(lines(text), 1 + LAYERS * (last >= first ? last - first + 1 : 0));
    for (int l = 0; l < LAYERS; l++)
        for (int32_t t = first; t <= last; t++) {
            int held = 0;
            for (int h = 0; h < HEADS; h++) held += LONG - 1 < w->evict_at[l][h][SHORT + t];
            snprintf(key, sizeof key, "streaming,,16,%d,%d,%s", w->layer_id[l], t,
                     names[w->kind[SHORT + t]]);
            cr_assert_eq(value_of(text, key), held, "%s", key);
        }
    text = slurp(folder, "evict_ratio.csv");
    for (int l = 0; l < LAYERS; l++)
        for (int h = 0; h < HEADS; h++) {
            int gone = 0, n = 0;
            for (int doc = 0; doc < 3; doc++) {
                const int64_t end = w->doc_first[doc + 1], from = w->doc_first[doc];
                for (int64_t i = from + sinks; i < end - window; i++, n++) /* a priority policy */
                    gone += w->evict_at[l][h][i] <= end - from - 1;
            }
            snprintf(key, sizeof key, "streaming,,16,%d,%d", w->layer_id[l], h);
            if (n) cr_assert_float_eq(value_of(text, key), (double)gone / n, 1e-6, "%s", key);
        }
    text = slurp(folder, "evict_kind.csv");
    for (int all = 0; all < 2; all++)
        for (int kind = 0; kind < KINDS; kind++) {
            int gone = 0, n = 0;
            for (int32_t t = all ? sinks : first; t <= last; t++) {
                if (w->kind[SHORT + t] != kind) continue;
                n++;
                for (int l = 0; l < LAYERS; l++)
                    for (int h = 0; h < HEADS; h++)
                        gone += LONG - 1 >= w->evict_at[l][h][SHORT + t];
            }
            if (n == 0) continue;
            snprintf(key, sizeof key, "streaming,,16,%s,%s,%d", all ? "all" : "last", names[kind],
                     n);
            cr_assert_float_eq(value_of(text, key), (double)gone / n / LAYERS / HEADS, 1e-6, "%s",
                               key);
        }
}

Test(pattern, tables) {
    static const char *const kind_name[] = {"special", "value"};
    static const struct {
        int32_t sinks, window;
    } cases[] = {{2, 8}, {0, 1}, {40, 30}, {4, LONG}, {60, 100}};
    static world w;
    static kv_policy bound = {.name = "oracle_step", .no_evict_at = true},
                     plain = {.name = "streaming"};
    char folder[] = "/tmp/kvlab_pattern_XXXXXX";
    cr_assert_not_null(mkdtemp(folder));
    make_world(&w);
    kv_trace_info trace = {.n_layer = LAYERS,
                           .n_kv_head = HEADS,
                           .n_token = BOTH,
                           .n_document = 3,
                           .doc_first = w.doc_first,
                           .kind = w.kind,
                           .kind_name = kind_name,
                           .n_kind_name = 2};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const kv_run run = {.budget = 16, .sinks = cases[c].sinks, .window = cases[c].window};
        kv_row both[] = {{.policy = &bound, .run = run}, {.policy = &plain, .run = run}};
        const kv_plan plan = {.row = both, .n_row = 2};
        kv_pattern *p;
        cr_assert_eq(kv_pattern_open(folder, &plan, &trace, &p), KV_OK, "%s", kv_error_message());
        for (int l = 0; l < LAYERS; l++) {
            for (int doc = 0; doc < 3; doc++) {
                const kv_span span = {
                    .first = w.doc_first[doc],
                    .n_token = (int32_t)(w.doc_first[doc + 1] - w.doc_first[doc]),
                    .n_kv_head = HEADS,
                    .stride = BOTH,
                };
                kv_pattern_add(p, 1, &span, &w.evict_at[l][0][span.first]);
            }
            kv_pattern_write_layer(p, w.layer_id[l]);
        }
        cr_assert_eq(kv_pattern_close(p), KV_OK, "%s", kv_error_message());
        check_pattern(&w, folder, cases[c].sinks, cases[c].window);
    }
    kv_pattern *p;
    kv_row one = {.policy = &plain, .run = {.budget = 16, .window = 4}};
    const kv_plan plan = {.row = &one, .n_row = 1};
    cr_assert_eq(kv_pattern_open("/nonexistent", &plan, &trace, &p), KV_E_CANTCREATE);
    remove_folder(folder);
}

/* The sign of Delta against y at every query from the definition (maths.md 4.1): the k best of E(u), and the worst of them. */
static void count_decisions(const float *target, const float *mine, int32_t n, const kv_run *run,
                            double log_gamma, kv_decisions *out) {
    const int32_t k = run->budget - run->sinks - run->window;
    float priority[64];
    for (int32_t t = 0; t < n; t++)
        priority[t] = (float)fma(-(double)t, log_gamma, (double)target[t]);
    for (int32_t u = run->budget; u < n; u++) {
        const int32_t fresh = u - run->window;
        for (int32_t t = run->sinks; t <= fresh; t++) {
            int better = 0;
            for (int32_t x = run->sinks; x <= fresh; x++)
                better += priority[x] > priority[t] || (priority[x] == priority[t] && x < t);
            if (better != k - 1 || t == fresh) continue; /* t is the worst kept */
            const bool keep = priority[fresh] > priority[t];
            out->n[keep]++;
            out->right[keep] += (mine[fresh] > mine[t]) == keep;
        }
    }
}

Test(pattern, decisions) {
    enum { N = 60 };
    static const kv_run runs[] = {{.budget = 16, .sinks = 2, .window = 5},
                                  {.budget = 6, .window = 5},
                                  {.budget = 59, .sinks = 1, .window = 1},
                                  {.budget = 60, .sinks = 2, .window = 5},
                                  {.budget = 7, .sinks = 2, .window = 5}};
    float target[HEADS][N + 3], mine[HEADS][N + 3];
    const double log_gamma[HEADS] = {-1e-3, -1e-6};
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t t = 0; t < N; t++) { /* coarse: ties */
            target[h][t] = floorf(8 * (float)kv_rand_uniform(1, h, t, 0, 3));
            mine[h][t] = target[h][t] + floorf(9 * (float)kv_rand_uniform(2, h, t, 0, 3));
        }
    const kv_span span = {.n_token = N, .n_kv_head = HEADS, .stride = N + 3};
    for (size_t c = 0; c < sizeof runs / sizeof *runs; c++) {
        kv_decisions got = {0}, want = {0};
        cr_assert_eq(kv_decisions_add(&got, &span, &runs[c], target[0], log_gamma, mine[0]), KV_OK);
        for (int h = 0; h < HEADS && runs[c].budget > runs[c].sinks + runs[c].window; h++)
            count_decisions(target[h], mine[h], N, &runs[c], log_gamma[h], &want);
        for (int y = 0; y < 2; y++) {
            cr_assert_eq(got.n[y], want.n[y], "case %zu, class %d: %ld pairs, counted %ld", c, y,
                         (long)got.n[y], (long)want.n[y]);
            cr_assert_eq(got.right[y], want.right[y], "case %zu, class %d", c, y);
        }
    }
    const kv_decisions d = {.n = {30, 10}, .right = {15, 9}}, one = {.n = {5, 0}, .right = {4, 0}};
    cr_assert_float_eq(kv_decisions_plain(&d), .6, 1e-15);
    cr_assert_float_eq(kv_decisions_balanced(&d), .7, 1e-15);
    cr_assert_float_eq(kv_decisions_plain(&one), .8, 1e-15);
    cr_assert(isnan(kv_decisions_balanced(&one)), "one class is empty");
    cr_assert(isnan(kv_decisions_plain(&(kv_decisions){0})));
}
