/* Compares the logits that a run gave with those of a plain forward. */
#ifndef CPA_MODEL_LOGITS_CHECK_H
#define CPA_MODEL_LOGITS_CHECK_H

#include <cpattn/engine.h>

#include "src/model/logits_sample.h"
#include "src/model/plain_forward.h"

/* What the tokens of the requests are. */
typedef struct cpa_logits_tokens {
    void *ctx;
    uint32_t (*token_at)(void *ctx, uint64_t request, int64_t position);
    /* How many tokens a request has, prompt and output; 0: it is not known. Records behind its end are passed over:
     * rows that were computed before the end was known. */
    int64_t (*count)(void *ctx, uint64_t request);
} cpa_logits_tokens;

typedef struct cpa_logits_verdict {
    int64_t tokens;     /* tokens that were compared */
    int64_t violations; /* compared tokens whose logits are wrong */
    int64_t turned;     /* compared tokens whose logits are right by another choice of experts, which rounding allows */
    double max_error;   /* the largest distance of a logit from the reference */
    /* The token whose error is the largest multiple of what is allowed: root mean squares over the vocabulary. */
    uint64_t worst_request;
    int64_t worst_position;
    double worst_error, worst_allowed;
} cpa_logits_verdict;

/* The reference is the plain forward in fp32. A token's logits may be, in the root mean square over the vocabulary,
 * three times as far from it as those of a plain forward that rounds to `dtype`, and 1/1000 of the reference's own
 * spread further: other orders of sums.
 *
 * Where the scores of two experts, or of two groups, differ by less than rounding to `dtype` may move them, taken as
 * three times what it moves those of the token by, a right computation may take the other one, and its logits are far
 * off. So a token whose logits are wrong is compared with plain forwards in fp32 in which it takes another choice in one
 * layer, the six nearest ones at most; it is right if it is as near to one of them as it would have to be to the
 * reference. What one token is found to have chosen holds for those behind it; what tokens that are not compared have
 * chosen, and two choices of one token in two layers, are not looked for.
 *
 * *out is set only on success; violations are no failure. */
cpa_status cpa_logits_check(const cpa_model_config *config, const cpa_safetensors *files, cpa_dtype dtype,
                            const cpa_logits_sample *sample, const cpa_logits_tokens *tokens, cpa_logits_verdict *out,
                            cpa_error *err);

#endif
