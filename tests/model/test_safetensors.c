/* Safetensors files: the tiny models' tensors, and files that are cut, overlap, lie about lengths or are no such files,
 * which are refused with a line that names the file, and never read beyond their ends. */
#include "src/model/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

static const char *const file_name = "model.safetensors";

/* A file of a header and so many bytes of data; `length` is what its first 8 bytes say, -1 for the truth. */
static size_t compose(char *out, const char *header, int64_t length, size_t data) {
    size_t n = strlen(header);
    uint64_t said = length < 0 ? n : (uint64_t)length;
    for (int i = 0; i < 8; i++) out[i] = (char)(said >> 8 * i);
    memcpy(out + 8, header, n);
    for (size_t i = 0; i < data; i++) out[8 + n + i] = (char)i;
    return 8 + n + data;
}

static cpa_status open_bytes(const cpa_test_folder *folder, const char *bytes, size_t n, cpa_safetensors **out,
                             cpa_error *err) {
    cpa_test_folder_write(folder, file_name, bytes, n);
    return cpa_safetensors_open(folder->path, out, err);
}

/* Reads every byte of the tensors of these names; the sum keeps the reads. */
static uint64_t read_all(const cpa_safetensors *files, const char *const *names, int n) {
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) {
        const cpa_tensor *tensor = cpa_safetensors_find(files, names[i]);
        for (int64_t b = 0; tensor && b < tensor->bytes; b++) sum += ((const unsigned char *)tensor->data)[b];
    }
    return sum;
}

static const char *const good =
    "{\"__metadata__\":{\"format\":\"pt\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
    "\"b\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]},"
    "\"none\":{\"dtype\":\"F16\",\"shape\":[0,5],\"data_offsets\":[24,24]},"
    "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[32,40]}}";
static const char *const good_names[] = {"a", "b", "none", "scalar"};
enum { GOOD_DATA = 40, GOOD_TENSORS = 4 };

static void test_good(void) {
    char bytes[2048];
    cpa_safetensors *files = NULL;
    cpa_test_folder folder = cpa_test_folder_make();
    CU_ASSERT_EQUAL(open_bytes(&folder, bytes, compose(bytes, good, -1, GOOD_DATA), &files, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_safetensors_count(files), GOOD_TENSORS);
    const cpa_tensor *a = cpa_safetensors_find(files, "a"), *b = cpa_safetensors_find(files, "b");
    CU_ASSERT(a->plain && a->dtype == CPA_F32 && a->dims == 2 && a->shape[0] == 2 && a->shape[1] == 3);
    CU_ASSERT(a->bytes == 24 && ((const char *)a->data)[5] == 5);
    CU_ASSERT(b->plain && b->dtype == CPA_BF16 && b->elements == 4 && ((const char *)b->data)[1] == 25);
    CU_ASSERT_EQUAL(cpa_safetensors_find(files, "none")->elements, 0);
    CU_ASSERT(!cpa_safetensors_find(files, "scalar")->plain && cpa_safetensors_find(files, "scalar")->elements == 1);
    CU_ASSERT_PTR_NULL(cpa_safetensors_find(files, "c"));
    cpa_safetensors_close(files);
    cpa_test_folder_remove(&folder);
}

static void test_tiny_models(void) {
    static const struct {
        const char *folder;
        int64_t tensors;
        cpa_dtype dtype;
    } models[] = {{"tiny-llama", 21, CPA_BF16},  {"tiny-llama2", 21, CPA_F16}, {"tiny-qwen2", 26, CPA_BF16},
                  {"tiny-qwen3", 25, CPA_BF16},  {"tiny-yarn", 27, CPA_F32},   {"tiny-mistral", 21, CPA_BF16},
                  {"tiny-sharded", 35, CPA_BF16}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char path[512];
        cpa_error err = {CPA_OK, ""};
        cpa_safetensors *files = NULL;
        snprintf(path, sizeof path, CPA_TEST_DATA "/%s", models[i].folder);
        CU_ASSERT_EQUAL_FATAL(cpa_safetensors_open(path, &files, &err), CPA_OK);
        CU_ASSERT_EQUAL(cpa_safetensors_count(files), models[i].tensors);
        const cpa_tensor *embedding = cpa_safetensors_find(files, "model.embed_tokens.weight");
        CU_ASSERT_PTR_NOT_NULL_FATAL(embedding);
        CU_ASSERT(embedding->dtype == models[i].dtype && embedding->shape[1] == 32);
        CU_ASSERT_EQUAL(embedding->shape[0], i == 0 ? 320 : 128);
        cpa_safetensors_close(files);
    }
}

static void test_refusals(void) {
    static const struct {
        const char *header;
        int64_t length;
        size_t data;
        const char *says;
    } refused[] = {
        {"{}", -1, 1, "found 1 bytes behind the last tensor"},
        {"[]", -1, 0, "the header is no object"},
        {"{}", -1, 3, "found 3 bytes behind the last tensor"},
        {"{\"a\":", -1, 0, "header: "},
        {"{}", 3, 0, "the header has 3 bytes, the file 10"},
        {"{}", INT64_MAX, 0, "the header has"},
        {"{\"a\":1}", -1, 0, "a: found no dtype"},
        {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "a: found no dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", -1, 4, "a: found no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", -1, 4, "a: found no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", -1, 4, "found no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", -1, 0,
         "found no shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", -1, 4, "its data lies at"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.5]}}", -1, 4, "its data lies at"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", -1, 4, "its data lies at"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", -1, 4, "its data lies at"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", -1, 4, "its shape has 8"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1, 4, "[0, 8) of 4 bytes"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[9223372036854775803,9223372036854775807]}}", -1, 4,
         "its data lies at"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "the data of a begins"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
         -1, 6, "the data of b begins"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         -1, 8, "header: duplicate"},
    };
    cpa_test_folder folder = cpa_test_folder_make();
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char bytes[1024];
        cpa_error err = {CPA_OK, ""};
        cpa_safetensors *files = NULL;
        size_t n = compose(bytes, refused[i].header, refused[i].length, refused[i].data);
        CU_ASSERT_EQUAL(open_bytes(&folder, bytes, n, &files, &err), CPA_INVALID);
        CU_ASSERT_PTR_NULL(files);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "/model.safetensors: "));
        if (!strstr(err.message, refused[i].says)) CU_FAIL(refused[i].says);
    }
    cpa_test_folder_remove(&folder);
}

static void test_pipe(void) {
    cpa_safetensors *files = NULL;
    cpa_error err = {CPA_OK, ""};
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_test_folder_pipe(&folder, file_name);
    CU_ASSERT_EQUAL(cpa_safetensors_open(folder.path, &files, &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "found no regular file, expected one"));
    cpa_test_folder_remove(&folder);
}

static void test_truncated(void) {
    char bytes[2048];
    cpa_test_folder folder = cpa_test_folder_make();
    const size_t whole = compose(bytes, good, -1, GOOD_DATA);
    for (size_t n = 0; n < whole; n++) {
        cpa_safetensors *files = NULL;
        CU_ASSERT_EQUAL(open_bytes(&folder, bytes, n, &files, NULL), CPA_INVALID);
        CU_ASSERT_PTR_NULL(files);
    }
    cpa_test_folder_remove(&folder);
}

/* Random bytes of the file change; whatever still opens has its tensors inside the file. */
static void test_corpus(void) {
    char bytes[2048], changed[2048];
    cpa_test_folder folder = cpa_test_folder_make();
    const size_t whole = compose(bytes, good, -1, GOOD_DATA);
    uint64_t sum = 0, state = 1;
    int opened = 0;
    for (int turn = 0; turn < 800; turn++) {
        cpa_safetensors *files = NULL;
        memcpy(changed, bytes, whole);
        for (int edits = 1 + turn % 3; edits > 0; edits--) {
            state = cpa_mix64(state + CPA_GOLDEN);
            static const char letters[] = "0123456789-,[]{}\":abF";
            changed[state % (whole - GOOD_DATA)] = letters[(state >> 32) % (sizeof letters - 1)];
        }
        if (open_bytes(&folder, changed, whole, &files, NULL) != CPA_OK) continue;
        sum += read_all(files, good_names, GOOD_TENSORS);
        opened++;
        cpa_safetensors_close(files);
    }
    CU_ASSERT(opened > 0 && sum > 0);
    cpa_test_folder_remove(&folder);
}

static void write_text(const cpa_test_folder *folder, const char *name, const char *text) {
    cpa_test_folder_write(folder, name, text, strlen(text));
}

static void write_tensor(const cpa_test_folder *folder, const char *name, const char *tensor) {
    char header[256], bytes[512];
    snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", tensor);
    cpa_test_folder_write(folder, name, bytes, compose(bytes, header, -1, 4));
}

static void test_index(void) {
    static const struct {
        const char *index, *says;
        cpa_status status;
    } refused[] = {
        {"{}", "weight_map: found no object", CPA_INVALID},
        {"{\"weight_map\":{\"a\":1}}", "weight_map: a: found no name", CPA_INVALID},
        {"{\"weight_map\":{\"a\":\"../one.safetensors\"}}", "weight_map: a: found no name", CPA_INVALID},
        {"{\"weight_map\":{\"a\":\"three.safetensors\"}}", "three.safetensors: No such file", CPA_IO},
        {"{\"weight_map\":{\"c\":\"one.safetensors\"}}", "c is not in one.safetensors", CPA_INVALID},
        {"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"twin.safetensors\"}}", "two files have a tensor a",
         CPA_INVALID},
    };
    cpa_safetensors *files = NULL;
    cpa_error err = {CPA_OK, ""};
    cpa_test_folder folder = cpa_test_folder_make();
    const char *index = "model.safetensors.index.json";
    CU_ASSERT_EQUAL(cpa_safetensors_open(folder.path, &files, &err), CPA_IO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "found neither model.safetensors nor model.safetensors.index.json"));
    write_tensor(&folder, "one.safetensors", "a");
    write_tensor(&folder, "two.safetensors", "b");
    write_tensor(&folder, "twin.safetensors", "a");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        write_text(&folder, index, refused[i].index);
        CU_ASSERT_EQUAL(cpa_safetensors_open(folder.path, &files, &err), refused[i].status);
        if (!strstr(err.message, refused[i].says)) CU_FAIL(refused[i].says);
    }
    write_text(&folder, index, "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"two.safetensors\"}}");
    CU_ASSERT_EQUAL(cpa_safetensors_open(folder.path, &files, &err), CPA_OK);
    CU_ASSERT(cpa_safetensors_find(files, "a") && cpa_safetensors_find(files, "b"));
    cpa_safetensors_close(files);
    cpa_test_folder_remove(&folder);
}

static const cpa_test tests[] = {
    {"tensors have the dtypes, shapes and data of the file", test_good},
    {"the tiny models open, one file or several", test_tiny_models},
    {"headers that are wrong are refused", test_refusals},
    {"a pipe is refused, and not waited for", test_pipe},
    {"a file that is cut anywhere is refused", test_truncated},
    {"what opens after random changes lies inside the file", test_corpus},
    {"an index maps names to files of the folder", test_index},
};
CPA_TEST_MAIN("safetensors", tests)
