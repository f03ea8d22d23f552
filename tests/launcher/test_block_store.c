/* The name that a model has in a store of blocks: another one for any other weights. */
#include "launcher/block_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

/* Three tensors, of which the second is far from both ends of the file. */
enum { TENSORS = 3, TENSOR_BYTES = 400002, HEADER_BYTES = 400 };

static const char CONFIG[] = "{\"model_type\": \"llama\"}";

typedef struct model {
    char header[HEADER_BYTES], config[sizeof CONFIG];
    uint8_t weights[TENSORS * TENSOR_BYTES];
} model;

static void fill(model *m) {
    int used = snprintf(m->header, sizeof m->header, "{");
    for (int i = 0; i < TENSORS; i++)
        used += snprintf(m->header + used, sizeof m->header - (size_t)used,
                         "%s\"w%d\": {\"dtype\": \"BF16\", \"shape\": [3, 66667], \"data_offsets\": [%d, %d]}",
                         i > 0 ? ", " : "", i, i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES);
    used += snprintf(m->header + used, sizeof m->header - (size_t)used, "}");
    memset(m->header + used, ' ', sizeof m->header - (size_t)used);
    memcpy(m->config, CONFIG, sizeof CONFIG);
    for (size_t i = 0; i < sizeof m->weights; i++) m->weights[i] = (uint8_t)(i * 7 + i / 256);
}

/* The name of the model, in a folder that is made anew. */
static void name(const model *m, char out[32]) {
    const cpa_test_folder folder = cpa_test_folder_make();
    const size_t n = 8 + HEADER_BYTES + sizeof m->weights;
    const uint64_t header = HEADER_BYTES;
    uint8_t *file = malloc(n);
    cpa_settings *settings = calloc(1, sizeof *settings);
    cpa_job_store store = {.folder = NULL};
    cpa_error err = {CPA_OK, ""};
    memcpy(file, &header, 8);
    memcpy(file + 8, m->header, HEADER_BYTES);
    memcpy(file + 8 + HEADER_BYTES, m->weights, sizeof m->weights);
    cpa_test_folder_write(&folder, "model.safetensors", file, n);
    cpa_test_folder_write(&folder, "config.json", m->config, sizeof CONFIG - 1);
    snprintf(settings->model_dir, sizeof settings->model_dir, "%s", folder.path);
    snprintf(settings->block_store, sizeof settings->block_store, "%s", folder.path);
    CU_ASSERT_EQUAL(cpa_job_store_open(settings, 0, &store, &err), CPA_OK);
    CU_ASSERT_STRING_EQUAL(err.message, "");
    CU_ASSERT_PTR_EQUAL(store.table.model, store.model);
    memcpy(out, store.model, 32);
    cpa_job_store_close(&store);
    free(settings);
    free(file);
    cpa_test_folder_remove(&folder);
}

static void other_weights_have_another_name(void) {
    model *m = malloc(sizeof *m);
    char first[32], found[32];
    fill(m);
    name(m, first);
    name(m, found);
    CU_ASSERT_STRING_EQUAL(found, first);
    for (int i = 0; i < TENSORS; i++) {
        /* All of one tensor is trained, each element by its last bit. */
        for (int at = 0; at < TENSOR_BYTES; at += 2) m->weights[i * TENSOR_BYTES + at] ^= 1;
        name(m, found);
        CU_ASSERT_STRING_NOT_EQUAL(found, first);
        fill(m);
        /* A part of it is: its first or its last rows. */
        for (int end = 0; end < 2; end++) {
            m->weights[i * TENSOR_BYTES + end * (TENSOR_BYTES - 1)] ^= 1;
            name(m, found);
            CU_ASSERT_STRING_NOT_EQUAL(found, first);
            fill(m);
        }
    }
    free(m);
}

static void another_header_or_configuration_has_another_name(void) {
    model *m = malloc(sizeof *m);
    char first[32], found[32];
    fill(m);
    name(m, first);
    memcpy(strstr(m->header, "w1"), "v1", 2);
    name(m, found);
    CU_ASSERT_STRING_NOT_EQUAL(found, first);
    fill(m);
    memcpy(strstr(m->config, "llama"), "llamb", 5);
    name(m, found);
    CU_ASSERT_STRING_NOT_EQUAL(found, first);
    free(m);
}

static const cpa_test tests[] = {
    {"other weights have another name", other_weights_have_another_name},
    {"another header or configuration has another name", another_header_or_configuration_has_another_name},
};

CPA_TEST_MAIN("block store of a job", tests)
