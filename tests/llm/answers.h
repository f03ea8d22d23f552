/* Answers of a model's folder, read whole. */
#ifndef CPA_TESTS_LLM_ANSWERS_H
#define CPA_TESTS_LLM_ANSWERS_H

#include <cpattn/llm.h>

#define FOLDER CPA_TEST_DATA "/tiny-llama"

enum { CPA_TEST_MOST_TOKENS = 4096 };

typedef struct cpa_test_answer {
    uint32_t tokens[CPA_TEST_MOST_TOKENS];
    float logprobs[CPA_TEST_MOST_TOKENS];
    int64_t n, prompt_tokens, bytes;
    char text[CPA_TEST_MOST_TOKENS], stop[16], error[256]; /* of the text `bytes`, which may be 0 */
    cpa_finish_reason reason;
    int has_ended;
} cpa_test_answer;

/* On a CUDA device, where CPATTN_TEST_DEVICE says so. */
int cpa_test_llm_is_on_cuda(void);
cpa_engine_options cpa_test_engine_options(void);

cpa_llm_prompt cpa_test_prompt_of(const char *text);
void cpa_test_add_piece(cpa_test_answer *answer, const cpa_llm_piece *piece);
/* Reads a request to its end, and releases it; the caller frees the answer. */
cpa_test_answer *cpa_test_read_answer(cpa_llm_request *request);

#endif
