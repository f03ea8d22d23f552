/* Lists of token ids and of biases, and the answers that requests get. */
#include "launcher/generate/ids.h"

#include <stdlib.h>
#include <string.h>

#include "launcher/answers.h"
#include "launcher/generate/biases.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

static void test_read(void) {
    static const struct {
        const char *text;
        int64_t count;
        uint32_t last;
    } good[] = {{"", 0, 0}, {"7", 1, 7}, {"1,5,9", 3, 9}, {" 1, 5\n9 ", 3, 9}, {"0,99,", 2, 99}};
    static const char *const bad[] = {"x", "1,2x", "1;2", "-1", "100", "99999999999999999999", "1 2 0x3"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        cpa_ids ids = {NULL, -1};
        CU_ASSERT_EQUAL(cpa_ids_read("--ids", good[i].text, 100, &ids, NULL), CPA_OK);
        CU_ASSERT_EQUAL(ids.count, good[i].count);
        if (ids.count > 0) CU_ASSERT_EQUAL(ids.ids[ids.count - 1], good[i].last);
        cpa_ids_release(&ids);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_ids ids = {NULL, -1};
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_ids_read("--ids", bad[i], 100, &ids, &err), CPA_INVALID);
        CU_ASSERT_EQUAL(strncmp(err.message, "--ids: found '", 14), 0);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "expected ids from 0 to 99"));
        CU_ASSERT_EQUAL(ids.count, -1);
    }
}

static void test_file(void) {
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_ids ids = {NULL, 0};
    cpa_error err = {CPA_OK, ""};
    char at[300], text[1 << 17];
    size_t n = 0;
    for (int i = 0; i < 20000; i++) n += (size_t)snprintf(text + n, sizeof text - n, "%d\n", i % 100);
    cpa_test_folder_write(&folder, "ids", text, n);
    snprintf(at, sizeof at, "@%s/ids", folder.path);
    CU_ASSERT_EQUAL(cpa_ids_read("--ids", at, 100, &ids, &err), CPA_OK);
    CU_ASSERT(ids.count == 20000 && ids.ids[19999] == 99 && ids.ids[12345] == 45);
    cpa_ids_release(&ids);
    cpa_test_folder_write(&folder, "ids", "1,2\0,3", 6);
    CU_ASSERT_EQUAL(cpa_ids_read("--ids", at, 100, &ids, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "ids: found a zero byte, expected text"));
    snprintf(at, sizeof at, "@%s/none", folder.path);
    CU_ASSERT_EQUAL(cpa_ids_read("--ids", at, 100, &ids, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "none: No such file"));
    cpa_test_folder_remove(&folder);
}

static void test_biases(void) {
    static const char *const bad[][2] = {{"7", "found '7', expected ID:BIAS, of ids from 0 to 99"},
                                         {"7:", "found '7:', expected"},
                                         {":1", "found ':1', expected"},
                                         {"7:x", "found '7:x', expected"},
                                         {"1:2,100:1", "found '100:1', expected ID:BIAS"},
                                         {"-1:1", "found '-1:1', expected"},
                                         {"7:1e7", "found '7:1e7', expected"},
                                         {"7:nan", "found '7:nan', expected"},
                                         {"7:1:2", "found '7:1:2', expected"},
                                         {"7:1 7:2", "found '7:2', expected each token once"}};
    static cpa_biases biases;
    CU_ASSERT_EQUAL(cpa_biases_read("--b", " 7:-100, 0:2.5\n99:1e-3,", 100, &biases, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(biases.count, 3);
    CU_ASSERT(biases.biases[0].token == 7 && biases.biases[0].bias == -100);
    CU_ASSERT(biases.biases[1].token == 0 && biases.biases[1].bias == 2.5F);
    CU_ASSERT(biases.biases[2].token == 99 && biases.biases[2].bias == 1e-3F);
    CU_ASSERT_EQUAL(cpa_biases_read("--b", "", 100, &biases, NULL), CPA_OK);
    CU_ASSERT_EQUAL(biases.count, 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_biases_read("--b", bad[i][0], 100, &biases, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, bad[i][1]));
    }
    char many[8 * (CPA_MOST_LOGIT_BIASES + 2)] = "";
    for (int i = 0; i <= CPA_MOST_LOGIT_BIASES; i++) {
        CU_ASSERT_EQUAL(cpa_biases_read("--b", many, 1000, &biases, NULL), CPA_OK);
        snprintf(many + strlen(many), sizeof many - strlen(many), "%d:1,", i);
    }
    CU_ASSERT_EQUAL(cpa_biases_read("--b", many, 1000, &biases, NULL), CPA_INVALID);
}

static void test_answers(void) {
    cpa_request requests[] = {{.id = 9, .prompt_tokens = 3, .output_tokens = 4},
                              {.id = 2, .prompt_tokens = 5, .output_tokens = 2}};
    cpa_workload workload = {.requests = requests, .count = 2};
    cpa_vocabulary_tokens prompts = {&workload, 1, 50};
    cpa_answers answers;
    CU_ASSERT_EQUAL(cpa_answers_open(&prompts, &answers, NULL), CPA_OK);
    const uint32_t tokens[] = {11, 12, 13};
    cpa_request_result result = {.id = 9, .output_tokens = 2, .tokens = tokens};
    cpa_answers_take(&answers, &result);
    result.id = 5; /* nobody's */
    cpa_answers_take(&answers, &result);
    CU_ASSERT(cpa_answers_count(&answers, 9) == 5 && cpa_answers_count(&answers, 2) == 0);
    CU_ASSERT_EQUAL(cpa_answers_count(&answers, 5), 0);
    CU_ASSERT(cpa_answers_token(&answers, 9, 3) == 11 && cpa_answers_token(&answers, 9, 4) == 12);
    CU_ASSERT_EQUAL(cpa_answers_token(&answers, 9, 2), cpa_vocabulary_token(&prompts, 9, 2));
    CPA_ASSERT_ORDER(cpa_vocabulary_token(&prompts, 9, 2), <, 50);
    cpa_answers_close(&answers);
}

static const cpa_test tests[] = {
    {"ids have commas or space between them, and are of the vocabulary", test_read},
    {"ids may be those of a file", test_file},
    {"biases are those of tokens", test_biases},
    {"answers are prompts and what came", test_answers},
};
CPA_TEST_MAIN("ids", tests)
