#include "src/llm/prompt_ranks.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int cpa_prompt_ranks_open(int64_t tokens, int32_t top, cpa_prompt_ranks *out) {
    const size_t most = (size_t)(tokens - 1);
    cpa_prompt_ranks ranks = {.most = tokens - 1, .top = top};
    ranks.logprobs = calloc(most + 1, sizeof *ranks.logprobs);
    ranks.ranks = calloc(most + 1, sizeof *ranks.ranks);
    ranks.tops = calloc(most * (size_t)top + 1, sizeof *ranks.tops);
    *out = ranks;
    if (ranks.logprobs && ranks.ranks && ranks.tops) return 1;
    cpa_prompt_ranks_close(out);
    return 0;
}

void cpa_prompt_ranks_close(cpa_prompt_ranks *ranks) {
    free(ranks->logprobs);
    free(ranks->ranks);
    free(ranks->tops);
    *ranks = (cpa_prompt_ranks){.count = 0};
}

void cpa_prompt_ranks_add(cpa_prompt_ranks *ranks, int64_t position, const cpa_token_ranks *said) {
    if (position != ranks->count + 1 || ranks->count == ranks->most) return;
    ranks->logprobs[ranks->count] = said->logprob;
    ranks->ranks[ranks->count] = said->rank;
    memcpy(ranks->tops + ranks->count * ranks->top, said->top, (size_t)ranks->top * sizeof *said->top);
    ranks->count++;
}

int cpa_prompt_ranks_at(const cpa_prompt_ranks *ranks, int64_t count, int64_t position, cpa_token_ranks *out) {
    if (position < 1 || position > count) return 0;
    const cpa_token_logprob *tops = ranks->tops + (position - 1) * ranks->top;
    out->logprob = ranks->logprobs[position - 1];
    out->rank = ranks->ranks[position - 1];
    for (int32_t i = 0; i < CPA_MOST_TOP_LOGPROBS; i++)
        out->top[i] = i < ranks->top ? tops[i] : (cpa_token_logprob){CPA_NO_TOKEN, NAN};
    return 1;
}
