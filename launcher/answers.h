/* The tokens of the requests of a workload: prompts, and what came. */
#ifndef CPA_LAUNCHER_ANSWERS_H
#define CPA_LAUNCHER_ANSWERS_H

#include "program/workload.h"

/* Of one request. */
typedef struct cpa_answered_request {
    uint64_t request;
    int64_t prompt_tokens;
    int64_t count; /* 0 until it has ended */
    uint32_t *tokens;
} cpa_answered_request;

/* One that was never opened has only zeros. */
typedef struct cpa_answers {
    cpa_answered_request *answers; /* by request */
    int64_t count;
    cpa_vocabulary_tokens *prompts;
} cpa_answers;

/* For the workload whose prompts `prompts` gives, which must outlive it. *out is set only on success. */
cpa_status cpa_answers_open(cpa_vocabulary_tokens *prompts, cpa_answers *out, cpa_error *err);
void cpa_answers_close(cpa_answers *answers);

/* Keeps the tokens of a request that has ended. Those of other requests are passed over. Without memory it keeps
 * none. */
void cpa_answers_take(cpa_answers *answers, const cpa_request_result *result);

/* With cpa_answers as their ctx: the token at a position, and how many are known, of prompt and output; 0 of a request
 * that has not ended. */
uint32_t cpa_answers_token(void *answers, uint64_t request, int64_t position);
int64_t cpa_answers_count(void *answers, uint64_t request);

#endif
