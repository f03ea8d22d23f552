/* What a request asks to be drawn, or not: its constraint, biases of logits, and how many tokens come before its end. */
#ifndef CPA_REQUEST_LIMITS_H
#define CPA_REQUEST_LIMITS_H

#include <cpattn/engine.h>

#include "src/schedule/step_plan.h"

/* CPA_INVALID, with the numbers, for what can be no limit; CPA_UNSUPPORTED where the network draws by none. */
cpa_status cpa_request_check_limits(const cpa_request *request, const cpa_sampling *sampling, const cpa_model *network,
                                    int draws, cpa_error *err);

/* The biases of a request, those of logit_biases and, with min_tokens, those that keep out the n tokens that end it, as
 * plans have them: counts to *plan, and the list, which the caller frees, to *out. *ends is put in order. CPA_INVALID if
 * there are more than plans take. */
cpa_status cpa_request_plan_biases(uint64_t request, const cpa_sampling *sampling, uint32_t *ends, int64_t n,
                                   cpa_plan_sampling *plan, cpa_plan_bias **out, cpa_error *err);

#endif
