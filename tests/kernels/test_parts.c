/* join_columns and sum_parts against plain loops, bit for bit. */
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "kernels/operators.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

enum { MOST_PARTS = 5 };

static uint64_t random_state;

static float uniform(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 33) / 0x1p30 - 1);
}

static void join(cpa_device *device, cpa_stream *stream, int64_t rows, int32_t n_parts, const int64_t *begins) {
    const int64_t row_bytes = begins[n_parts];
    unsigned char *want = cpa_test_poisoned(rows * row_bytes, 1), *got = cpa_test_poisoned(rows * row_bytes, 1);
    const void *parts[MOST_PARTS];
    void *out = cpa_test_upload(stream, got, rows * row_bytes);
    for (int32_t p = 0; p < n_parts; p++) {
        const int64_t width = begins[p + 1] - begins[p];
        unsigned char *part = cpa_test_poisoned(rows * width, 1);
        for (int64_t i = 0; i < rows * width; i++) {
            part[i] = (unsigned char)(i * 7 + p);
            want[i / width * row_bytes + begins[p] + i % width] = part[i];
        }
        parts[p] = cpa_test_upload(stream, part, rows * width);
        free(part);
    }
    const cpa_join_columns_args args = {rows, n_parts, parts, begins, out};
    CU_ASSERT_EQUAL(device->operators->join_columns(&args, stream), CPA_OK);
    cpa_test_download(stream, got, out, rows * row_bytes);
    CU_ASSERT_EQUAL(memcmp(got, want, (size_t)(rows * row_bytes)), 0);
    for (int32_t p = 0; p < n_parts; p++) cpa_test_free(stream, (void *)(uintptr_t)parts[p]);
    cpa_test_free(stream, out);
    free(got);
    free(want);
}

/* Parts of one width and of several, none among them, and of widths that only bytes fit. */
static void columns_lie_beside_each_other(void) {
    static const int64_t begins[][MOST_PARTS + 1] = {
        {0, 64, 128, 192, 256}, {0, 32, 96, 96, 112}, {0, 4, 16, 24, 36}, {0, 1, 1, 4, 9}};
    static const int64_t rows[] = {1, 3, 700};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) join(device, stream, rows[r], 4, begins[i]);
    cpa_test_device_close(device, stream);
}

static void sum(cpa_device *device, cpa_stream *stream, int64_t rows, int32_t width, int32_t n_parts, cpa_dtype dtype,
                int has_bias) {
    const int64_t n = rows * width, bytes = cpa_dtype_bytes(dtype);
    float *part = cpa_test_poisoned(n, sizeof *part), *total = cpa_test_poisoned(n, sizeof *total);
    float *bias = cpa_test_poisoned(width, sizeof *bias);
    char *want = cpa_test_poisoned(n, bytes), *got = cpa_test_poisoned(n, bytes);
    char *narrow_bias = cpa_test_poisoned(width, bytes);
    const float *parts[MOST_PARTS];
    for (int32_t p = 0; p < n_parts; p++) {
        for (int64_t i = 0; i < n; i++) {
            part[i] = uniform() * (p == 1 ? 1e4f : 1); /* so that another order gives other bits */
            total[i] = p ? total[i] + part[i] : part[i];
        }
        parts[p] = cpa_test_upload(stream, part, n * (int64_t)sizeof *part);
    }
    for (int32_t i = 0; i < width; i++) bias[i] = uniform();
    cpa_narrow(narrow_bias, bias, dtype, width);
    cpa_widen(bias, narrow_bias, dtype, width);
    for (int64_t i = 0; has_bias && i < n; i++) total[i] += bias[i % width];
    cpa_narrow(want, total, dtype, n);
    void *out = cpa_test_upload(stream, got, n * bytes),
         *device_bias = cpa_test_upload(stream, narrow_bias, width * bytes);
    const cpa_sum_parts_args args = {rows, width, n_parts, parts, has_bias ? device_bias : NULL, dtype, out};
    CU_ASSERT_EQUAL(device->operators->sum_parts(&args, stream), CPA_OK);
    cpa_test_download(stream, got, out, n * bytes);
    CU_ASSERT_EQUAL(memcmp(got, want, (size_t)(n * bytes)), 0);
    for (int32_t p = 0; p < n_parts; p++) cpa_test_free(stream, (void *)(uintptr_t)parts[p]);
    cpa_test_free(stream, device_bias);
    cpa_test_free(stream, out);
    free(narrow_bias);
    free(got);
    free(want);
    free(bias);
    free(total);
    free(part);
}

static void sums_are_taken_in_the_order_of_the_parts(void) {
    cpa_device *device;
    cpa_stream *stream;
    random_state = 3;
    cpa_test_device_open(2, &device, &stream);
    for (int dtype = CPA_F32; dtype < CPA_DTYPE_COUNT; dtype++) {
        sum(device, stream, 1, 64, 4, (cpa_dtype)dtype, 0);
        sum(device, stream, 33, 1024, 3, (cpa_dtype)dtype, 1);
        sum(device, stream, 5, 301, 5, (cpa_dtype)dtype, 1);
        sum(device, stream, 2, 8, 1, (cpa_dtype)dtype, 0);
    }
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"columns lie beside each other", columns_lie_beside_each_other},
    {"sums are taken in the order of the parts", sums_are_taken_in_the_order_of_the_parts},
};
CPA_DEVICE_TEST_MAIN("parts", tests)
