/* Recursive descent over the grammar. Each rule takes one token, its kind and its scored flag; the first violation or the end of
 * the sequence leaves through longjmp. */
#include "tests/naive/naive_corpus.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Token ids as the model's language table gives them. */
enum {
    T_BOS = 1,
    T_EOS = 2,
    T_EQ = 40,
    T_PLUS = 41,
    T_MINUS = 42,
    T_TIMES = 43,
    T_COLON = 44,
    T_SEMI = 45,
    T_COMMA = 46,
    T_DOT = 47,
    T_GIVEN = 48,
    T_LET = 49,
    T_SOLVE = 50,
    T_STEP = 51,
    T_RECALL = 52,
    T_SO = 53,
    T_CHECK = 54,
    T_OK = 55,
    T_WRONG = 56,
    T_WAIT = 57,
    T_REDO = 58,
    T_CARRY = 59,
    T_ANSWER = 60,
    T_ABANDON = 61,
    T_ADOPT = 62,
    T_WHATIF = 63
};
enum { SPECIAL, VALUE, SCRATCH, NAME, STRUCTURE, FILLER, EQUATION };
enum { UNKNOWN, LISTED, KNOWN, HYPOTHESIS, ADOPTED, DEAD };

typedef struct reader {
    const int32_t *token;
    const uint8_t *kind, *scored;
    int32_t n, at;
    naive_corpus_stats *stats;
    char *why;
    jmp_buf leave;
    int word; /* last filler word, -1: none yet */
    unsigned char successor[192][16];
    int state[676], value[676]; /* of each name in the current problem */
    int n_name, n_live;
} reader;

static void fail(reader *r, const char *format, ...) {
    char text[160];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int i = r->at < r->n ? r->at : r->n - 1;
    snprintf(r->why, 256, "token %d (id %d kind %d scored %d): %s", i, r->token[i], r->kind[i],
             r->scored[i], text);
    longjmp(r->leave, 2);
}

static int peek(reader *r) {
    if (r->at == r->n) longjmp(r->leave, 1);
    return r->token[r->at];
}

static int take(reader *r, int low, int high, int kind, int scored) {
    int t = peek(r);
    if (t < low || t > high) fail(r, "expected an id in %d..%d", low, high);
    if (r->kind[r->at] != kind) fail(r, "expected kind %d", kind);
    if (r->scored[r->at] != scored) fail(r, "expected scored %d", scored);
    r->at++;
    return t;
}

static void word(reader *r, int id, int kind, int scored) { take(r, id, id, kind, scored); }
static int digit(reader *r, int kind, int scored) { return take(r, 4, 13, kind, scored) - 4; }

static int name(reader *r, int kind, int scored) {
    int high = take(r, 14, 39, kind, scored) - 14;
    return 26 * high + take(r, 14, 39, kind, scored) - 14;
}

static void this_name(reader *r, int expected, int kind, int scored) {
    int found = name(r, kind, scored);
    if (found != expected) fail(r, "name %d where %d belongs", found, expected);
}

static void this_digit(reader *r, int expected, int kind, int scored) {
    int found = digit(r, kind, scored);
    if (found != expected) fail(r, "digit %d where %d belongs", found, expected);
}

static int value(reader *r, int kind, int scored) {
    int tens = digit(r, kind, scored);
    return 10 * tens + digit(r, kind, scored);
}

static void define(reader *r, int nm, int state) {
    if (r->state[nm] != UNKNOWN) fail(r, "name %d is used twice", nm);
    r->state[nm] = state;
    r->n_name++;
}

static void make_successors(reader *r) {
    uint64_t s = 12345;
    for (int i = 0; i < 192 * 16; i++) {
        s += 0x9E3779B97F4A7C15ull;
        uint64_t z = s;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z = z ^ (z >> 31);
        double u = (double)(z >> 11) / 9007199254740992.0;
        r->successor[i / 16][i % 16] = (unsigned char)(192 * u * u);
    }
}

static void filler(reader *r) {
    int n = 0;
    while (peek(r) >= 64) {
        int next = take(r, 64, 255, FILLER, 0) - 64, legal = r->word < 0;
        for (int j = 0; j < 16 && !legal; j++) legal = r->successor[r->word][j] == next;
        if (!legal) fail(r, "word %d does not follow word %d", next, r->word);
        r->word = next;
        if (++n > 80) fail(r, "more than 80 filler words");
        r->stats->filler++;
    }
    r->stats->filler_slot++;
    if (n) word(r, T_COMMA, STRUCTURE, 0);
}

/* a op b = r of single digits */
static void sum(reader *r, int a, int op, int b, int result) {
    this_digit(r, a, SCRATCH, 1);
    word(r, op, SCRATCH, 1);
    this_digit(r, b, SCRATCH, 1);
    word(r, T_EQ, SCRATCH, 1);
    this_digit(r, result, SCRATCH, 1);
}

static int result_of(int op, int x, int y) {
    return op == T_PLUS ? (x + y) % 100 : op == T_MINUS ? (x + 100 - y) % 100 : x * y % 100;
}

static void arithmetic(reader *r, int x, int op, int y) {
    int z = result_of(op, x, y), carry;
    if (op == T_PLUS)
        carry = x % 10 + y % 10 > 9;
    else if (op == T_MINUS)
        carry = x % 10 < y % 10;
    else
        carry = x % 10 * y / 10;
    sum(r, x % 10, op, op == T_TIMES ? y : y % 10, z % 10);
    word(r, T_CARRY, SCRATCH, 1);
    this_digit(r, carry, SCRATCH, 1);
    word(r, T_SEMI, SCRATCH, 1);
    sum(r, x / 10, op, op == T_TIMES ? y : y / 10, z / 10);
    word(r, T_SEMI, SCRATCH, 1);
}

static void recall(reader *r, int nm) {
    word(r, T_RECALL, STRUCTURE, 1);
    this_name(r, nm, NAME, 1);
    word(r, T_EQ, STRUCTURE, 1);
    this_digit(r, r->value[nm] / 10, SCRATCH, 2);
    this_digit(r, r->value[nm] % 10, SCRATCH, 2);
    word(r, T_SEMI, STRUCTURE, 1);
}

static int conclusion(reader *r, int nm, int right) {
    word(r, T_SO, STRUCTURE, 1);
    this_name(r, nm, NAME, 1);
    word(r, T_EQ, STRUCTURE, 1);
    int good = r->at + 1 < r->n ? 10 * (peek(r) - 4) + r->token[r->at + 1] - 4 == right
                                : peek(r) - 4 == right / 10 && r->scored[r->at] == 3;
    int v = value(r, VALUE, good ? 3 : 0);
    if (!good && (v / 10 != right / 10) + (v % 10 != right % 10) != 1)
        fail(r, "a wrong result differs from %d in one digit, not %d", right, v);
    word(r, T_DOT, STRUCTURE, 1);
    word(r, T_CHECK, STRUCTURE, 1);
    word(r, good ? T_OK : T_WRONG, STRUCTURE, 1);
    word(r, T_DOT, STRUCTURE, 1);
    return good;
}

typedef struct equation {
    int name, first, op, second; /* second: a name, or the literal of a product */
} equation;

static void operand(reader *r, int nm, int in_branch) {
    int s = r->state[nm];
    if (s != KNOWN && !(in_branch && (s == ADOPTED || s == HYPOTHESIS)))
        fail(r, "name %d in state %d cannot be an operand here", nm, s);
}

/* Counts for the operand statistics of branches; h: hypotheses of this branch so far. */
static void count_operand(reader *r, int nm, int h) {
    int own = r->state[nm] == HYPOTHESIS;
    if (h) r->stats->later_operand++, r->stats->own_operand += own;
    if (!own && r->n_live)
        r->stats->open_operand++, r->stats->live_operand += r->state[nm] == ADOPTED;
}

/* `listed` is the equation that must come, or NULL within a branch. Returns the name of the step. */
static int step(reader *r, const equation *listed, int h) {
    int s = listed ? 1 : 0;
    word(r, T_STEP, STRUCTURE, 0);
    equation e;
    e.name = name(r, NAME, s);
    word(r, T_EQ, STRUCTURE, 1);
    e.first = name(r, NAME, s);
    operand(r, e.first, !listed);
    e.op = take(r, T_PLUS, T_TIMES, STRUCTURE, s);
    if (e.op == T_TIMES)
        e.second = take(r, 6, 13, SCRATCH, s) - 4;
    else
        e.second = name(r, NAME, s);
    if (e.op != T_TIMES) operand(r, e.second, !listed);
    if (listed && memcmp(&e, listed, sizeof e) != 0) fail(r, "this is not the next equation");
    if (!listed) {
        count_operand(r, e.first, h);
        if (e.op != T_TIMES) count_operand(r, e.second, h);
        define(r, e.name, UNKNOWN);
    }
    word(r, T_COLON, STRUCTURE, 1);
    recall(r, e.first);
    if (e.op != T_TIMES) recall(r, e.second);
    int x = r->value[e.first], y = e.op == T_TIMES ? e.second : r->value[e.second];
    int right = result_of(e.op, x, y);
    arithmetic(r, x, e.op, y);
    r->stats->step++;
    r->stats->operation[e.op - T_PLUS]++;
    if (!conclusion(r, e.name, right)) {
        r->stats->wrong++;
        word(r, T_WAIT, STRUCTURE, 1);
        word(r, T_REDO, STRUCTURE, 1);
        word(r, T_SEMI, STRUCTURE, 1);
        arithmetic(r, x, e.op, y);
        if (!conclusion(r, e.name, right)) fail(r, "the redo is wrong again");
    }
    r->value[e.name] = right;
    r->state[e.name] = listed ? KNOWN : HYPOTHESIS;
    return e.name;
}

static void branch(reader *r) {
    int hypothesis[3], n = 0;
    word(r, T_WHATIF, STRUCTURE, 0);
    word(r, T_COLON, STRUCTURE, 1);
    while (peek(r) == T_STEP) {
        if (n == 3) fail(r, "a branch has at most 3 steps");
        hypothesis[n] = step(r, NULL, n);
        n++;
    }
    if (!n) fail(r, "a branch has at least 1 step");
    int adopted = take(r, T_ABANDON, T_ADOPT, STRUCTURE, 0) == T_ADOPT;
    r->stats->branch++;
    r->stats->branch_length[n]++;
    r->stats->adopted += adopted;
    for (int i = 0; i < n; i++) {
        r->state[hypothesis[i]] = adopted ? ADOPTED : DEAD;
        r->n_live += adopted;
    }
    for (int i = 0; i < n; i++) {
        this_name(r, hypothesis[i], NAME, 1);
        word(r, i + 1 < n ? T_COMMA : T_DOT, STRUCTURE, 1);
    }
}

static void problem(reader *r) {
    static _Thread_local equation list[676];
    int n_premise = 0, n_equation = 0;
    memset(r->state, 0, sizeof r->state);
    r->n_name = r->n_live = 0;
    word(r, T_BOS, SPECIAL, 0);
    word(r, T_GIVEN, STRUCTURE, 0);
    word(r, T_COLON, STRUCTURE, 0);
    for (; peek(r) == T_LET; n_premise++) {
        word(r, T_LET, STRUCTURE, 0);
        int nm = name(r, NAME, 0);
        define(r, nm, KNOWN);
        word(r, T_EQ, STRUCTURE, 0);
        r->value[nm] = value(r, VALUE, 0);
        word(r, T_DOT, STRUCTURE, 0);
    }
    for (; peek(r) != T_SOLVE; n_equation++) {
        equation *e = &list[n_equation];
        e->name = name(r, EQUATION, 0);
        define(r, e->name, LISTED);
        word(r, T_EQ, EQUATION, 0);
        e->first = name(r, EQUATION, 0);
        e->op = take(r, T_PLUS, T_TIMES, EQUATION, 0);
        e->second = e->op == T_TIMES ? take(r, 6, 13, EQUATION, 0) - 4 : name(r, EQUATION, 0);
        int bad = e->first == e->name || r->state[e->first] == UNKNOWN;
        if (e->op != T_TIMES) bad |= e->second == e->name || r->state[e->second] == UNKNOWN;
        if (bad) fail(r, "an equation uses a name that is not defined before it");
        word(r, T_DOT, EQUATION, 0);
    }
    word(r, T_SOLVE, STRUCTURE, 0);
    word(r, T_COLON, STRUCTURE, 0);
    naive_corpus_stats *s = r->stats;
    if (!s->problem || n_equation < s->fewest_equation) s->fewest_equation = n_equation;
    if (!s->problem || n_equation > s->most_equation) s->most_equation = n_equation;
    if (!s->problem || n_premise < s->fewest_premise) s->fewest_premise = n_premise;
    if (!s->problem || n_premise > s->most_premise) s->most_premise = n_premise;
    s->problem++;
    for (int i = 0; i < n_equation; i++) {
        int possible = r->n_name < 670;
        filler(r);
        int branched = peek(r) == T_WHATIF;
        if (branched && !possible) fail(r, "a branch although fresh names are short");
        s->branch_chance += possible;
        if (branched) {
            branch(r);
            filler(r);
        }
        if (r->n_name > s->most_name) s->most_name = r->n_name;
        step(r, &list[i], 0);
    }
    word(r, T_ANSWER, STRUCTURE, 1);
    word(r, T_COLON, STRUCTURE, 1);
    int last = list[n_equation - 1].name;
    this_name(r, last, NAME, 1);
    word(r, T_EQ, STRUCTURE, 1);
    this_digit(r, r->value[last] / 10, VALUE, 3);
    this_digit(r, r->value[last] % 10, VALUE, 3);
    word(r, T_EOS, SPECIAL, 1);
}

int naive_corpus_check(const int32_t *token, const uint8_t *kind, const uint8_t *scored, int32_t n,
                       naive_corpus_stats *stats, char *why) {
    static _Thread_local reader r;
    memset(&r, 0, sizeof r);
    r.token = token, r.kind = kind, r.scored = scored, r.n = n;
    r.stats = stats, r.why = why, r.word = -1;
    make_successors(&r);
    int left = setjmp(r.leave);
    if (left) return left == 2;
    for (;;) problem(&r);
}
