#include "src/engine/request_limits.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "base/check.h"

static cpa_status check_constraint(const cpa_request *request, int draws, cpa_error *err) {
    const cpa_constraint_ops *ops = request->constraint;
    if (!ops) return CPA_OK;
    if (ops->size < sizeof *ops || !ops->accept || !ops->mask)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": its constraint has size %zu, expected %zu or more, and accept and mask",
                        request->id, ops->size, sizeof *ops);
    if (!draws)
        return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": a constraint, where output tokens are given",
                        request->id);
    return CPA_OK;
}

static cpa_status check_bias(uint64_t request, const cpa_sampling *s, int64_t i, int32_t vocabulary, cpa_error *err) {
    const cpa_logit_bias *bias = &s->logit_biases[i];
    if (bias->token >= (uint32_t)vocabulary || !isfinite(bias->bias))
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": logit bias %g of token %" PRIu32
                        "; expected a finite one, of a token below %" PRId32,
                        request, (double)bias->bias, bias->token, vocabulary);
    for (int64_t j = 0; j < i; j++)
        if (s->logit_biases[j].token == bias->token)
            return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": two logit biases of token %" PRIu32, request,
                            bias->token);
    return CPA_OK;
}

cpa_status cpa_request_check_limits(const cpa_request *request, const cpa_sampling *s, const cpa_model *network,
                                    int draws, cpa_error *err) {
    if (s->n_logit_biases < 0 || s->n_logit_biases > CPA_MOST_LOGIT_BIASES ||
        (s->n_logit_biases > 0 && !s->logit_biases))
        return cpa_fail(err, CPA_INVALID, "request %" PRIu64 ": %" PRId64 " logit_biases at %p, expected at most %d",
                        request->id, s->n_logit_biases, (const void *)s->logit_biases, CPA_MOST_LOGIT_BIASES);
    if (s->min_tokens < 0 || s->min_tokens > request->output_tokens)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": min_tokens %" PRId64 ", expected 0 to its %" PRId64 " output tokens",
                        request->id, s->min_tokens, request->output_tokens);
    CPA_TRY(check_constraint(request, draws, err));
    if (!draws || !(request->constraint || s->n_logit_biases > 0 || s->min_tokens > 0)) return CPA_OK;
    if (network->vocabulary <= 0)
        return cpa_fail(err, CPA_UNSUPPORTED,
                        "request %" PRIu64
                        ": a constraint, logit_biases or min_tokens, but the network does not tell "
                        "its vocabulary",
                        request->id);
    for (int64_t i = 0; i < s->n_logit_biases; i++) CPA_TRY(check_bias(request->id, s, i, network->vocabulary, err));
    return CPA_OK;
}

static int compare_ids(const void *a, const void *b) {
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static int compare_biases(const void *a, const void *b) {
    return compare_ids(&((const cpa_plan_bias *)a)->token, &((const cpa_plan_bias *)b)->token);
}

cpa_status cpa_request_plan_biases(uint64_t request, const cpa_sampling *s, uint32_t *ends, int64_t n,
                                   cpa_plan_sampling *plan, cpa_plan_bias **out, cpa_error *err) {
    int64_t n_ends = 0;
    if (s->min_tokens > 0 && n > 0) {
        qsort(ends, (size_t)n, sizeof *ends, compare_ids);
        for (int64_t i = 0; i < n; i++)
            if (i == 0 || ends[i] != ends[i - 1]) ends[n_ends++] = ends[i];
    }
    if (s->n_logit_biases + n_ends > CPA_PLAN_MOST_BIASES)
        return cpa_fail(err, CPA_INVALID,
                        "request %" PRIu64 ": %" PRId64 " logit_biases and, with min_tokens, %" PRId64
                        " tokens that end it; expected at most %d together",
                        request, s->n_logit_biases, n_ends, CPA_PLAN_MOST_BIASES);
    cpa_plan_bias *biases = malloc((size_t)(s->n_logit_biases + n_ends) * sizeof *biases + 1);
    if (!biases) return cpa_fail(err, CPA_NO_MEMORY, "request %" PRIu64 ": no memory", request);
    for (int64_t i = 0; i < s->n_logit_biases; i++)
        biases[i] = (cpa_plan_bias){s->logit_biases[i].token, s->logit_biases[i].bias};
    qsort(biases, (size_t)s->n_logit_biases, sizeof *biases, compare_biases);
    for (int64_t i = 0; i < n_ends; i++) biases[s->n_logit_biases + i] = (cpa_plan_bias){ends[i], -INFINITY};
    plan->min_tokens = s->min_tokens;
    plan->n_biases = s->n_logit_biases;
    plan->n_ends = n_ends;
    *out = biases;
    return CPA_OK;
}
