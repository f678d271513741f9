/* From static priorities to evict_at: radix ranks, the running cutoff (bitmap pointer and Fenwick tree), all KV heads of a span.
 * Source: maths.md 3.4-3.7, contract.md 1. */
#include "reference/select.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "reference/core/mem.h"
#include "reference/core/num.h"

enum { DIGIT = 11, BUCKETS = 1 << DIGIT, PASSES = 3 };
enum { FORK_TOKENS = 1 << 13 }; /* below, waking threads costs more than the work */

/* Stable sort of key[n], (~ordered(priority)) << 32 | t, by the upper half; t already ascends. The result lies in the returned one
 * of the two arrays. */
static uint64_t *radix_sort(uint64_t *key, uint64_t *spare, int32_t n, int32_t *count) {
    memset(count, 0, sizeof(int32_t) * PASSES * BUCKETS);
    for (int32_t i = 0; i < n; i++)
        for (int pass = 0; pass < PASSES; pass++)
            count[pass * BUCKETS + (int)((key[i] >> (32 + pass * DIGIT)) & (BUCKETS - 1))]++;
    for (int pass = 0; pass < PASSES; pass++) {
        int32_t *c = count + pass * BUCKETS, sum = 0;
        int shift = 32 + pass * DIGIT;
        if (c[(key[0] >> shift) & (BUCKETS - 1)] == n) continue;
        for (int b = 0; b < BUCKETS; b++) {
            int32_t here = c[b];
            c[b] = sum;
            sum += here;
        }
        for (int32_t i = 0; i < n; i++) spare[c[(key[i] >> shift) & (BUCKETS - 1)]++] = key[i];
        uint64_t *swap = key;
        key = spare;
        spare = swap;
    }
    return key;
}

kv_status kv_rank(const float *priority, int32_t n, int32_t *rank, int32_t *at) {
    kv_status st = KV_OK;
    uint64_t *key = NULL, *spare = NULL;
    int32_t *count = NULL;
    if (n <= 0) goto out;
    KV_NEW(key, n);
    KV_NEW(spare, n);
    KV_NEW(count, PASSES * BUCKETS);
    for (int32_t t = 0; t < n; t++) {
        if (isnan(priority[t]))
            KV_RAISE(KV_E_DATA, "the priority of token %d is NaN; a policy must give numbers", t);
        key[t] = (uint64_t)~kv_ordered(priority[t]) << 32 | (uint32_t)t;
    }
    const uint64_t *sorted = radix_sort(key, spare, n, count);
    for (int32_t i = 0; i < n; i++) {
        at[i] = (int32_t)(uint32_t)sorted[i];
        rank[at[i]] = i;
    }
out:
    free(key);
    free(spare);
    free(count);
    return st;
}

/* Largest set bit below `below`, which exists by the caller's invariant. */
static int32_t previous_set_bit(const uint64_t *bits, int32_t below) {
    int32_t word = below >> 6;
    uint64_t here = bits[word] & ((UINT64_C(1) << (below & 63)) - 1);
    while (!here) here = bits[--word];
    return word * 64 + 63 - __builtin_clzll(here);
}

kv_status kv_cutoff_pointer(const int32_t *rank, const int32_t *at, int32_t n, int32_t sinks,
                            int32_t window, int32_t k, int32_t *evict_at, int32_t *tau) {
    kv_status st = KV_OK;
    uint64_t *bits = NULL; /* one bit per rank: eligible and kept */
    KV_NEW(bits, n / 64 + 1);
    int32_t cut = -1; /* worst kept rank */
    for (int32_t t = 0; t < n; t++) evict_at[t] = KV_NEVER;
    for (int32_t q = 0; q < n; q++) {
        int32_t t = q - window, eligible = t - sinks + 1;
        if (eligible >= 1) {
            int32_t x = rank[t];
            if (eligible > k && x > cut) { /* with k = 0 always */
                evict_at[t] = q;
            } else {
                bits[x >> 6] |= UINT64_C(1) << (x & 63);
                if (eligible <= k) {
                    cut = x > cut ? x : cut;
                } else {
                    evict_at[at[cut]] = q;
                    cut = previous_set_bit(bits, cut);
                }
            }
        }
        if (tau) tau[q] = eligible >= k ? cut : n;
    }
out:
    free(bits);
    return st;
}

/* Smallest 0-based rank whose prefix count reaches k (maths.md 3.5). tree [n + 1] holds at least k entries. */
static int32_t rank_of_kth(const int32_t *tree, int32_t n, int32_t k) {
    int32_t at = 0, step = 1;
    while (step <= n / 2) step *= 2;
    for (; step > 0; step /= 2) {
        if (at + step > n || tree[at + step] >= k) continue;
        at += step;
        k -= tree[at];
    }
    return at;
}

kv_status kv_cutoff_fenwick(const int32_t *rank, int32_t n, int32_t sinks, int32_t window,
                            int32_t k, int32_t *tau) {
    kv_status st = KV_OK;
    int32_t *tree = NULL, count = 0;
    if (k < 1) KV_RAISE(KV_E_INTERNAL, "the Fenwick cutoff needs k >= 1, found %d", k);
    KV_NEW(tree, n + 1);
    for (int32_t q = 0; q < n; q++) {
        int32_t t = q - window;
        if (t >= sinks) {
            for (int32_t i = rank[t] + 1; i <= n; i += i & -i) tree[i]++;
            count++;
        }
        tau[q] = count >= k ? rank_of_kth(tree, n, k) : n;
    }
out:
    free(tree);
    return st;
}

static kv_status select_head(const kv_run *run, const float *priority, int32_t n,
                             int32_t *evict_at) {
    kv_status st = KV_OK;
    int32_t *rank = NULL, *at = NULL;
    KV_NEW(rank, n);
    KV_NEW(at, n);
    KV_TRY(kv_rank(priority, n, rank, at));
    KV_TRY(kv_cutoff_pointer(rank, at, n, run->sinks, run->window,
                             run->budget - run->sinks - run->window, evict_at, NULL));
out:
    free(rank);
    free(at);
    return st;
}

kv_status kv_select(const kv_span *span, const kv_run *run, const float *priority,
                    int32_t *evict_at) {
    kv_status st = KV_OK, *head = NULL;
    KV_NEW(head, span->n_kv_head);
#pragma omp parallel for schedule(dynamic) if (span->n_kv_head * span->n_token >= FORK_TOKENS)
    for (int32_t h = 0; h < span->n_kv_head; h++)
        head[h] = select_head(run, priority + h * span->stride, span->n_token,
                              evict_at + h * span->stride);
    /* The message of a failure stays in the thread that met it; a second attempt brings it here. */
    for (int32_t h = 0; h < span->n_kv_head; h++) {
        if (head[h] == KV_OK) continue;
        st = select_head(run, priority + h * span->stride, span->n_token,
                         evict_at + h * span->stride);
        if (st == KV_OK) continue;
        kv_error_context(st, "layer %d, KV head %d", span->layer_id, h);
        goto out;
    }
out:
    free(head);
    return st;
}
