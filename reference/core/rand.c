/* Philox4x32-10 streams. */
#include "reference/core/rand.h"

#include <Random123/philox.h>
#include <math.h>

kv_rand4 kv_rand(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    philox4x32_ctr_t counter = {{a, b, c, d}};
    philox4x32_key_t key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
    philox4x32_ctr_t r = philox4x32(counter, key);
    return (kv_rand4){{r.v[0], r.v[1], r.v[2], r.v[3]}};
}

static double open_unit(uint32_t high, uint32_t low) {
    uint64_t bits = ((uint64_t)high << 32 | low) >> 12;
    return ((double)bits + 0.5) * 0x1p-52;
}

double kv_rand_uniform(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    kv_rand4 r = kv_rand(seed, a, b, c, d);
    return open_unit(r.v[0], r.v[1]);
}

double kv_rand_normal(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    kv_rand4 r = kv_rand(seed, a, b, c, d);
    double radius = sqrt(-2.0 * log(open_unit(r.v[0], r.v[1])));
    return radius * cos(6.283185307179586476925 * open_unit(r.v[2], r.v[3]));
}

kv_rng kv_rng_make(uint64_t seed, uint32_t stream) { return (kv_rng){seed, 0, stream}; }

uint64_t kv_rng_u64(kv_rng *r) {
    uint64_t at = r->next++;
    kv_rand4 x =
        kv_rand(r->seed, (uint32_t)(at >> 1), (uint32_t)(at >> 33), r->stream, 0x6b766c62u);
    return (at & 1) ? (uint64_t)x.v[2] << 32 | x.v[3] : (uint64_t)x.v[0] << 32 | x.v[1];
}

double kv_rng_uniform(kv_rng *r) { return (double)(kv_rng_u64(r) >> 11) * 0x1p-53; }

uint32_t kv_rng_below(kv_rng *r, uint32_t n) {
    return (uint32_t)(((kv_rng_u64(r) >> 32) * n) >> 32);
}
