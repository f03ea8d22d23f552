/* project_states against float64: strides wider than rows, states that are empty, whose O is NaN, and those that are no
 * number. */
#include <math.h>
#include <stdlib.h>

#include "base/convert.h"
#include "kernels/operators.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

typedef struct project_case {
    int64_t rows;
    int32_t heads, v_dim, out_dim;
    cpa_dtype dtype;
} project_case;

static const project_case CASES[] = {{1, 1, 1, 1, CPA_F32},       {19, 3, 48, 24, CPA_F32},  {8, 5, 64, 200, CPA_BF16},
                                     {33, 128, 40, 16, CPA_BF16}, {3, 2, 256, 256, CPA_F16}, {65, 2, 130, 7, CPA_F16}};
enum { GAP = 5 }; /* elements between rows */

static uint64_t random_state = 1;
static float uniform(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(random_state >> 33) / 0x1p30 - 1);
}

/* Every third state is empty, one in five of the others no number. */
static float lse_of(int64_t at) {
    return at % 6 == 0 ? -INFINITY : at % 6 == 3 ? INFINITY : at % 5 == 4 ? NAN : (float)(at % 17) - 8;
}

static int64_t count_wrong(const project_case *c, const float *o, const float *matrix, const float *got,
                           const float *got_lse) {
    const int64_t from_stride = (int64_t)c->heads * c->v_dim + GAP, to_stride = (int64_t)c->heads * c->out_dim + GAP;
    int64_t wrong = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        for (int64_t h = 0; h < c->heads; h++) {
            const float lse = lse_of(row * c->heads + h), lse_got = got_lse[row * (c->heads + GAP) + h];
            wrong += !(lse == lse_got || (isnan(lse) && isnan(lse_got)));
            for (int64_t i = 0; i < c->out_dim; i++) {
                const float x = got[row * to_stride + h * c->out_dim + i];
                double sum = 0, size = 0;
                for (int64_t d = 0; d < c->v_dim && !isinf(lse); d++) {
                    const double product = (double)o[row * from_stride + h * c->v_dim + d] *
                                           (double)matrix[(h * c->v_dim + d) * c->out_dim + i];
                    sum += product;
                    size += fabs(product);
                }
                wrong += isnan(lse) ? !isnan(x) : !(fabs((double)x - sum) <= 1e-5 * size);
            }
        }
        for (int64_t i = 0; i < GAP; i++) wrong += !isnan(got[row * to_stride + c->heads * c->out_dim + i]);
    }
    return wrong;
}

static void run(const project_case *c) {
    cpa_device *device;
    cpa_stream *stream;
    const int64_t from_stride = (int64_t)c->heads * c->v_dim + GAP, to_stride = (int64_t)c->heads * c->out_dim + GAP;
    const int64_t lse_stride = c->heads + GAP, weights = (int64_t)c->heads * c->v_dim * c->out_dim;
    const int64_t f = sizeof(float), element = cpa_dtype_bytes(c->dtype);
    cpa_test_device_open(1, &device, &stream);
    float *o = cpa_test_poisoned(c->rows * from_stride, f), *lse = cpa_test_poisoned(c->rows * lse_stride, f);
    float *matrix = cpa_test_poisoned(weights, f), *got = cpa_test_poisoned(c->rows * to_stride, f);
    float *got_lse = cpa_test_poisoned(c->rows * lse_stride, f);
    void *narrow = cpa_test_poisoned(weights, element);
    for (int64_t i = 0; i < weights; i++) matrix[i] = uniform();
    cpa_narrow(narrow, matrix, c->dtype, weights);
    cpa_widen(matrix, narrow, c->dtype, weights);
    for (int64_t at = 0; at < c->rows * c->heads; at++) {
        const int64_t row = at / c->heads, head = at % c->heads;
        lse[row * lse_stride + head] = lse_of(at);
        for (int64_t d = 0; d < c->v_dim && isfinite(lse_of(at)); d++)
            o[row * from_stride + head * c->v_dim + d] = uniform();
    }
    cpa_project_states_args args = {
        .rows = c->rows,
        .heads = c->heads,
        .v_dim = c->v_dim,
        .out_dim = c->out_dim,
        .from = {.o = cpa_test_upload(stream, o, c->rows * from_stride * f),
                 .o_row_stride = from_stride,
                 .lse = cpa_test_upload(stream, lse, c->rows * lse_stride * f),
                 .lse_row_stride = lse_stride},
        .matrix = cpa_test_upload(stream, narrow, weights * element),
        .dtype = c->dtype,
        .to = {.o = cpa_test_upload(stream, got, c->rows * to_stride * f),
               .o_row_stride = to_stride,
               .lse = cpa_test_upload(stream, got_lse, c->rows * lse_stride * f),
               .lse_row_stride = lse_stride},
    };
    CU_ASSERT_EQUAL(device->operators->project_states(&args, stream), CPA_OK);
    cpa_test_download(stream, got, args.to.o, c->rows * to_stride * f);
    cpa_test_download(stream, got_lse, args.to.lse, c->rows * lse_stride * f);
    CU_ASSERT_EQUAL(count_wrong(c, o, matrix, got, got_lse), 0);
    void *used[] = {args.from.o, args.from.lse, (void *)(uintptr_t)args.matrix, args.to.o, args.to.lse};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) cpa_test_free(stream, used[i]);
    void *made[] = {o, lse, matrix, got, got_lse, narrow};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) free(made[i]);
    cpa_test_device_close(device, stream);
}

static void states_are_multiplied_by_the_matrix_of_their_head(void) {
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) run(&CASES[i]);
}

static const cpa_test TESTS[] = {
    {"states are multiplied by the matrix of their head", states_are_multiplied_by_the_matrix_of_their_head},
};
CPA_DEVICE_TEST_MAIN("project_states", TESTS)
