/* Counter-based random numbers (Philox4x32-10 of Random123): a value depends on its address only, never on the order of calls,
 * and is the same on the CPU and on the GPU. */
#ifndef KV_CORE_RAND_H
#define KV_CORE_RAND_H

#include <stdint.h>

typedef struct kv_rand4 {
    uint32_t v[4];
} kv_rand4;

/* Four words at address (a, b, c, d) of stream `seed`. */
kv_rand4 kv_rand(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

double kv_rand_uniform(uint64_t seed, uint32_t a, uint32_t b, uint32_t c,
                       uint32_t d); /* in (0,1), 53 bits */
double kv_rand_normal(uint64_t seed, uint32_t a, uint32_t b, uint32_t c,
                      uint32_t d); /* Box-Muller, double */

/* A sequential reader over one stream, for generators (corpus, test cases). */
typedef struct kv_rng {
    uint64_t seed, next;
    uint32_t stream;
} kv_rng;
kv_rng kv_rng_make(uint64_t seed, uint32_t stream);
uint64_t kv_rng_u64(kv_rng *r);
double kv_rng_uniform(kv_rng *r);             /* in [0,1), 53 bits */
uint32_t kv_rng_below(kv_rng *r, uint32_t n); /* in [0,n), n >= 1, unbiased to 2^-32 */

#endif
