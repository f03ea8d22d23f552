#include "launcher/answers.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/min_max.h"

static int by_request(const void *a, const void *b) {
    const uint64_t left = ((const cpa_answered_request *)a)->request,
                   right = ((const cpa_answered_request *)b)->request;
    return (left > right) - (left < right);
}

static cpa_answered_request *find(const cpa_answers *answers, uint64_t request) {
    const cpa_answered_request wanted = {.request = request};
    if (answers->count == 0) return NULL;
    return bsearch(&wanted, answers->answers, (size_t)answers->count, sizeof wanted, by_request);
}

cpa_status cpa_answers_open(cpa_vocabulary_tokens *prompts, cpa_answers *out, cpa_error *err) {
    const cpa_workload *workload = prompts->workload;
    cpa_answers answers = {.count = workload->count, .prompts = prompts};
    answers.answers = calloc((size_t)cpa_max64(workload->count, 1), sizeof *answers.answers);
    if (!answers.answers)
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for the answers of %" PRId64 " requests", workload->count);
    for (int64_t i = 0; i < workload->count; i++) {
        const cpa_request *request = &workload->requests[i];
        answers.answers[i] = (cpa_answered_request){.request = request->id, .prompt_tokens = request->prompt_tokens};
    }
    qsort(answers.answers, (size_t)answers.count, sizeof *answers.answers, by_request);
    *out = answers;
    return CPA_OK;
}

void cpa_answers_close(cpa_answers *answers) {
    for (int64_t i = 0; i < answers->count; i++) free(answers->answers[i].tokens);
    free(answers->answers);
    *answers = (cpa_answers){.count = 0};
}

void cpa_answers_take(cpa_answers *answers, const cpa_request_result *result) {
    cpa_answered_request *answer = find(answers, result->id);
    const size_t bytes = (size_t)result->output_tokens * sizeof *answer->tokens;
    if (!answer || answer->tokens || bytes == 0) return;
    answer->tokens = malloc(bytes);
    if (!answer->tokens) return;
    memcpy(answer->tokens, result->tokens, bytes);
    answer->count = result->output_tokens;
}

uint32_t cpa_answers_token(void *ctx, uint64_t request, int64_t position) {
    const cpa_answers *answers = ctx;
    const cpa_answered_request *answer = find(answers, request);
    if (!answer || position < answer->prompt_tokens) return cpa_vocabulary_token(answers->prompts, request, position);
    return answer->tokens[position - answer->prompt_tokens];
}

int64_t cpa_answers_count(void *ctx, uint64_t request) {
    const cpa_answered_request *answer = find(ctx, request);
    return answer && answer->count > 0 ? answer->prompt_tokens + answer->count : 0;
}
