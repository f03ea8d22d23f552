/* Log-probabilities as the JSON of OpenAI's interface, and as vLLM's server has those of prompts. NULL without
 * memory. */
#ifndef CPA_SERVER_LOGPROBS_JSON_H
#define CPA_SERVER_LOGPROBS_JSON_H

#include <jansson.h>

#include "server/answer.h"

/* Of the tokens that a choice has now, and of its prompt where that is echoed now; null where there is nothing. */
json_t *cpa_logprobs_json(const cpa_answer *answer, int64_t choice);

/* Of the prompt of a choice: null for the first token; for each other {ID: {"logprob", "rank", "decoded_token"}} of it
 * and of the most probable ones. */
json_t *cpa_prompt_logprobs_json(const cpa_answer *answer, int64_t choice);

#endif
