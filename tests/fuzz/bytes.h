/* The fuzzer's input as a stream of decisions; 0 for ever once it is used up. */
#ifndef KV_FUZZ_BYTES_H
#define KV_FUZZ_BYTES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct bytes {
    const uint8_t *at;
    size_t left;
} bytes;

static inline uint8_t take(bytes *b) {
    if (!b->left) return 0;
    b->left--;
    return *b->at++;
}

/* 0..n-1 */
static inline uint32_t pick(bytes *b, uint32_t n) { return take(b) % n; }

static inline void take_into(bytes *b, void *out, size_t n) {
    size_t have = n < b->left ? n : b->left;
    memset(out, 0, n);
    memcpy(out, b->at, have);
    b->at += have;
    b->left -= have;
}

#endif
