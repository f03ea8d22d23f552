#include "tests/llm/answers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/unit.h"

int cpa_test_llm_is_on_cuda(void) {
    const char *device = getenv("CPATTN_TEST_DEVICE");
    return device && strncmp(device, "cuda", 4) == 0;
}

cpa_engine_options cpa_test_engine_options(void) {
    cpa_engine_options engine = {.size = sizeof engine, .num_blocks = 256, .max_num_seqs = 8, .skip_self_test = 1};
    engine.device.size = sizeof engine.device;
    engine.device.backend = cpa_test_llm_is_on_cuda() ? CPA_BACKEND_CUDA : CPA_BACKEND_HOST;
    engine.device.threads = 1;
    return engine;
}

cpa_llm_prompt cpa_test_prompt_of(const char *text) {
    return (cpa_llm_prompt){.size = sizeof(cpa_llm_prompt), .text = text, .text_bytes = (int64_t)strlen(text)};
}

void cpa_test_add_piece(cpa_test_answer *a, const cpa_llm_piece *piece) {
    CU_ASSERT_FATAL(a->n + piece->n_tokens <= CPA_TEST_MOST_TOKENS);
    if (piece->n_tokens > 0) memcpy(a->tokens + a->n, piece->tokens, (size_t)piece->n_tokens * sizeof *a->tokens);
    if (piece->logprobs) memcpy(a->logprobs + a->n, piece->logprobs, (size_t)piece->n_tokens * sizeof *a->logprobs);
    a->n += piece->n_tokens;
    CU_ASSERT_FATAL(a->bytes + piece->text_bytes < CPA_TEST_MOST_TOKENS);
    CU_ASSERT_EQUAL(piece->text[piece->text_bytes], 0);
    memcpy(a->text + a->bytes, piece->text, (size_t)piece->text_bytes);
    a->bytes += piece->text_bytes;
    a->has_ended = piece->has_ended;
    a->reason = piece->reason;
    snprintf(a->stop, sizeof a->stop, "%s", piece->stop ? piece->stop : "");
    snprintf(a->error, sizeof a->error, "%s", piece->error);
}

cpa_test_answer *cpa_test_read_answer(cpa_llm_request *request) {
    cpa_test_answer *a = calloc(1, sizeof *a);
    while (!a->has_ended) {
        cpa_llm_piece piece;
        CU_ASSERT_EQUAL_FATAL(cpa_llm_next(request, 60, &piece, sizeof piece, NULL), CPA_OK);
        cpa_test_add_piece(a, &piece);
    }
    (void)cpa_llm_prompt_ids(request, &a->prompt_tokens);
    cpa_llm_release(request);
    return a;
}
