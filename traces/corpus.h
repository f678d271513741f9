/* The reasoning language (shared model README): seeded problems of long arithmetic with dead ends and a checkable answer. */
#ifndef KV_CORPUS_H
#define KV_CORPUS_H

#include <stdint.h>

#include "reference/core/status.h"

enum {
    KV_KIND_SPECIAL,
    KV_KIND_VALUE,
    KV_KIND_SCRATCH,
    KV_KIND_NAME,
    KV_KIND_STRUCTURE,
    KV_KIND_FILLER,
    KV_KIND_EQUATION
};
enum { KV_SCORED_NONE, KV_SCORED_DETERMINISTIC, KV_SCORED_RECALL, KV_SCORED_RESULT };
enum { KV_TOKEN_EOS = 2, KV_TOKEN_ANSWER = 60 }; /* answer : x y = d d <eos> ends a problem */

/* One sequence of `length` tokens for `seed`: token [length], kind [length], scored [length]. Number of equations and the other
 * settings follow contract.md 4 ("Default corpus"). KV_E_USAGE names an unknown corpus or a length below 64. */
kv_status kv_corpus_generate(const char *name, uint64_t seed, int32_t length, int32_t *token,
                             uint8_t *kind, uint8_t *scored);
const char *kv_corpus_version(const char *name); /* "reasoning/2" */

#endif
