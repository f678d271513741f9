/* Accuracy written out; one pass per number. */
#include "tests/naive/naive_accuracy.h"

#include <math.h>
#include <stdbool.h>

static int argmax(const float *row, int32_t vocab) {
    int best = 0;
    for (int i = 0; i < vocab; i++)
        if (row[i] > row[best]) best = i;
    return best;
}

static double log_probability(const float *row, int32_t vocab, int i) {
    double sum = 0;
    for (int j = 0; j < vocab; j++) sum += exp((double)row[j]);
    return (double)row[i] - log(sum);
}

/* Share of right tokens with this `scored` among the counted ones. */
static double token_accuracy(const float *policy, int32_t vocab, const int32_t *token,
                             const uint8_t *scored, const int64_t *doc, int32_t n_doc, int which,
                             int64_t *n) {
    double right = 0;
    *n = 0;
    for (int d = 0; d < n_doc; d++)
        for (int64_t i = doc[d] + 1; i < doc[d + 1]; i++) {
            double x = (double)(i - doc[d]), length = (double)(doc[d + 1] - doc[d]);
            if (!(x - 1 > length / 4) || scored[i] != which) continue;
            right += argmax(policy + (i - 1) * vocab, vocab) == token[i];
            ++*n;
        }
    return right / (double)*n;
}

static double problem_accuracy(const float *policy, int32_t vocab, const int32_t *token,
                               const uint8_t *scored, const int64_t *doc, int32_t n_doc,
                               int64_t *n) {
    double right = 0;
    *n = 0;
    for (int d = 0; d < n_doc; d++)
        for (int64_t end = doc[d]; end < doc[d + 1]; end++) {
            if (token[end] != 2) continue;
            double x = (double)(end - doc[d]), length = (double)(doc[d + 1] - doc[d]);
            int64_t start = end - 1;
            while (start >= doc[d] && token[start] != 60 && token[start] != 2) start--;
            if (start < doc[d] || token[start] != 60 || !(x - 1 > length / 4)) continue;
            bool all = true;
            int digits = 0;
            for (int64_t i = start + 1; i < end; i++)
                if (scored[i] == 3) {
                    digits++;
                    all = all && argmax(policy + (i - 1) * vocab, vocab) == token[i];
                }
            if (!digits) continue;
            right += all;
            ++*n;
        }
    return right / (double)*n;
}

kv_accuracy naive_accuracy(const float *full, const float *policy, int32_t vocab,
                           const int32_t *token, const uint8_t *scored, const int64_t *doc,
                           int32_t n_doc) {
    kv_accuracy a = {0};
    double agreed = 0, kl = 0;
    a.deterministic =
        token_accuracy(policy, vocab, token, scored, doc, n_doc, 1, &a.n_deterministic);
    a.recall = token_accuracy(policy, vocab, token, scored, doc, n_doc, 2, &a.n_recall);
    a.result = token_accuracy(policy, vocab, token, scored, doc, n_doc, 3, &a.n_result);
    a.problem = problem_accuracy(policy, vocab, token, scored, doc, n_doc, &a.n_problem);
    for (int d = 0; d < n_doc; d++)
        for (int64_t i = doc[d] + 1; i < doc[d + 1]; i++) {
            double x = (double)(i - doc[d]), length = (double)(doc[d + 1] - doc[d]);
            if (!(x - 1 > length / 4) || scored[i] == 0) continue;
            const float *f = full + (i - 1) * vocab, *p = policy + (i - 1) * vocab;
            agreed += argmax(f, vocab) == argmax(p, vocab);
            for (int j = 0; j < vocab; j++) {
                double lf = log_probability(f, vocab, j), lp = log_probability(p, vocab, j);
                kl += exp(lf) * (lf - lp);
            }
            a.n_scored++;
        }
    a.agreement = agreed / (double)a.n_scored;
    a.kl = kl / (double)a.n_scored;
    return a;
}
