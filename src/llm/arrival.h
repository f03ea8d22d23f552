/* What has come of one request of an engine and was not read yet: the engine's thread adds, another reads. Whoever has
 * one guards it. */
#ifndef CPA_LLM_ARRIVAL_H
#define CPA_LLM_ARRIVAL_H

#include <cpattn/engine.h>

typedef struct cpa_output_token {
    uint32_t id;
    float logprob;
} cpa_output_token;

/* One of zeros is empty. */
typedef struct cpa_arrival {
    cpa_output_token *tokens; /* [count] */
    int64_t count, capacity;
    cpa_token_ranks *ranks; /* [count] ranks and log-probabilities, where wanted */
    int64_t ranks_capacity;
    cpa_token_ranks next_ranks; /* those of the token that comes next, where has_next_ranks */
    int has_next_ranks;
    int64_t prompt_ranked; /* prompt tokens so far of which log-probabilities were told */
    int has_ended;         /* nothing more comes; `reason` says why */
    cpa_finish_reason reason;
    char error[256]; /* why, with CPA_FINISH_FAILED */
} cpa_arrival;

void cpa_arrival_release(cpa_arrival *arrival);

/* What the logits say of the token that comes next; it arrives with that token, however often is collected between. */
void cpa_arrival_add_ranks(cpa_arrival *arrival, const cpa_token_ranks *ranks);
/* Adds a token, with its ranks where they have come. Without memory the request ends as failed. */
void cpa_arrival_add_token(cpa_arrival *arrival, uint32_t token, float logprob);

/* Nothing more comes; where that was so already, it ended as it did then. `error`: why it failed, or NULL. */
void cpa_arrival_end(cpa_arrival *arrival, cpa_finish_reason reason, const char *error);

/* Moves what has come to *out, whose arrays take its place for what comes next. */
void cpa_arrival_collect(cpa_arrival *arrival, cpa_arrival *out);

#endif
