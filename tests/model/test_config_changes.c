/* Changes of the tiny models' config.json beside what transformers 5 does with them (tests/data/make_configs.py): either
 * the same tokens, or a refusal of one line that names the key. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "base/min_max.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/model/model_steps.h"

enum { PROMPTS = 3 };

static json_t *read_json(const char *path) {
    json_t *json = json_load_file(path, 0, NULL);
    if (!json) abort();
    return json;
}

/* A folder with the weights of the case's model, and its changed config. */
static cpa_test_folder make_folder(const json_t *entry) {
    static const char *const weights[] = {"model.safetensors",
                                          "model.safetensors.index.json",
                                          "model-00001-of-00003.safetensors",
                                          "model-00002-of-00003.safetensors",
                                          "model-00003-of-00003.safetensors",
                                          "model-00001-of-00002.safetensors",
                                          "model-00002-of-00002.safetensors"};
    const char *model = cpa_test_model_folder(json_string_value(json_object_get(entry, "model")));
    cpa_test_folder folder = cpa_test_folder_make();
    char from[600], to[600];
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        snprintf(from, sizeof from, "%s/%s", model, weights[i]);
        snprintf(to, sizeof to, "%s/%s", folder.path, weights[i]);
        if (access(from, F_OK) == 0 && symlink(from, to) != 0) abort();
    }
    snprintf(from, sizeof from, "%s/config.json", model);
    json_t *config = read_json(from), *key;
    size_t i;
    json_object_update(config, json_object_get(entry, "set"));
    json_array_foreach(json_object_get(entry, "remove"), i, key) json_object_del(config, json_string_value(key));
    char *text = json_dumps(config, 0);
    cpa_test_folder_write(&folder, "config.json", text, strlen(text));
    free(text);
    json_decref(config);
    return folder;
}

/* All that a model's folder is read for. */
static cpa_status load(const char *folder, cpa_error *err) {
    const cpa_transformer_options options = {.dtype = CPA_F32, .max_rows = 1, .max_sequences = 1, .ranks = 1};
    cpa_model_config config;
    cpa_safetensors *files = NULL;
    cpa_transformer *transformer = NULL;
    cpa_device *device;
    cpa_stream *stream;
    cpa_status status = cpa_model_config_load(folder, &config, err);
    if (status != CPA_OK) return status;
    cpa_test_device_open(1, &device, &stream);
    status = cpa_safetensors_open(folder, &files, err);
    if (status == CPA_OK) status = cpa_transformer_create(device, &config, files, &options, &transformer, err);
    cpa_transformer_destroy(transformer);
    cpa_safetensors_close(files);
    cpa_test_device_close(device, stream);
    return status;
}

static void add_prompts(cpa_test_model *m, const json_t *prompts) {
    for (size_t p = 0; p < PROMPTS; p++) {
        const json_t *prompt = json_array_get(prompts, p);
        uint32_t ids[CPA_TEST_MAX_TOKENS];
        const size_t n = json_array_size(prompt);
        if (n > CPA_TEST_MAX_TOKENS) abort();
        for (size_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(prompt, i));
        cpa_test_model_add(m, ids, (int64_t)n, (cpa_placement){CPA_SHARDED, 0});
    }
}

/* How many outputs of all prompts are wrong, or missing. */
static int wrong_outputs(const char *folder, const json_t *prompts, const json_t *outputs) {
    cpa_test_model m;
    int wrong = 0;
    cpa_test_model_open_folder(&m, folder, CPA_F32);
    add_prompts(&m, prompts);
    for (int n = 1; n > 0;) {
        cpa_test_part parts[CPA_TEST_SEQUENCES];
        n = 0;
        for (int p = 0; p < m.n_answers; p++) {
            const cpa_test_answer *answer = &m.answers[p];
            const int64_t count = answer->known - answer->computed;
            if (answer->known - answer->prompt == (int64_t)json_array_size(json_array_get(outputs, (size_t)p)))
                continue;
            parts[n++] = (cpa_test_part){p, count, count == 1 ? CPA_PASS_Q : CPA_PASS_KV};
        }
        if (n > 0) cpa_test_model_step(&m, parts, n);
    }
    for (int p = 0; p < m.n_answers; p++) {
        const json_t *ids = json_array_get(outputs, (size_t)p);
        const uint32_t *found = m.answers[p].tokens + m.answers[p].prompt;
        for (size_t i = 0; i < json_array_size(ids); i++)
            wrong += found[i] != (uint32_t)json_integer_value(json_array_get(ids, i));
    }
    cpa_test_model_close(&m);
    return wrong;
}

/* Whether the case is as it should be. */
static int check(const json_t *entry, const json_t *prompts) {
    const char *refused = json_string_value(json_object_get(entry, "refused"));
    const json_t *outputs = json_object_get(entry, "outputs");
    cpa_test_folder folder = make_folder(entry);
    cpa_error err = {CPA_OK, ""};
    const cpa_status status = load(folder.path, &err);
    int right;
    if (refused) {
        right = (status == CPA_UNSUPPORTED || status == CPA_INVALID) && strstr(err.message, refused) &&
                !strchr(err.message, '\n');
    } else {
        right = status == CPA_OK && json_array_size(outputs) == PROMPTS &&
                wrong_outputs(folder.path, prompts, outputs) == 0;
    }
    if (!right) {
        char *text = json_dumps(json_object_get(entry, "set"), JSON_COMPACT);
        printf("\n%s %s: '%s', expected %s\n", json_string_value(json_object_get(entry, "model")), text, err.message,
               refused ? refused : "other tokens");
        free(text);
    }
    cpa_test_folder_remove(&folder);
    return right;
}

static void test_changes(void) {
    json_t *file = read_json(CPA_TEST_DATA "/configs.json"), *entry;
    size_t i;
    int wrong = 0, refused = 0, n = 0;
    json_array_foreach(json_object_get(file, "cases"), i, entry) {
        n++;
        refused += json_object_get(entry, "refused") != NULL;
        wrong += !check(entry, json_object_get(file, "prompts"));
    }
    CU_ASSERT(n >= 120 && n - refused >= 100);
    CU_ASSERT_EQUAL(wrong, 0);
    json_decref(file);
}

static const cpa_test tests[] = {{"every change gives transformers' tokens, or is refused by name", test_changes}};
CPA_MPI_TEST_MAIN("changes of config.json", tests)
