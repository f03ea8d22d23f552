#include "src/llm/arrival.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/array.h"

void cpa_arrival_release(cpa_arrival *arrival) {
    free(arrival->tokens);
    free(arrival->ranks);
    *arrival = (cpa_arrival){.count = 0};
}

void cpa_arrival_end(cpa_arrival *arrival, cpa_finish_reason reason, const char *error) {
    if (arrival->has_ended) return;
    arrival->has_ended = 1;
    arrival->reason = reason;
    snprintf(arrival->error, sizeof arrival->error, "%s", error ? error : "");
}

void cpa_arrival_add_ranks(cpa_arrival *arrival, const cpa_token_ranks *ranks) {
    arrival->next_ranks = *ranks;
    arrival->has_next_ranks = 1;
}

static int reserve(cpa_arrival *arrival) {
    const int64_t n = arrival->count + 1;
    if (!cpa_array_reserve(&arrival->tokens, &arrival->capacity, n, sizeof *arrival->tokens)) return 0;
    return !arrival->has_next_ranks ||
           cpa_array_reserve(&arrival->ranks, &arrival->ranks_capacity, n, sizeof *arrival->ranks);
}

void cpa_arrival_add_token(cpa_arrival *arrival, uint32_t token, float logprob) {
    if (!reserve(arrival)) {
        cpa_arrival_end(arrival, CPA_FINISH_FAILED, "no memory for the answer");
        return;
    }
    arrival->tokens[arrival->count] = (cpa_output_token){.id = token, .logprob = logprob};
    if (arrival->has_next_ranks) arrival->ranks[arrival->count] = arrival->next_ranks;
    arrival->has_next_ranks = 0;
    arrival->count++;
}

void cpa_arrival_collect(cpa_arrival *arrival, cpa_arrival *out) {
    const cpa_arrival emptied = *out;
    *out = *arrival;
    arrival->tokens = emptied.tokens;
    arrival->capacity = emptied.capacity;
    arrival->ranks = emptied.ranks;
    arrival->ranks_capacity = emptied.ranks_capacity;
    arrival->count = 0;
}
