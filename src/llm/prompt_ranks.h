/* What the network says of the tokens of a prompt, kept without the room for more that a cpa_token_ranks has. */
#ifndef CPA_LLM_PROMPT_RANKS_H
#define CPA_LLM_PROMPT_RANKS_H

#include <cpattn/nn.h>

/* Of the tokens at 1, 2, ... of a prompt; nothing is said of the first. One of zeros takes none. */
typedef struct cpa_prompt_ranks {
    int64_t count, most; /* tokens whose ranks have come, and how many there will be */
    int32_t top;
    float *logprobs;         /* [most] */
    int32_t *ranks;          /* [most] */
    cpa_token_logprob *tops; /* [most, top] */
} cpa_prompt_ranks;

/* For a prompt of so many tokens, with `top` of the most probable ones beside each; 0 without memory. */
int cpa_prompt_ranks_open(int64_t tokens, int32_t top, cpa_prompt_ranks *out);
void cpa_prompt_ranks_close(cpa_prompt_ranks *ranks);

/* Takes what is said of a position, if that is the next one. */
void cpa_prompt_ranks_add(cpa_prompt_ranks *ranks, int64_t position, const cpa_token_ranks *said);

/* What was said of a position, with CPA_NO_TOKEN behind the last of the most probable; 0: nothing, by the time that
 * there were `count`. */
int cpa_prompt_ranks_at(const cpa_prompt_ranks *ranks, int64_t count, int64_t position, cpa_token_ranks *out);

#endif
