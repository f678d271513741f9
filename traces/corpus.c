/* Generator of the reasoning language, version 2: premises, a list of equations, then the worked solution with recalls, digit
 * arithmetic, errors that are redone and what-if branches that are adopted or abandoned.
 *
 *   <bos> given : let kq = 42 . … uy = kv + rb . … solve :
 *   <filler> , step uy = kv + rb : recall kv = 16 ; recall rb = 37 ; 6+7=3 carry 1 ; 1+3=5 ; so uy = 53 . check ok .
 *   <filler> , whatif : step … check ok . step … check ok . adopt zq , mn .          (or abandon zq , mn .)
 *   answer : ba = 59 <eos>
 *
 * The embedded model was trained on this language; probabilities and limits here are part of it. Values are two digits (modulo
 * 100), names two letters, the second operand of * is a literal digit 2..9. */
#include "traces/corpus.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "reference/core/rand.h"

enum {
    BOS = 1,
    EOS = 2,
    DIGIT = 4,   /* ..13 */
    LETTER = 14, /* ..39 */
    EQUALS = 40,
    PLUS, /* + - * in the order of enum operation */
    COLON = 44,
    SEMICOLON,
    COMMA,
    DOT,
    GIVEN,
    LET,
    SOLVE,
    STEP,
    RECALL,
    SO,
    CHECK,
    OK,
    WRONG,
    WAIT,
    REDO,
    CARRY,
    ANSWER,
    ABANDON,
    ADOPT,
    WHATIF,
    FILLER = 64, /* ..255 */
    N_FILLER = 192
};
enum operation { ADD, SUBTRACT, MULTIPLY };

enum {
    N_NAME = 26 * 26,
    MAX_LISTED = 500,  /* premises and equations of one problem */
    FRESH_LIMIT = 670, /* no further branch from here on: one branch takes up to 3 names */
    MAX_FILLER = 80,
    SUCCESSORS = 16
};

static const double filler_mean = 6.0, error_rate = 0.15, branch_rate = 0.6, adopt_rate = 0.5;

typedef struct emitter {
    int32_t *token;
    uint8_t *kind, *scored;
    int32_t n, length;
} emitter;

typedef struct quantity {
    uint8_t value;  /* 0..99 */
    uint16_t name;  /* 0..675 */
    int32_t first;  /* operands of the equation that defines it, as indices of quantities; */
    int32_t second; /* with MULTIPLY the literal 2..9 */
    enum operation op;
} quantity;

typedef struct problem {
    int32_t n_premise, n_listed; /* the list is [n_premise, n_listed) */
    int32_t fresh;               /* first quantity index that is still unused */
    int32_t live[N_NAME];        /* adopted hypotheses */
    int32_t n_live;
    quantity q[N_NAME];
} problem;

typedef struct generator {
    emitter out;
    kv_rng rng;
    int32_t word; /* state of the filler chain, 0..191 */
    uint8_t successor[N_FILLER][SUCCESSORS];
} generator;

/* The filler chain belongs to the language: these are the very successors that the embedded model was trained on, drawn once
 * from SplitMix64 (Steele, Lea, Flood 2014) with state 12345, skewed by the square to be Zipf-like. */
static void make_filler_chain(uint8_t successor[N_FILLER][SUCCESSORS]) {
    uint64_t state = 12345;
    for (int i = 0; i < N_FILLER; i++)
        for (int j = 0; j < SUCCESSORS; j++) {
            uint64_t z = (state += 0x9E3779B97F4A7C15u);
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
            z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
            z ^= z >> 31;
            double u = (double)(z >> 11) * 0x1p-53;
            successor[i][j] = (uint8_t)(N_FILLER * u * u);
        }
}

static void put(emitter *out, int32_t token, uint8_t kind, uint8_t scored) {
    if (out->n == out->length) return;
    out->token[out->n] = token;
    out->kind[out->n] = kind;
    out->scored[out->n] = scored;
    out->n++;
}

static void put_name(emitter *out, int32_t name, uint8_t kind, uint8_t scored) {
    put(out, LETTER + name / 26, kind, scored);
    put(out, LETTER + name % 26, kind, scored);
}

static void put_value(emitter *out, int32_t value, uint8_t kind, uint8_t scored) {
    put(out, DIGIT + value / 10, kind, scored);
    put(out, DIGIT + value % 10, kind, scored);
}

static int32_t below(generator *g, int32_t n) {
    return (int32_t)kv_rng_below(&g->rng, (uint32_t)n);
}

static bool chance(generator *g, double p) { return kv_rng_uniform(&g->rng) < p; }

static void put_filler(generator *g) {
    int32_t n = 0;
    while (n < MAX_FILLER && chance(g, filler_mean / (filler_mean + 1))) {
        int32_t among = chance(g, 0.7) ? 4 : SUCCESSORS;
        g->word = g->successor[g->word][below(g, among)];
        put(&g->out, FILLER + g->word, KV_KIND_FILLER, KV_SCORED_NONE);
        n++;
    }
    if (n) put(&g->out, COMMA, KV_KIND_STRUCTURE, KV_SCORED_NONE);
}

static uint8_t apply(enum operation op, int32_t x, int32_t y) {
    int32_t r = op == ADD ? x + y : op == SUBTRACT ? x - y + 100 : x * y;
    return (uint8_t)(r % 100);
}

static int32_t second_value(const problem *p, const quantity *q) {
    return q->op == MULTIPLY ? q->second : p->q[q->second].value;
}

static void put_second(emitter *out, const problem *p, const quantity *q, uint8_t literal_kind,
                       uint8_t name_kind, uint8_t scored) {
    if (q->op == MULTIPLY)
        put(out, DIGIT + q->second, literal_kind, scored);
    else
        put_name(out, p->q[q->second].name, name_kind, scored);
}

static void put_recall(emitter *out, const quantity *q) {
    put(out, RECALL, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put_name(out, q->name, KV_KIND_NAME, KV_SCORED_DETERMINISTIC);
    put(out, EQUALS, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put_value(out, q->value, KV_KIND_SCRATCH, KV_SCORED_RECALL);
    put(out, SEMICOLON, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
}

/* "a op b = r", one digit each. */
static void put_digits(emitter *out, enum operation op, int32_t a, int32_t b, int32_t r) {
    const int32_t token[] = {DIGIT + a, PLUS + (int32_t)op, DIGIT + b, EQUALS, DIGIT + r};
    for (size_t i = 0; i < sizeof token / sizeof *token; i++)
        put(out, token[i], KV_KIND_SCRATCH, KV_SCORED_DETERMINISTIC);
}

/* Units, carry (or borrow), tens. The literal of a product multiplies both digits. */
static void put_arithmetic(emitter *out, enum operation op, int32_t x, int32_t y) {
    int32_t x0 = x % 10, x1 = x / 10;
    int32_t y0 = op == MULTIPLY ? y : y % 10, y1 = op == MULTIPLY ? y : y / 10;
    int32_t units, carry, tens;
    if (op == ADD) {
        units = (x0 + y0) % 10, carry = (x0 + y0) / 10, tens = (x1 + y1 + carry) % 10;
    } else if (op == SUBTRACT) {
        units = (x0 - y0 + 10) % 10, carry = x0 < y0, tens = (x1 - y1 - carry + 20) % 10;
    } else {
        units = (x0 * y0) % 10, carry = (x0 * y0) / 10, tens = (x1 * y1 + carry) % 10;
    }
    put_digits(out, op, x0, y0, units);
    put(out, CARRY, KV_KIND_SCRATCH, KV_SCORED_DETERMINISTIC);
    put(out, DIGIT + carry, KV_KIND_SCRATCH, KV_SCORED_DETERMINISTIC);
    put(out, SEMICOLON, KV_KIND_SCRATCH, KV_SCORED_DETERMINISTIC);
    put_digits(out, op, x1, y1, tens);
    put(out, SEMICOLON, KV_KIND_SCRATCH, KV_SCORED_DETERMINISTIC);
}

/* One digit of the result slips by 1..9. */
static int32_t slip(generator *g, int32_t right) {
    int32_t by = 1 + below(g, 9), units = right % 10, tens = right / 10;
    return below(g, 2) ? tens * 10 + (units + by) % 10 : (tens + by) % 10 * 10 + units;
}

static void put_conclusion(emitter *out, int32_t name, int32_t value, bool right) {
    const uint8_t fixed = KV_SCORED_DETERMINISTIC;
    put(out, SO, KV_KIND_STRUCTURE, fixed);
    put_name(out, name, KV_KIND_NAME, fixed);
    put(out, EQUALS, KV_KIND_STRUCTURE, fixed);
    put_value(out, value, KV_KIND_VALUE, right ? KV_SCORED_RESULT : KV_SCORED_NONE);
    put(out, DOT, KV_KIND_STRUCTURE, fixed);
    put(out, CHECK, KV_KIND_STRUCTURE, fixed);
    put(out, right ? OK : WRONG, KV_KIND_STRUCTURE, fixed);
    put(out, DOT, KV_KIND_STRUCTURE, fixed);
}

/* One worked step. Which equation comes is determined by the text in the list (`scored`), not in a branch. */
static void put_step(generator *g, const problem *p, const quantity *q, uint8_t scored) {
    emitter *out = &g->out;
    const quantity *first = &p->q[q->first];
    int32_t x = first->value, y = second_value(p, q);
    put(out, STEP, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    put_name(out, q->name, KV_KIND_NAME, scored);
    put(out, EQUALS, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put_name(out, first->name, KV_KIND_NAME, scored);
    put(out, PLUS + (int32_t)q->op, KV_KIND_STRUCTURE, scored);
    put_second(out, p, q, KV_KIND_SCRATCH, KV_KIND_NAME, scored);
    put(out, COLON, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put_recall(out, first);
    if (q->op != MULTIPLY) put_recall(out, &p->q[q->second]);
    bool wrong = chance(g, error_rate);
    put_arithmetic(out, q->op, x, y);
    if (wrong) {
        put_conclusion(out, q->name, slip(g, q->value), false);
        put(out, WAIT, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
        put(out, REDO, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
        put(out, SEMICOLON, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
        put_arithmetic(out, q->op, x, y);
    }
    put_conclusion(out, q->name, q->value, true);
}

static void set_operation(generator *g, const problem *p, quantity *q) {
    q->op = (enum operation)below(g, 3);
    if (q->op == MULTIPLY) q->second = 2 + below(g, 8);
    q->value = apply(q->op, p->q[q->first].value, second_value(p, q));
}

/* An operand of branch step s: the branch itself, an adopted name, or anything known before list index `known`. */
static int32_t branch_operand(generator *g, const problem *p, int32_t start, int32_t s,
                              int32_t known) {
    if (s && chance(g, 0.5)) return start + below(g, s);
    if (p->n_live && chance(g, 0.6)) return p->live[below(g, p->n_live)];
    return below(g, known);
}

/* A what-if branch of 1..3 steps (.45/.35/.20) with fresh names; its names live on only if it is adopted. */
static void put_branch(generator *g, problem *p, int32_t known) {
    emitter *out = &g->out;
    int32_t start = p->fresh, twentieth = below(g, 20);
    int32_t n = twentieth < 9 ? 1 : twentieth < 16 ? 2 : 3;
    put_filler(g);
    put(out, WHATIF, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    put(out, COLON, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    for (int32_t s = 0; s < n; s++) {
        quantity *q = &p->q[p->fresh++];
        q->first = branch_operand(g, p, start, s, known);
        q->second = branch_operand(g, p, start, s, known);
        set_operation(g, p, q);
        put_step(g, p, q, KV_SCORED_NONE);
    }
    bool adopt = chance(g, adopt_rate);
    put(out, adopt ? ADOPT : ABANDON, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    for (int32_t s = 0; s < n; s++) {
        put_name(out, p->q[start + s].name, KV_KIND_NAME, KV_SCORED_DETERMINISTIC);
        put(out, s + 1 < n ? COMMA : DOT, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
        if (adopt) p->live[p->n_live++] = start + s;
    }
}

static void shuffle_names(generator *g, problem *p) {
    for (int32_t i = 0; i < N_NAME; i++) p->q[i].name = (uint16_t)i;
    for (int32_t i = 0; i < N_NAME; i++) {
        int32_t j = i + below(g, N_NAME - i);
        uint16_t name = p->q[i].name;
        p->q[i].name = p->q[j].name;
        p->q[j].name = name;
    }
}

static void put_statement(generator *g, problem *p) {
    emitter *out = &g->out;
    put(out, BOS, KV_KIND_SPECIAL, KV_SCORED_NONE);
    put(out, GIVEN, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    put(out, COLON, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    for (int32_t i = 0; i < p->n_premise; i++) {
        p->q[i].value = (uint8_t)below(g, 100);
        put(out, LET, KV_KIND_STRUCTURE, KV_SCORED_NONE);
        put_name(out, p->q[i].name, KV_KIND_NAME, KV_SCORED_NONE);
        put(out, EQUALS, KV_KIND_STRUCTURE, KV_SCORED_NONE);
        put_value(out, p->q[i].value, KV_KIND_VALUE, KV_SCORED_NONE);
        put(out, DOT, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    }
    for (int32_t i = p->n_premise; i < p->n_listed; i++) {
        quantity *q = &p->q[i];
        int32_t lowest = chance(g, 0.3) && i > 16 ? i - 16 : 0; /* 30 % refer to a recent result */
        q->first = lowest + below(g, i - lowest);
        q->second = below(g, i);
        set_operation(g, p, q);
        put_name(out, q->name, KV_KIND_EQUATION, KV_SCORED_NONE);
        put(out, EQUALS, KV_KIND_EQUATION, KV_SCORED_NONE);
        put_name(out, p->q[q->first].name, KV_KIND_EQUATION, KV_SCORED_NONE);
        put(out, PLUS + (int32_t)q->op, KV_KIND_EQUATION, KV_SCORED_NONE);
        put_second(out, p, q, KV_KIND_EQUATION, KV_KIND_EQUATION, KV_SCORED_NONE);
        put(out, DOT, KV_KIND_EQUATION, KV_SCORED_NONE);
    }
    put(out, SOLVE, KV_KIND_STRUCTURE, KV_SCORED_NONE);
    put(out, COLON, KV_KIND_STRUCTURE, KV_SCORED_NONE);
}

static void put_problem(generator *g, int32_t n_equation) {
    emitter *out = &g->out;
    problem p = {0};
    p.n_premise = n_equation < 16 ? 2 + below(g, 6) : 8 + below(g, 25);
    p.n_listed = n_equation + p.n_premise;
    if (p.n_listed > MAX_LISTED) p.n_listed = MAX_LISTED;
    p.fresh = p.n_listed;
    shuffle_names(g, &p);
    put_statement(g, &p);
    for (int32_t i = p.n_premise; i < p.n_listed && out->n < out->length; i++) {
        if (chance(g, branch_rate) && p.fresh < FRESH_LIMIT) put_branch(g, &p, i);
        put_filler(g);
        put_step(g, &p, &p.q[i], KV_SCORED_DETERMINISTIC);
    }
    const quantity *last = &p.q[p.n_listed - 1];
    put(out, ANSWER, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put(out, COLON, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put_name(out, last->name, KV_KIND_NAME, KV_SCORED_DETERMINISTIC);
    put(out, EQUALS, KV_KIND_STRUCTURE, KV_SCORED_DETERMINISTIC);
    put_value(out, last->value, KV_KIND_VALUE, KV_SCORED_RESULT);
    put(out, EOS, KV_KIND_SPECIAL, KV_SCORED_DETERMINISTIC);
}

/* Equations per problem at this length: round(per_16384 * length / 16384), at least 2. */
static int32_t scaled(int32_t per_16384, int32_t length) {
    int32_t n = (int32_t)floor((double)per_16384 * length / 16384.0 + 0.5);
    return n < 2 ? 2 : n;
}

const char *kv_corpus_version(const char *name) {
    return name && strcmp(name, "reasoning") == 0 ? "reasoning/2" : NULL;
}

kv_status kv_corpus_generate(const char *name, uint64_t seed, int32_t length, int32_t *token,
                             uint8_t *kind, uint8_t *scored) {
    enum { SHORTEST = 64, STREAM = 2 };
    if (!kv_corpus_version(name))
        return KV_FAIL(KV_E_USAGE, "corpus '%s' is unknown; the built-in corpus is 'reasoning'",
                       name ? name : "");
    if (length < SHORTEST)
        return KV_FAIL(KV_E_USAGE, "--length %d is too short for corpus %s; use at least %d",
                       length, name, SHORTEST);
    generator g = {.out = {token, kind, scored, 0, length}, .rng = kv_rng_make(seed, STREAM)};
    make_filler_chain(g.successor);
    g.word = below(&g, N_FILLER);
    int32_t fewest = scaled(110, length), most = scaled(140, length);
    while (g.out.n < length) put_problem(&g, fewest + below(&g, most - fewest + 1));
    return KV_OK;
}
