/* The file of --api-keys. */
#include "launcher/settings/api_keys_file.h"

#include <stdio.h>
#include <string.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_status read_text(const char *text, size_t bytes, cpa_api_keys_file *out, cpa_error *err) {
    cpa_test_folder folder = cpa_test_folder_make();
    char path[300];
    cpa_test_folder_write(&folder, "keys", text, bytes);
    snprintf(path, sizeof path, "%s/keys", folder.path);
    const cpa_status status = cpa_api_keys_file_read(path, out, err);
    cpa_test_folder_remove(&folder);
    return status;
}

static void keys_are_the_lines_but_for_comments(void) {
    static const char text[] = "# of the web\n\n  sk-1234 \r\nsk-5678\n\t\n#sk-9\nlast~!";
    cpa_api_keys_file file;
    CU_ASSERT_EQUAL_FATAL(read_text(text, sizeof text - 1, &file, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(file.count, 3);
    CU_ASSERT_STRING_EQUAL(file.keys[0], "sk-1234");
    CU_ASSERT_STRING_EQUAL(file.keys[1], "sk-5678");
    CU_ASSERT_STRING_EQUAL(file.keys[2], "last~!");
    CU_ASSERT_EQUAL(cpa_api_keys_file_add(&file, "--api-key", "sk-5678", NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_api_keys_file_add(&file, "--api-key", "sk-0", NULL), CPA_OK);
    CU_ASSERT_STRING_EQUAL(file.keys[3], "sk-0");
    cpa_api_keys_file_release(&file);
}

static void wrong_files_are_refused_by_line_without_showing_a_key(void) {
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"", "found no key, expected one a line"},
        {"# none\n", "found no key, expected one a line"},
        {"sk-1\nsk-2\nsk-1\n", "line 3: found a key that an earlier line has"},
        {"sk-1\nsk 2\n", "line 2: expected a key of up to 255 visible ASCII characters"},
        {"sk-\xc3\xa9\n", "line 1: expected a key"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cpa_api_keys_file file = {NULL, -1, 0};
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(read_text(wrong[i].text, strlen(wrong[i].text), &file, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, wrong[i].says));
        CU_ASSERT_PTR_NULL(strstr(err.message, "sk"));
        CU_ASSERT_EQUAL(file.count, -1);
    }
    cpa_error err = {CPA_OK, ""};
    char long_key[300];
    memset(long_key, 'a', sizeof long_key);
    cpa_api_keys_file file;
    CU_ASSERT_EQUAL(read_text(long_key, 256, &file, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_api_keys_file_read("/nowhere/keys", &file, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "/nowhere/keys: No such file"));
}

static const cpa_test tests[] = {
    {"keys are the lines but for comments", keys_are_the_lines_but_for_comments},
    {"wrong files are refused by line, without showing a key", wrong_files_are_refused_by_line_without_showing_a_key},
};
CPA_TEST_MAIN("api keys file", tests)
