/* The plain forward beside what Hugging Face transformers gave. */
#include "src/model/plain_forward.h"

#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/unit.h"
#include "tests/model/expected.h"

/* The largest distance to the logits of transformers, of all outputs of a tiny model; -1 if it failed. */
static float error_of(const char *name, cpa_dtype dtype, const cpa_test_expected *expected) {
    static float logits[CPA_TEST_OUTPUTS * CPA_TEST_MAX_VOCABULARY];
    cpa_model_config config;
    cpa_safetensors *files = NULL;
    float worst = 0;
    if (cpa_model_config_load(cpa_test_model_folder(name), &config, NULL) != CPA_OK) return -1;
    config.index.dtype = cpa_index_dtype_beside(dtype, dtype);
    if (cpa_safetensors_open(cpa_test_model_folder(name), &files, NULL) != CPA_OK) return -1;
    for (int p = 0; p < CPA_TEST_PROMPTS && worst >= 0; p++) {
        uint32_t tokens[CPA_TEST_MAX_PROMPT + CPA_TEST_OUTPUTS];
        int64_t positions[CPA_TEST_OUTPUTS];
        const int64_t prompt = expected->prompt_tokens[p];
        memcpy(tokens, expected->prompts[p], (size_t)prompt * sizeof *tokens);
        memcpy(tokens + prompt, expected->outputs[p], sizeof expected->outputs[p]);
        for (int i = 0; i < CPA_TEST_OUTPUTS; i++) positions[i] = prompt - 1 + i;
        const cpa_plain_question question = {
            &config, files, dtype, tokens, prompt + CPA_TEST_OUTPUTS - 1, positions, CPA_TEST_OUTPUTS, {NULL, NULL, 0}};
        if (cpa_plain_forward(&question, logits, NULL) != CPA_OK) worst = -1;
        for (int i = 0; i < CPA_TEST_OUTPUTS && worst >= 0; i++) {
            const float error = cpa_test_logits_error(expected, p, i, logits + i * expected->vocabulary);
            if (!(error <= worst)) worst = error;
        }
    }
    cpa_safetensors_close(files);
    return worst;
}

static void check_reference(const char *const *names) {
    cpa_test_expected *expected = malloc(sizeof *expected);
    for (int i = 0; names[i]; i++) {
        cpa_test_expected_read(names[i], expected);
        const float error = error_of(names[i], CPA_F32, expected);
        CU_ASSERT(error >= 0 && error <= 5e-5f);
    }
    free(expected);
}

static void test_reference(void) {
    check_reference(cpa_test_models);
    check_reference(cpa_test_latent_models);
}

static void test_rounded(void) {
    cpa_test_expected *expected = malloc(sizeof *expected);
    cpa_test_expected_read("tiny-llama", expected);
    const float bf16 = error_of("tiny-llama", CPA_BF16, expected), f16 = error_of("tiny-llama", CPA_F16, expected);
    CU_ASSERT(bf16 > 0.01f && bf16 < 0.3f);
    CU_ASSERT(f16 > 0.001f && f16 < bf16 / 3);
    free(expected);
}

static void test_refusals(void) {
    cpa_model_config config;
    cpa_safetensors *files = NULL;
    cpa_error err = {CPA_OK, ""};
    float logits[CPA_TEST_MAX_VOCABULARY];
    const uint32_t tokens[] = {5, 128};
    const int64_t positions[] = {0, 1};
    CU_ASSERT_EQUAL(cpa_model_config_load(cpa_test_model_folder("tiny-mistral"), &config, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_safetensors_open(cpa_test_model_folder("tiny-qwen2"), &files, NULL), CPA_OK);
    cpa_plain_question question = {&config, files, CPA_F32, tokens, 2, positions, 1, {NULL, NULL, 0}};
    CU_ASSERT_EQUAL(cpa_plain_forward(&question, logits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "token 1: found 128"));
    question.count = 1;
    question.positions = positions + 1;
    CU_ASSERT_EQUAL(cpa_plain_forward(&question, logits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "position 1 of 1"));
    question.positions = positions;
    CU_ASSERT_EQUAL(cpa_plain_forward(&question, logits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "q_proj.weight: found another shape"));
    cpa_safetensors_close(files);
}

static const cpa_test tests[] = {
    {"its logits are those of transformers", test_reference},
    {"rounding to a dtype moves it as far as that dtype is exact", test_rounded},
    {"what does not fit is refused", test_refusals},
};
CPA_TEST_MAIN("plain forward", tests)
