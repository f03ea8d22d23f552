/* rank_tokens: the most probable tokens of a row are kept in order while it is read. */
#include <math.h>

#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/host/nn/log_softmax.h"
#include "kernels/host/nn/nn.h"

/* The n largest logits in their order, as pairs with these in place of log-probabilities; of equal ones the first. */
static void find_largest(const float *logits, int64_t vocabulary, int64_t n, cpa_token_logprob *largest) {
    int64_t found = 0;
    for (int64_t t = 0; n > 0 && t < vocabulary; t++) {
        if (found == n && !(logits[t] > largest[n - 1].logprob)) continue;
        int64_t at = found < n ? found++ : n - 1;
        for (; at > 0 && logits[t] > largest[at - 1].logprob; at--) largest[at] = largest[at - 1];
        largest[at] = (cpa_token_logprob){(uint32_t)t, logits[t]};
    }
}

static int64_t count_larger(const float *logits, int64_t vocabulary, float than) {
    int64_t larger = 0;
    for (int64_t t = 0; t < vocabulary; t++) larger += logits[t] > than;
    return larger;
}

static void rank_row(void *ctx, int64_t row, int32_t thread) {
    const cpa_rank_tokens_args *a = ctx;
    const float *logits = a->logits + row * a->logits_stride;
    const uint32_t token = a->tokens[row * a->tokens_stride];
    const double log_sum = cpa_host_log_sum(logits, a->vocabulary);
    cpa_token_ranks *out = &a->ranks[row];
    int64_t n = 0;
    (void)thread;
    *out = (cpa_token_ranks){.logprob = NAN};
    if (log_sum == log_sum) { /* not a NaN */
        n = a->top ? cpa_min64(cpa_max64(a->top[row], 0), cpa_min64(CPA_MOST_TOP_LOGPROBS, a->vocabulary)) : 0;
        find_largest(logits, a->vocabulary, n, out->top);
        for (int64_t i = 0; i < n; i++) out->top[i].logprob = (float)((double)out->top[i].logprob - log_sum);
        if (token < a->vocabulary) {
            out->logprob = (float)((double)logits[token] - log_sum);
            out->rank = 1 + (int32_t)count_larger(logits, a->vocabulary, logits[token]);
        }
    }
    for (; n < CPA_MOST_TOP_LOGPROBS; n++) out->top[n] = (cpa_token_logprob){CPA_NO_TOKEN, NAN};
    if (a->logprobs) a->logprobs[row * a->logprobs_stride] = out->logprob;
}

cpa_status cpa_host_rank_tokens(const cpa_rank_tokens_args *args, cpa_stream *stream) {
    cpa_rank_tokens_args copy = *args;
    cpa_host_run(stream, args->rows, rank_row, &copy);
    return CPA_OK;
}
