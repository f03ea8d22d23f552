/* Weights as checkpoints store them: codes of FP8 with a scale for each block of 128 x 128, whole and in parts that begin
 * anywhere, and scales that are missing, of another shape, or no scales. */
#include "src/model/stored_weight.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/fixtures/folder_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROWS = 130, COLUMNS = 259, BLOCK_ROWS = 2, BLOCK_COLUMNS = 3, MOST_BYTES = 1 << 17 };

/* A file of codes, 0 to 255 over and over, and of scales of a shape and dtype. */
static cpa_safetensors *open_file(const cpa_test_folder *folder, const char *scale_shape, const char *scale_type,
                                  const float *scales, int n_scales) {
    static char bytes[MOST_BYTES];
    const long codes = (long)ROWS * COLUMNS, end = codes + 4L * n_scales;
    const int header =
        snprintf(bytes + 8, 1000,
                 "{\"w\":{\"dtype\":\"F8_E4M3\",\"shape\":[%d,%d],\"data_offsets\":[0,%ld]},"
                 "\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%ld,%ld]}}",
                 ROWS, COLUMNS, codes, n_scales ? "w_scale_inv" : "other", scale_type, scale_shape, codes, end);
    for (int i = 0; i < 8; i++) bytes[i] = (char)((uint64_t)header >> 8 * i);
    for (long i = 0; i < codes; i++) bytes[8 + header + i] = (char)i;
    memcpy(bytes + 8 + header + codes, scales, (size_t)n_scales * sizeof *scales);
    cpa_test_folder_write(folder, "model.safetensors", bytes, (size_t)(8 + header + end));
    cpa_safetensors *files = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_safetensors_open(folder->path, &files, NULL), CPA_OK);
    return files;
}

/* 1 sign, 4 exponent and 3 mantissa bits (Micikevicius et al., arXiv:2209.05433). */
static double number_of(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return (code & 127) == 127 ? NAN : code & 128 ? -magnitude : magnitude;
}

static void codes_are_read_with_the_scale_of_their_block(void) {
    static const float scales[BLOCK_ROWS * BLOCK_COLUMNS] = {0.5f, 3, 1e-3f, 7, 0x1p-20f, 0.1f};
    static const int64_t parts[][2] = {{0, ROWS * COLUMNS}, {COLUMNS * 127 + 120, 300}, {5, 1}, {COLUMNS - 2, 4}};
    static float read[ROWS * COLUMNS];
    cpa_test_folder folder = cpa_test_folder_make();
    cpa_safetensors *files = open_file(&folder, "[2,3]", "F32", scales, BLOCK_ROWS * BLOCK_COLUMNS);
    cpa_stored_weight weight;
    CU_ASSERT_EQUAL_FATAL(cpa_stored_weight_find(files, "w", &weight, NULL), CPA_OK);
    for (size_t p = 0; p < sizeof parts / sizeof *parts; p++) {
        int wrong = 0;
        cpa_stored_weight_read(&weight, parts[p][0], parts[p][1], read);
        for (int64_t i = 0; i < parts[p][1]; i++) {
            const int64_t at = parts[p][0] + i, row = at / COLUMNS, column = at % COLUMNS;
            const float scale = scales[row / 128 * BLOCK_COLUMNS + column / 128];
            const float want = (float)number_of((int)(at % 256)) * scale;
            wrong += isnan(want) ? !isnan(read[i]) : read[i] != want;
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
    cpa_safetensors_close(files);
    cpa_test_folder_remove(&folder);
}

static void scales_that_are_none_are_named(void) {
    static const float right[6] = {1, 1, 1, 1, 1, 1}, zero[6] = {1, 1, 1, 1, 0, 1}, nan[6] = {1, NAN, 1, 1, 1, 1};
    static const struct {
        const char *shape, *type;
        const float *scales;
        int n;
        cpa_status status;
        const char *says;
    } refused[] = {
        {"[0]", "F32", right, 0, CPA_INVALID, "the weights have no tensor w_scale_inv"},
        {"[3,2]", "F32", right, 6, CPA_INVALID, "w_scale_inv: found 6 scales in 2 dimensions, expected [2, 3]"},
        {"[6]", "F32", right, 6, CPA_INVALID, "w_scale_inv: found 6 scales in 1 dimensions, expected [2, 3]"},
        {"[2,3]", "I32", right, 6, CPA_UNSUPPORTED, "w_scale_inv: found dtype I32, supported is F32"},
        {"[2,3]", "F32", zero, 6, CPA_INVALID, "w_scale_inv: scale [1, 1] is 0, expected a number above 0"},
        {"[2,3]", "F32", nan, 6, CPA_INVALID, "w_scale_inv: scale [0, 1] is nan, expected a number above 0"},
    };
    cpa_test_folder folder = cpa_test_folder_make();
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        cpa_safetensors *files = open_file(&folder, refused[i].shape, refused[i].type, refused[i].scales, refused[i].n);
        cpa_stored_weight weight;
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_stored_weight_find(files, "w", &weight, &err), refused[i].status);
        CU_ASSERT_STRING_EQUAL(err.message, refused[i].says);
        cpa_safetensors_close(files);
    }
    cpa_test_folder_remove(&folder);
}

static const cpa_test tests[] = {
    {"codes are read with the scale of their block", codes_are_read_with_the_scale_of_their_block},
    {"scales that are missing, misshapen or none are named", scales_that_are_none_are_named},
};
CPA_TEST_MAIN("stored weight", tests)
