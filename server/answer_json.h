/* Answers as the JSON of OpenAI's interface, with the fields that vLLM's server adds to it (stop_reason,
 * prompt_token_ids, token_ids, prompt_logprobs). All functions return NULL without memory. */
#ifndef CPA_SERVER_ANSWER_JSON_H
#define CPA_SERVER_ANSWER_JSON_H

#include <jansson.h>

#include "server/answer.h"

/* A whole answer. */
json_t *cpa_answer_json(const cpa_answer *answer);

/* What can be said now of one choice, as a chunk of a stream. */
json_t *cpa_chunk_json(const cpa_answer *answer, int64_t choice);

/* The chunk that ends a stream with include_usage: no choices, but usage. */
json_t *cpa_usage_chunk_json(const cpa_answer *answer);

#endif
