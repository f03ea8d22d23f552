/* latent_expand against float64: dtypes, widths, rows that lie apart, what is not finite. */
#include <cpattn/latent.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "src/check/reference.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* Rows whose tiles differ by powers of two, with zeros, one-sided tiles, subnormals, and an outlier. */
static float element(int64_t row, int32_t d) {
    const int64_t mixed = row * 7919 + d * 104729 + (d * row) % 31;
    const float x = (float)(mixed % 1999 - 999) / 333;
    if (row % 7 == 3 && d < 128) return 0;
    if (row % 11 == 5 && d == 200) return 30000;
    return ldexpf(row % 5 == 1 ? fabsf(x) : x, (int)((row + d / 128) % 9) - 4 - (row % 13 == 9 ? 120 : 0));
}

/* The rows of tokens in a dtype, `stride` elements apart, as the cache's writer is given them, and as floats. */
static void *make_rows(cpa_dtype dtype, int64_t tokens, int32_t dim, int64_t stride, float *wide) {
    char *rows = cpa_test_poisoned(tokens * stride, cpa_dtype_bytes(dtype));
    for (int64_t t = 0; t < tokens; t++) {
        float *x = wide + t * dim;
        char *row = rows + t * stride * cpa_dtype_bytes(dtype);
        for (int32_t d = 0; d < dim; d++) x[d] = element(t, d);
        if (t == 20) x[7] = NAN, x[300 % dim] = -INFINITY;
        cpa_narrow(row, x, dtype, dim);
        cpa_widen(x, row, dtype, dim);
    }
    return rows;
}

typedef struct expand_case {
    cpa_dtype dtype;
    int32_t latent, rope, heads, nope, v;
    int64_t tokens;
    int apart; /* rows lie apart, with poison between */
} expand_case;

static float weight(int64_t i) {
    return (float)((i * 7919) % 401 - 200) / 3000;
}

static void expands(const expand_case *c) {
    const int64_t bytes = cpa_dtype_bytes(c->dtype), gap = c->apart ? 8 : 0, inner = c->nope + c->v;
    const int64_t in = c->latent + c->rope + gap, k_row = c->heads * (c->nope + c->rope), v_row = c->heads * c->v;
    const int64_t weights = c->heads * inner * c->latent;
    float *wide = malloc((size_t)(c->tokens * (c->latent + c->rope)) * sizeof *wide);
    float *w = malloc((size_t)weights * sizeof *w);
    char *rows = make_rows(c->dtype, c->tokens, c->latent + c->rope, in, wide),
         *narrow = malloc((size_t)(weights * bytes));
    for (int64_t i = 0; i < weights; i++) w[i] = weight(i);
    cpa_narrow(narrow, w, c->dtype, weights);
    cpa_widen(w, narrow, c->dtype, weights);
    char *k = cpa_test_poisoned(c->tokens * (k_row + gap), bytes),
         *v = cpa_test_poisoned(c->tokens * (v_row + gap), bytes);
    void *x = cpa_test_upload(stream, rows, c->tokens * in * bytes),
         *m = cpa_test_upload(stream, narrow, weights * bytes);
    void *dk = cpa_test_upload(stream, k, c->tokens * (k_row + gap) * bytes);
    void *dv = cpa_test_upload(stream, v, c->tokens * (v_row + gap) * bytes);
    const cpa_latent_expand_args args = {.size = sizeof args,
                                         .tokens = c->tokens,
                                         .dtype = c->dtype,
                                         .latent_dim = c->latent,
                                         .rope_dim = c->rope,
                                         .heads = c->heads,
                                         .nope_dim = c->nope,
                                         .v_dim = c->v,
                                         .latents = x,
                                         .latent_row_stride = c->apart ? in : 0,
                                         .w_kv_b = m,
                                         .k = dk,
                                         .k_row_stride = c->apart ? k_row + gap : 0,
                                         .v = dv,
                                         .v_row_stride = c->apart ? v_row + gap : 0};
    CU_ASSERT_EQUAL(cpa_latent_expand(&args, stream), CPA_OK);
    cpa_test_download(stream, k, dk, c->tokens * (k_row + gap) * bytes);
    cpa_test_download(stream, v, dv, c->tokens * (v_row + gap) * bytes);
    int wrong = 0, touched = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        const float *latent = wide + t * (c->latent + c->rope);
        const char *k_at = k + t * (k_row + gap) * bytes, *v_at = v + t * (v_row + gap) * bytes;
        for (int64_t i = 0; i < c->heads * inner; i++) {
            const int64_t head = i / inner, d = i % inner;
            double sum = 0, size = 0;
            float got;
            for (int32_t j = 0; j < c->latent; j++) {
                const double product = (double)latent[j] * (double)w[i * c->latent + j];
                sum += product, size += fabs(product);
            }
            cpa_widen(&got,
                      d < c->nope ? k_at + (head * (c->nope + c->rope) + d) * bytes
                                  : v_at + (head * c->v + d - c->nope) * bytes,
                      c->dtype, 1);
            const double allowed = cpa_reference_unit_roundoff(c->dtype) * fabs(sum) + size * 0x1p-20 +
                                   (c->dtype == CPA_F16 ? 0x1p-24 : (double)FLT_MIN); /* subnormal */
            wrong += isfinite(sum) ? !(fabs((double)got - sum) <= allowed) : isfinite(got);
        }
        for (int64_t head = 0; head < c->heads; head++)
            wrong += memcmp(k_at + (head * (c->nope + c->rope) + c->nope) * bytes, rows + (t * in + c->latent) * bytes,
                            (size_t)(c->rope * bytes)) != 0;
        for (int64_t i = 0; i < gap * bytes; i++)
            touched += (uint8_t)k_at[k_row * bytes + i] != 0xff || (uint8_t)v_at[v_row * bytes + i] != 0xff;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_EQUAL(touched, 0);
    cpa_test_free(stream, dv), cpa_test_free(stream, dk), cpa_test_free(stream, m), cpa_test_free(stream, x);
    free(v), free(k), free(narrow), free(rows), free(w), free(wide);
}

static void expanded_heads_are_products(void) {
    static const expand_case cases[] = {{CPA_BF16, 512, 64, 3, 128, 128, 33, 1}, {CPA_F16, 512, 64, 2, 128, 128, 5, 0},
                                        {CPA_F32, 64, 16, 5, 24, 40, 70, 1},     {CPA_BF16, 32, 16, 4, 16, 16, 1, 0},
                                        {CPA_BF16, 40, 0, 3, 8, 24, 19, 1},      {CPA_F16, 100, 3, 1, 7, 5, 300, 0}};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expands(&cases[i]);
    cpa_test_device_close(device, stream);
}

static void bad_expansions_are_refused(void) {
    static float x[1];
    cpa_latent_expand_args good = {
        .size = sizeof good, .tokens = 1, .latent_dim = 4, .heads = 1, .nope_dim = 2, .v_dim = 2};
    good.latents = good.w_kv_b = x, good.k = good.v = x;
    const struct {
        const char *line;
        cpa_latent_expand_args args;
    } refused[] = {
#define BUT(line, ...)                                                                                                 \
    {                                                                                                                  \
        line, {                                                                                                        \
            .size = sizeof good, .tokens = 1, .latent_dim = 4, .heads = 1, .nope_dim = 2, .v_dim = 2, __VA_ARGS__      \
        }                                                                                                              \
    }
        BUT("latents is NULL", .k = x, .v = x, .w_kv_b = x),
        BUT("w_kv_b is NULL", .k = x, .v = x, .latents = x),
        BUT("k is NULL", .w_kv_b = x, .v = x, .latents = x),
        BUT("v is NULL", .w_kv_b = x, .k = x, .latents = x),
        BUT("dtype is 3", .dtype = CPA_FP8_E4M3),
        BUT("rope_dim is -1", .rope_dim = -1),
        BUT("latent_row_stride is 3, expected 0 or at least 4", .latents = x, .latent_row_stride = 3),
#undef BUT
    };
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        CU_ASSERT_EQUAL(cpa_latent_expand(&refused[i].args, stream), CPA_INVALID);
        if (!strstr(cpa_stream_error(stream), refused[i].line)) CU_FAIL(refused[i].line);
    }
    good.heads = 0;
    CU_ASSERT_EQUAL(cpa_latent_expand(&good, stream), CPA_INVALID);
    good.heads = 1, good.v_dim = CPA_MAX_HEAD_DIM + 1;
    CU_ASSERT_EQUAL(cpa_latent_expand(&good, stream), CPA_INVALID);
    good.tokens = 0, good.v_dim = 2, good.k = good.v = NULL, good.latents = good.w_kv_b = NULL;
    CU_ASSERT_EQUAL(cpa_latent_expand(&good, stream), CPA_OK);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"expanded heads are products", expanded_heads_are_products},
    {"bad expansions are refused", bad_expansions_are_refused},
};
CPA_DEVICE_TEST_MAIN("latent_expand", tests)
