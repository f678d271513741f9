/* The corpus generator against an independent reader of its language (tests/naive/naive_corpus.c). */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/naive/naive_corpus.h"
#include "traces/corpus.h"

typedef struct sequence {
    int32_t n;
    int32_t *token;
    uint8_t *kind, *scored;
} sequence;

static sequence make(uint64_t seed, int32_t n) {
    sequence s = {n, malloc((size_t)n * 4), malloc((size_t)n), malloc((size_t)n)};
    kv_status st = kv_corpus_generate("reasoning", seed, n, s.token, s.kind, s.scored);
    cr_assert_eq(st, KV_OK, "seed=%llu n=%d: %s", (unsigned long long)seed, n, kv_error_message());
    return s;
}

static void drop(sequence *s) {
    free(s->token);
    free(s->kind);
    free(s->scored);
}

Test(corpus, every_sequence_obeys_the_grammar) {
    const int32_t length[] = {64, 65, 100, 256, 512, 1024, 1500, 4096, 16384};
    char why[256];
    for (size_t i = 0; i < sizeof length / sizeof *length; i++)
        for (uint64_t seed = 0; seed < 20; seed++) {
            naive_corpus_stats stats = {0};
            sequence s = make(seed * 0x100000001ull, length[i]);
            cr_expect_eq(naive_corpus_check(s.token, s.kind, s.scored, s.n, &stats, why), 0,
                         "seed=%llu n=%d: %s", (unsigned long long)seed, length[i], why);
            drop(&s);
        }
}

Test(corpus, a_damaged_sequence_is_noticed) {
    enum { N = 1024 };
    char why[256];
    sequence s = make(7, N);
    for (int32_t i = 0; i < N - 1; i++) {
        naive_corpus_stats stats = {0};
        int32_t token = s.token[i];
        uint8_t kind = s.kind[i], scored = s.scored[i];
        s.token[i] = 3;
        cr_expect_eq(naive_corpus_check(s.token, s.kind, s.scored, N, &stats, why), 1, "token %d",
                     i);
        s.token[i] = token;
        s.kind[i] = (uint8_t)((kind + 1) % 7);
        cr_expect_eq(naive_corpus_check(s.token, s.kind, s.scored, N, &stats, why), 1, "kind %d",
                     i);
        s.kind[i] = kind;
        s.scored[i] = (uint8_t)((scored + 1) % 4);
        cr_expect_eq(naive_corpus_check(s.token, s.kind, s.scored, N, &stats, why), 1, "scored %d",
                     i);
        s.scored[i] = scored;
    }
    drop(&s);
}

/* Within 5 standard deviations of a binomial share; the seeds are fixed, so a pass stays a pass. */
static void expect_share(const char *what, int64_t part, int64_t whole, double p) {
    double share = (double)part / (double)whole, sigma = sqrt(p * (1 - p) / (double)whole);
    cr_expect(fabs(share - p) < 5 * sigma, "%s: %.4f of %lld, expected %.4f +- %.4f", what, share,
              (long long)whole, p, 5 * sigma);
}

Test(corpus, proportions_are_those_of_the_language) {
    naive_corpus_stats s = {0};
    char why[256];
    for (uint64_t seed = 0; seed < 100; seed++) {
        sequence x = make(1000 + seed, 16384);
        cr_assert_eq(naive_corpus_check(x.token, x.kind, x.scored, x.n, &s, why), 0, "%s", why);
        drop(&x);
    }
    expect_share("errors", s.wrong, s.step, .15);
    expect_share("branches", s.branch, s.branch_chance, .6);
    expect_share("length 1", s.branch_length[1], s.branch, .45);
    expect_share("length 2", s.branch_length[2], s.branch, .35);
    expect_share("length 3", s.branch_length[3], s.branch, .20);
    expect_share("adopted", s.adopted, s.branch, .5);
    expect_share("operands of the own branch", s.own_operand, s.later_operand, .5);
    expect_share("adopted operands", s.live_operand, s.open_operand, .6);
    for (int op = 0; op < 3; op++) expect_share("operation", s.operation[op], s.step, 1.0 / 3);
    /* n words with probability (6/7)^n (1/7): mean 6, variance 42 */
    double mean = (double)s.filler / (double)s.filler_slot;
    cr_expect(fabs(mean - 6) < 5 * sqrt(42.0 / (double)s.filler_slot), "filler mean %.3f", mean);
    cr_expect(s.fewest_equation >= 110 && s.most_equation <= 140, "equations %d..%d",
              s.fewest_equation, s.most_equation);
    cr_expect(s.fewest_equation <= 112 && s.most_equation >= 138, "equations %d..%d",
              s.fewest_equation, s.most_equation);
    cr_expect(s.fewest_premise == 8 && s.most_premise == 32, "premises %d..%d", s.fewest_premise,
              s.most_premise);
}

Test(corpus, problem_size_follows_the_length) {
    const struct {
        int32_t length, fewest, most, fewest_premise, most_premise;
    } c[] = {{64, 2, 2, 2, 7},      {512, 3, 4, 2, 7},     {1024, 7, 9, 2, 7},
             {2048, 14, 18, 2, 32}, {8192, 55, 70, 8, 32}, {65536, 440, 492, 8, 32}};
    char why[256];
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        naive_corpus_stats s = {0};
        for (uint64_t seed = 0; seed < 40 && seed * (uint64_t)c[i].length < 400000; seed++) {
            sequence x = make(seed, c[i].length);
            cr_expect_eq(naive_corpus_check(x.token, x.kind, x.scored, x.n, &s, why), 0, "n=%d: %s",
                         c[i].length, why);
            drop(&x);
        }
        cr_expect(s.fewest_equation >= c[i].fewest && s.most_equation <= c[i].most &&
                      s.fewest_premise >= c[i].fewest_premise &&
                      s.most_premise <= c[i].most_premise && s.most_name <= 673,
                  "n=%d: equations %d..%d, premises %d..%d, names %d", c[i].length,
                  s.fewest_equation, s.most_equation, s.fewest_premise, s.most_premise,
                  s.most_name);
    }
}

Test(corpus, the_same_seed_gives_the_same_sequence) {
    sequence a = make(42, 4096), b = make(42, 4096), c = make(43, 4096);
    cr_expect(memcmp(a.token, b.token, 4096 * 4) == 0 && memcmp(a.kind, b.kind, 4096) == 0 &&
              memcmp(a.scored, b.scored, 4096) == 0);
    cr_expect(memcmp(a.token, c.token, 4096 * 4) != 0);
    drop(&a);
    drop(&b);
    drop(&c);
}

Test(corpus, wrong_requests_are_named) {
    int32_t token[64];
    uint8_t kind[64], scored[64];
    cr_expect_eq(kv_corpus_generate("poems", 1, 64, token, kind, scored), KV_E_USAGE);
    cr_expect(strstr(kv_error_message(), "poems") && strstr(kv_error_message(), "reasoning"));
    cr_expect_eq(kv_corpus_generate("reasoning", 1, 63, token, kind, scored), KV_E_USAGE);
    cr_expect(strstr(kv_error_message(), "63") && strstr(kv_error_message(), "64"));
    cr_expect_str_eq(kv_corpus_version("reasoning"), "reasoning/2");
    cr_expect_null(kv_corpus_version("poems"));
}
