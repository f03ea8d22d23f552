#include "tests/model/expected.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

const char *const cpa_test_models[] = {
    "tiny-llama",   "tiny-llama2",  "tiny-mistral",   "tiny-qwen2",      "tiny-qwen3", "tiny-yarn",
    "tiny-sharded", "tiny-mixtral", "tiny-qwen3-moe", "tiny-joined-moe", NULL};

const char *const cpa_test_latent_models[] = {"tiny-deepseek-v2", "tiny-deepseek-v3", "tiny-deepseek-fp8",
                                              "tiny-deepseek-v32", NULL};

static void need(int done, const char *what) {
    if (done) return;
    fprintf(stderr, "%s: not as expected\n", what);
    abort();
}

const char *cpa_test_model_folder(const char *name) {
    static char path[512];
    snprintf(path, sizeof path, CPA_TEST_DATA "/%s", name);
    return path;
}

static int64_t read_ids(const json_t *list, uint32_t *out, int64_t most, const char *what) {
    const int64_t n = (int64_t)json_array_size(list);
    need(n > 0 && n <= most, what);
    for (int64_t i = 0; i < n; i++) out[i] = (uint32_t)json_integer_value(json_array_get(list, (size_t)i));
    return n;
}

void cpa_test_expected_read(const char *name, cpa_test_expected *out) {
    char path[600];
    snprintf(path, sizeof path, "%s/expected.json", cpa_test_model_folder(name));
    json_t *json = json_load_file(path, 0, NULL);
    need(json != NULL, path);
    for (size_t p = 0; p < CPA_TEST_PROMPTS; p++) {
        const json_t *prompt = json_array_get(json_object_get(json, "prompts"), p);
        const json_t *output = json_array_get(json_object_get(json, "output_ids"), p);
        out->prompt_tokens[p] = read_ids(prompt, out->prompts[p], CPA_TEST_MAX_PROMPT, path);
        need(read_ids(output, out->outputs[p], CPA_TEST_OUTPUTS, path) == CPA_TEST_OUTPUTS, path);
        const json_t *drafts = json_object_get(json, "draft_ids");
        memset(out->drafts[p], 0, sizeof out->drafts[p]);
        if (drafts) read_ids(json_array_get(drafts, p), out->drafts[p], CPA_TEST_OUTPUTS, path);
    }
    json_decref(json);
    snprintf(path, sizeof path, "%s/expected_logits.f32", cpa_test_model_folder(name));
    FILE *file = fopen(path, "rb");
    need(file && fseek(file, 0, SEEK_END) == 0, path);
    out->vocabulary = (int)(ftell(file) / (CPA_TEST_PROMPTS * CPA_TEST_OUTPUTS * (long)sizeof(float)));
    need(out->vocabulary <= CPA_TEST_MAX_VOCABULARY, path);
    rewind(file);
    for (int i = 0; i < CPA_TEST_PROMPTS * CPA_TEST_OUTPUTS; i++) {
        float *row = out->logits[i / CPA_TEST_OUTPUTS][i % CPA_TEST_OUTPUTS];
        need(fread(row, sizeof *row, (size_t)out->vocabulary, file) == (size_t)out->vocabulary, path);
    }
    fclose(file);
}

float cpa_test_logits_error(const cpa_test_expected *expected, int prompt, int output, const float *logits) {
    float error = 0;
    for (int i = 0; i < expected->vocabulary; i++) {
        const float difference = fabsf(logits[i] - expected->logits[prompt][output][i]);
        if (!(difference <= error)) error = difference; /* NaN too */
    }
    return error;
}
