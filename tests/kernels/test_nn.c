/* rmsnorm, swiglu and embed against float64: every dtype, odd widths, poisoned pads, rows that are not finite. */
#include <math.h>
#include <stdlib.h>

#include "base/convert.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

static const cpa_dtype DTYPES[] = {CPA_F32, CPA_BF16, CPA_F16};
static const int32_t WIDTHS[] = {1, 64, 1025, 5137, 17408};
enum { N_DTYPES = 3, N_WIDTHS = 5 };

/* fp32 arithmetic of devices: some roundings of an element of that size. */
static double slack_of(double want) {
    return 1e-6 * fabs(want);
}

static float rounded(double value, cpa_dtype dtype) {
    float narrow = (float)value;
    uint16_t half;
    if (dtype == CPA_F32) return narrow;
    cpa_narrow(&half, &narrow, dtype, 1);
    cpa_widen(&narrow, &half, dtype, 1);
    return narrow;
}

/* ---- rmsnorm ---- */

/* One row of x [width], which is normed, beside its weights; the number of elements that are wrong. */
static int wrong_in_norm(const float *x, const float *weight, const float *got, int32_t width, cpa_dtype dtype,
                         double offset, double eps) {
    double squares = 0;
    int wrong = 0;
    for (int32_t i = 0; i < width; i++) squares += (double)x[i] * (double)x[i];
    for (int32_t i = 0; i < width; i++) {
        const double want = (double)x[i] / sqrt(squares / width + eps) * ((double)weight[i] + offset);
        wrong += !cpa_test_is_near(got[i], want, dtype, slack_of(want));
    }
    return wrong;
}

enum { ROWS = 5, NAN_ROW = 2 };

static void check_rmsnorm(cpa_dtype dtype, int32_t width, int with_residual, float offset) {
    cpa_test_tensor x = cpa_test_tensor_make(stream, dtype, ROWS, width, width + (width % 8 ? 3 : 8), 1);
    cpa_test_tensor weight = cpa_test_tensor_make(stream, dtype, 1, width, 0, 2);
    cpa_test_tensor residual = cpa_test_tensor_make(stream, dtype, ROWS, width, 0, 3);
    cpa_test_tensor out = cpa_test_tensor_blank(stream, dtype, ROWS, width, 0);
    cpa_test_row(&x, NAN_ROW)[width - 1] = NAN;
    cpa_test_row(&x, 4)[0] = 0;
    cpa_test_tensor_send(&x, stream);
    cpa_rmsnorm_args args = {.size = sizeof args,
                             .rows = ROWS,
                             .width = width,
                             .dtype = dtype,
                             .x = x.device,
                             .x_stride = x.stride,
                             .residual = with_residual ? residual.device : NULL,
                             .weight = weight.device,
                             .weight_offset = offset,
                             .eps = 1e-5f,
                             .out = out.device};
    float *sums = malloc((size_t)(ROWS * width) * sizeof *sums);
    for (int64_t i = 0; i < ROWS * width; i++) {
        const float value = cpa_test_row(&x, i / width)[i % width];
        sums[i] = with_residual ? rounded((double)(residual.values[i] + value), dtype) : value;
    }
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&out, stream);
    for (int row = 0; row < ROWS; row++)
        CU_ASSERT_EQUAL(wrong_in_norm(sums + row * width, weight.values, cpa_test_row(&out, row), width, dtype,
                                      (double)offset, (double)args.eps),
                        0);
    if (with_residual) {
        cpa_test_tensor_fetch(&residual, stream);
        for (int64_t i = 0; i < ROWS * width; i++)
            CU_ASSERT(residual.values[i] == sums[i] || (isnan(residual.values[i]) && isnan(sums[i])));
    }
    free(sums);
    cpa_test_tensor_free(&out, stream);
    cpa_test_tensor_free(&residual, stream);
    cpa_test_tensor_free(&weight, stream);
    cpa_test_tensor_free(&x, stream);
}

static void rmsnorm_is_that_of_float64(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int d = 0; d < N_DTYPES; d++) {
        for (int w = 0; w < N_WIDTHS; w++) {
            check_rmsnorm(DTYPES[d], WIDTHS[w], w % 2, d == 1 ? 1 : 0);
            check_rmsnorm(DTYPES[d], WIDTHS[w], !(w % 2), d == 2 ? 1 : 0);
        }
    }
    cpa_test_device_close(device, stream);
}

static void rmsnorm_may_norm_in_place(void) {
    enum { WIDTH = 130 };
    cpa_test_device_open(1, &device, &stream);
    cpa_test_tensor x = cpa_test_tensor_make(stream, CPA_BF16, ROWS, WIDTH, 0, 1);
    cpa_test_tensor weight = cpa_test_tensor_make(stream, CPA_BF16, 1, WIDTH, 0, 2);
    cpa_test_tensor apart = cpa_test_tensor_blank(stream, CPA_BF16, ROWS, WIDTH, 0);
    cpa_rmsnorm_args args = {.size = sizeof args,
                             .rows = ROWS,
                             .width = WIDTH,
                             .dtype = CPA_BF16,
                             .x = x.device,
                             .weight = weight.device,
                             .out = apart.device};
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
    args.out = x.device;
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&apart, stream);
    cpa_test_tensor_fetch(&x, stream);
    CU_ASSERT_EQUAL(memcmp(x.values, apart.values, ROWS * WIDTH * sizeof *x.values), 0);
    cpa_test_tensor_free(&apart, stream);
    cpa_test_tensor_free(&weight, stream);
    cpa_test_tensor_free(&x, stream);
    cpa_test_device_close(device, stream);
}

/* ---- swiglu ---- */

static void check_swiglu(cpa_dtype dtype, int32_t width) {
    cpa_test_tensor in = cpa_test_tensor_make(stream, dtype, ROWS, 2 * width, 0, 4);
    cpa_test_tensor out = cpa_test_tensor_blank(stream, dtype, ROWS, width, 0);
    cpa_test_row(&in, 0)[0] = -120; /* exp(120) is beyond fp32 */
    cpa_test_row(&in, 1)[0] = 120;
    cpa_test_row(&in, NAN_ROW)[width] = NAN;
    cpa_test_row(&in, 3)[0] = -INFINITY; /* -inf / inf */
    cpa_test_tensor_send(&in, stream);
    cpa_swiglu_args args = {sizeof args, ROWS, width, dtype, in.device, out.device};
    CU_ASSERT_EQUAL(cpa_swiglu(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&out, stream);
    int wrong = 0;
    for (int row = 0; row < ROWS; row++) {
        const float *gate = cpa_test_row(&in, row), *up = gate + width;
        for (int32_t i = 0; i < width; i++) {
            const double want = (double)gate[i] / (1 + exp(-(double)gate[i])) * (double)up[i];
            wrong += !cpa_test_is_near(cpa_test_row(&out, row)[i], want, dtype, slack_of(want));
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_tensor_free(&out, stream);
    cpa_test_tensor_free(&in, stream);
}

static void swiglu_is_that_of_float64(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int d = 0; d < N_DTYPES; d++) {
        for (int w = 0; w < N_WIDTHS; w++) check_swiglu(DTYPES[d], WIDTHS[w]);
    }
    cpa_test_device_close(device, stream);
}

/* ---- embed ---- */

static void check_embed(cpa_dtype dtype, int32_t width) {
    enum { VOCABULARY = 11, TOKENS = 7 };
    const uint32_t tokens[TOKENS] = {3, VOCABULARY - 1, 0, VOCABULARY, 3, UINT32_MAX, 0x80000000u};
    cpa_test_tensor table = cpa_test_tensor_make(stream, dtype, VOCABULARY, width, 0, 5);
    cpa_test_tensor out = cpa_test_tensor_make(stream, dtype, TOKENS, width, 0, 6);
    uint32_t *device_tokens = cpa_test_upload(stream, tokens, sizeof tokens);
    cpa_embed_args args = {sizeof args, TOKENS, width, dtype, VOCABULARY, table.device, device_tokens, out.device};
    CU_ASSERT_EQUAL(cpa_embed(&args, stream), CPA_OK);
    cpa_test_tensor_fetch(&out, stream);
    int wrong = 0;
    for (int row = 0; row < TOKENS; row++) {
        for (int32_t i = 0; i < width; i++) {
            const float got = cpa_test_row(&out, row)[i];
            wrong += tokens[row] < VOCABULARY ? got != cpa_test_row(&table, tokens[row])[i] : !isnan(got);
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_test_free(stream, device_tokens);
    cpa_test_tensor_free(&out, stream);
    cpa_test_tensor_free(&table, stream);
}

static void tokens_outside_of_the_vocabulary_embed_as_nan(void) {
    cpa_test_device_open(1, &device, &stream);
    for (int d = 0; d < N_DTYPES; d++) {
        for (int w = 0; w < N_WIDTHS; w++) check_embed(DTYPES[d], WIDTHS[w]);
    }
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"rmsnorm is that of float64", rmsnorm_is_that_of_float64},
    {"rmsnorm may norm in place", rmsnorm_may_norm_in_place},
    {"swiglu is that of float64", swiglu_is_that_of_float64},
    {"tokens outside of the vocabulary embed as NaN", tokens_outside_of_the_vocabulary_embed_as_nan},
};
CPA_DEVICE_TEST_MAIN("nn", tests)
