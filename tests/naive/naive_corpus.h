/* An independent reader of the reasoning language: parses a sequence by its grammar and verifies every claim in it. */
#ifndef KV_NAIVE_CORPUS_H
#define KV_NAIVE_CORPUS_H

#include <stdint.h>

typedef struct naive_corpus_stats {
    int64_t problem, step, wrong, branch, adopted, branch_length[4]; /* branch_length[1..3] */
    int64_t branch_chance;       /* listed steps before which a branch was possible */
    int64_t filler, filler_slot; /* words; places where filler may stand */
    /* of branch steps after the first; naming the same branch */
    int64_t later_operand, own_operand;
    /* not of the own branch, with an adopted name at hand; naming one */
    int64_t open_operand, live_operand;
    int64_t operation[3];
    int32_t fewest_equation, most_equation, fewest_premise, most_premise; /* complete statements */
    int32_t most_name; /* names used by a problem */
} naive_corpus_stats;

/* token, kind, scored [n]. Returns 0, or 1 with the reason in `why` [256]. The last problem may be cut off. */
int naive_corpus_check(const int32_t *token, const uint8_t *kind, const uint8_t *scored, int32_t n,
                       naive_corpus_stats *stats, char *why);

#endif
