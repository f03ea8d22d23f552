/* What transformers gave for a tiny model; tests/data/make_models.py says what the files hold. */
#ifndef CPA_TESTS_EXPECTED_H
#define CPA_TESTS_EXPECTED_H

#include <stdint.h>

enum { CPA_TEST_PROMPTS = 3, CPA_TEST_OUTPUTS = 16, CPA_TEST_MAX_VOCABULARY = 320, CPA_TEST_MAX_PROMPT = 130 };

typedef struct cpa_test_expected {
    int64_t prompt_tokens[CPA_TEST_PROMPTS];
    uint32_t prompts[CPA_TEST_PROMPTS][CPA_TEST_MAX_PROMPT];
    uint32_t outputs[CPA_TEST_PROMPTS][CPA_TEST_OUTPUTS];
    int vocabulary;
    uint32_t drafts[CPA_TEST_PROMPTS][CPA_TEST_OUTPUTS]; /* behind each output; zeros without a module that drafts */
    float logits[CPA_TEST_PROMPTS][CPA_TEST_OUTPUTS][CPA_TEST_MAX_VOCABULARY];
} cpa_test_expected;

/* The names of the tiny models, and of those with latent attention; end with NULL. */
extern const char *const cpa_test_models[];
extern const char *const cpa_test_latent_models[];

/* The folder of a tiny model; valid until the next call. */
const char *cpa_test_model_folder(const char *name);

/* Aborts if the files are not as they should be. */
void cpa_test_expected_read(const char *name, cpa_test_expected *out);

/* The largest distance to the logits that transformers gave. */
float cpa_test_logits_error(const cpa_test_expected *expected, int prompt, int output, const float *logits);

#endif
