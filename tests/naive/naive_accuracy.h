/* Accuracy written out as contract.md 3 says it, from the logits of every position. */
#ifndef KV_NAIVE_ACCURACY_H
#define KV_NAIVE_ACCURACY_H

#include "experiments/accuracy.h"

/* full, policy [n_token][vocab]: row x holds the logits after token x. doc_first [n_doc + 1]. `seconds` is not set. */
kv_accuracy naive_accuracy(const float *full, const float *policy, int32_t vocab,
                           const int32_t *token, const uint8_t *scored, const int64_t *doc_first,
                           int32_t n_doc);

#endif
