#include "src/engine/request_record.h"

#include <stdlib.h>
#include <string.h>

void cpa_request_append(cpa_request_list *list, cpa_engine_request *request) {
    request->next = NULL;
    *(list->first ? &list->last->next : &list->first) = request;
    list->last = request;
}

cpa_engine_request *cpa_request_take(cpa_request_list *list) {
    cpa_engine_request *first = list->first;
    if (first) list->first = first->next;
    return first;
}

void cpa_request_free(cpa_engine_request *request) {
    if (request->constraint.close) request->constraint.close(request->constraint_ctx);
    free(request->biases);
    free(request->stop_ids);
    free(request->salt);
    free(request->tenant);
    free(request->logprobs);
    free(request->ranks);
    free(request->prompt_ranks);
    free(request->tokens);
    free(request->token_s);
    free(request);
}

/* A copy of what is given, of n entries; NULL without memory. */
static void *copy_of(const void *entries, int64_t n, size_t bytes) {
    void *copy = malloc((size_t)n * bytes + 1);
    if (copy && n > 0) memcpy(copy, entries, (size_t)n * bytes);
    return copy;
}

cpa_engine_request *cpa_request_create(const cpa_scheduler_request *given, const cpa_request_terms *terms) {
    cpa_engine_request *request = calloc(1, sizeof *request);
    if (!request) return NULL;
    request->scheduled = *given;
    request->salt = strdup(given->salt ? given->salt : "");
    request->scheduled.salt = request->salt;
    request->tenant = given->tenant ? strdup(given->tenant) : NULL;
    request->scheduled.tenant = request->tenant;
    request->stop_ids = copy_of(terms->stop_ids, terms->n_stop_ids, sizeof *request->stop_ids);
    request->n_stop_ids = terms->n_stop_ids;
    request->biases = copy_of(given->biases, cpa_plan_listed_biases(&given->sampling), sizeof *request->biases);
    request->scheduled.biases = request->biases;
    if (request->salt && request->stop_ids && request->biases && (request->tenant || !given->tenant)) return request;
    cpa_request_free(request);
    return NULL;
}

int cpa_request_ends_with(const cpa_engine_request *request, int64_t position) {
    return position + 1 == request->scheduled.prompt_tokens + request->scheduled.output_tokens;
}

int cpa_request_stops_at(const cpa_engine_request *request, uint32_t token) {
    for (int64_t i = 0; i < request->n_stop_ids; i++)
        if (request->stop_ids[i] == token) return 1;
    return 0;
}
