/* What rmsnorm makes beside plain rows, against float64: codes and scales of every kind, rows with strides of their own,
 * weights in fp32; and rmsnorm2. Codes are those of the scale that was written, byte for byte, unless fp32 arithmetic
 * comes to the other side of a tie. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "tests/fixtures/nn_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;
static int whole_grid;

enum { POISON = 0xee, ZERO_ROW = 1, NAN_ROW = 3 };
static const float EPS = 1e-5f;

/* ---- numbers of 8 bits ---- */

static double e4m3_value(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    return exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
}

/* The code of the nearest number, of two as near the even one. */
static uint8_t e4m3_of(double x) {
    const double magnitude = fabs(x);
    int low = 0, high = 0x7e;
    if (isnan(x)) return 0;
    while (high - low > 1) { /* the numbers are in the order of their codes */
        const int middle = (low + high) / 2;
        *(e4m3_value(middle) <= magnitude ? &low : &high) = middle;
    }
    const double down = magnitude - e4m3_value(low), up = e4m3_value(high) - magnitude;
    const int code = up < down || (up == down && high % 2 == 0) ? high : low;
    return (uint8_t)(code | (signbit(x) ? 0x80 : 0));
}

static uint8_t int8_of(double x) {
    return (uint8_t)(int8_t)(isnan(x) ? 0 : fmin(fmax(rint(x), -127), 127));
}

static int is_code_of(uint8_t got, double x, int is_int8) {
    const double factors[] = {1, 1 + 0x1p-20, 1 - 0x1p-20};
    for (int i = 0; i < 3; i++) {
        if (got == (is_int8 ? int8_of(x * factors[i]) : e4m3_of(x * factors[i]))) return 1;
    }
    return 0;
}

static void codes_here_are_those_of_the_format(void) {
    for (int code = 0; code <= 0x7e; code++) {
        CU_ASSERT_EQUAL(e4m3_of(e4m3_value(code)), code);
        CU_ASSERT_EQUAL(e4m3_of(-e4m3_value(code)), code | 0x80);
        if (code == 0x7e) continue;
        const double tie = (e4m3_value(code) + e4m3_value(code + 1)) / 2;
        CU_ASSERT_EQUAL(e4m3_of(tie), code % 2 ? code + 1 : code);
        CU_ASSERT_EQUAL(e4m3_of(nextafter(tie, 0)), code);
        CU_ASSERT_EQUAL(e4m3_of(nextafter(tie, 1000)), code + 1);
    }
    CU_ASSERT_EQUAL(e4m3_of(INFINITY), 0x7e);
}

/* ---- a kind of codes, and its scales ---- */

typedef struct kind {
    cpa_norm_codes codes;
    int32_t group, pow2, by_column;
    float number; /* static_scale, or scale_bound; 0: none */
} kind;

static const kind KINDS[] = {
    {CPA_NORM_FP8_STATIC, 0, 0, 0, 0.03f}, {CPA_NORM_FP8_TOKEN, 0, 0, 0, 0},   {CPA_NORM_FP8_TOKEN, 0, 0, 0, 1.5f},
    {CPA_NORM_FP8_GROUP, 64, 0, 0, 0},     {CPA_NORM_FP8_GROUP, 128, 1, 0, 0}, {CPA_NORM_FP8_GROUP, 64, 1, 1, 0},
    {CPA_NORM_FP8_GROUP, 128, 0, 1, 0},    {CPA_NORM_INT8_TOKEN, 0, 0, 0, 0},
};
enum { N_KINDS = sizeof KINDS / sizeof *KINDS };

/* The scale of elements whose largest finite magnitude is m. */
static double scale_of(const kind *k, double m) {
    switch (k->codes) {
        case CPA_NORM_FP8_STATIC: return (double)k->number;
        case CPA_NORM_FP8_TOKEN:
            return fmax((k->number != 0 ? fmin(m, (double)k->number) : m) / 448, 1 / (448.0 * 512));
        case CPA_NORM_INT8_TOKEN: return m / 127;
        default: break;
    }
    const double scale = fmax(m, 1e-10) / 448;
    return k->pow2 ? exp2(ceil(log2(scale))) : scale;
}

/* ---- a call ---- */

/* The input of calls, and where one writes. */
typedef struct call {
    int64_t rows, groups, n_scales;
    int32_t width, out_stride;
    cpa_test_tensor x, weight, residual;
    float *sums; /* [rows, width] what is normed: x, or the residual behind the call */
    uint8_t *out, *flags, *device_out, *device_flags;
    float *scales, *device_scales, *device_number;
} call;

static float rounded(float value, cpa_dtype dtype) {
    uint32_t narrow;
    cpa_narrow(&narrow, &value, dtype, 1);
    cpa_widen(&value, &narrow, dtype, 1);
    return value;
}

/* Strides of x, the residual and the result differ. */
static void make(call *c, cpa_dtype dtype, int64_t rows, int32_t width, int with_residual) {
    const int32_t pad = width % 16 ? 3 : 16;
    *c = (call){.rows = rows, .width = width, .out_stride = width + 2 * pad};
    c->x = cpa_test_tensor_make(stream, dtype, rows, width, width + pad, 1);
    c->weight = cpa_test_tensor_make(stream, width % 2 ? CPA_F32 : dtype, 1, width, 0, 2);
    c->residual = cpa_test_tensor_make(stream, dtype, with_residual ? rows : 0, width, width + 3 * pad, 3);
    for (int32_t i = 0; rows > ZERO_ROW && i < width; i++) {
        cpa_test_row(&c->x, ZERO_ROW)[i] = 0;
        if (with_residual) cpa_test_row(&c->residual, ZERO_ROW)[i] = 0;
    }
    if (rows > NAN_ROW) cpa_test_row(&c->x, NAN_ROW)[width / 2] = NAN;
    cpa_test_tensor_send(&c->x, stream);
    if (with_residual) cpa_test_tensor_send(&c->residual, stream);
    c->sums = malloc((size_t)(rows * width) * sizeof *c->sums);
    for (int64_t row = 0; row < rows; row++) {
        for (int32_t i = 0; i < width; i++) {
            const float x = cpa_test_row(&c->x, row)[i];
            c->sums[row * width + i] = with_residual ? rounded(cpa_test_row(&c->residual, row)[i] + x, dtype) : x;
        }
    }
}

static void destroy(call *c) {
    cpa_test_tensor_free(&c->residual, stream);
    cpa_test_tensor_free(&c->weight, stream);
    cpa_test_tensor_free(&c->x, stream);
    free(c->sums);
}

static void *poisoned(int64_t bytes, void *host_copy) {
    memset(host_copy, POISON, (size_t)bytes);
    return cpa_test_upload(stream, host_copy, bytes);
}

/* Runs the kind; what it wrote is in out, scales and flags, until forget. */
static void run(call *c, const kind *k) {
    const int64_t padded = k->by_column ? (c->rows + 3) / 4 * 4 : c->rows, out_bytes = c->rows * c->out_stride;
    c->groups = k->group ? (c->width + k->group - 1) / k->group : 1;
    c->n_scales = padded * c->groups;
    c->out = malloc((size_t)out_bytes);
    c->scales = malloc((size_t)(c->n_scales + 1) * sizeof(float));
    c->flags = calloc((size_t)c->rows, 1);
    c->device_out = poisoned(out_bytes, c->out);
    c->device_scales = poisoned((c->n_scales + 1) * 4, c->scales);
    c->device_flags = cpa_test_upload(stream, c->flags, c->rows);
    c->device_number = cpa_test_upload(stream, &k->number, sizeof k->number);
    const int is_static = k->codes == CPA_NORM_FP8_STATIC;
    if (c->residual.rows) cpa_test_tensor_send(&c->residual, stream); /* as it was before the last call */
    const cpa_rmsnorm_args args = {.size = sizeof args,
                                   .rows = c->rows,
                                   .width = c->width,
                                   .dtype = c->x.dtype,
                                   .x = c->x.device,
                                   .x_stride = c->x.stride,
                                   .residual = c->residual.rows ? c->residual.device : NULL,
                                   .residual_stride = c->residual.stride,
                                   .weight = c->weight.device,
                                   .weight_is_f32 = c->weight.dtype == CPA_F32,
                                   .eps = EPS,
                                   .out = c->device_out,
                                   .out_stride = c->out_stride,
                                   .codes = k->codes,
                                   .group = k->group,
                                   .scales_pow2 = k->pow2,
                                   .scales_by_column = k->by_column,
                                   .static_scale = is_static ? c->device_number : NULL,
                                   .scale_bound = !is_static && k->number != 0 ? c->device_number : NULL,
                                   .scales = is_static ? NULL : c->device_scales,
                                   .nonfinite = c->device_flags};
    CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
    cpa_test_download(stream, c->out, c->device_out, out_bytes);
    cpa_test_download(stream, c->scales, c->device_scales, (c->n_scales + 1) * 4);
    cpa_test_download(stream, c->flags, c->device_flags, c->rows);
}

static void forget(call *c) {
    cpa_test_free(stream, c->device_number);
    cpa_test_free(stream, c->device_flags);
    cpa_test_free(stream, c->device_scales);
    cpa_test_free(stream, c->device_out);
    free(c->flags);
    free(c->scales);
    free(c->out);
}

/* ---- what a call has to write ---- */

/* The norm of a row, rounded to fp32 once. */
static void norm_of(const call *c, int64_t row, float *out) {
    const float *x = c->sums + row * c->width;
    double squares = 0;
    for (int32_t i = 0; i < c->width; i++) squares += (double)x[i] * (double)x[i];
    for (int32_t i = 0; i < c->width; i++)
        out[i] = (float)((double)x[i] / sqrt(squares / c->width + (double)EPS) * (double)c->weight.values[i]);
}

static float written_scale(const call *c, const kind *k, int64_t row, int64_t group) {
    if (k->codes == CPA_NORM_FP8_STATIC) return k->number;
    return c->scales[k->by_column ? group * ((c->rows + 3) / 4 * 4) + row : row * c->groups + group];
}

/* Scales and codes of a row that are wrong. */
static int wrong_in_row(const call *c, const kind *k, int64_t row, const float *norm) {
    const int64_t size = k->group ? k->group : c->width;
    const uint8_t *out = c->out + row * c->out_stride;
    int wrong = 0;
    for (int64_t g = 0; g < c->groups; g++) {
        const int64_t end = (g + 1) * size < c->width ? (g + 1) * size : c->width;
        double largest = 0;
        for (int64_t i = g * size; i < end; i++)
            largest = isfinite(norm[i]) ? fmax(largest, fabs((double)norm[i])) : largest;
        const double got = (double)written_scale(c, k, row, g), want = scale_of(k, largest);
        wrong += !(fabs(got - want) <= 1e-6 * want);
        for (int64_t i = g * size; i < end; i++)
            wrong += !is_code_of(out[i], (double)norm[i] / got, k->codes == CPA_NORM_INT8_TOKEN);
    }
    for (int64_t i = c->width; i < c->out_stride; i++) wrong += out[i] != POISON;
    return wrong;
}

/* Scales of rows that are none, what lies behind the scales, and flags. */
static int wrong_beside(const call *c, const kind *k) {
    const float *norm = c->sums;
    int wrong = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        int nonfinite = 0;
        for (int32_t i = 0; i < c->width; i++) nonfinite |= !isfinite(norm[row * c->width + i]);
        wrong += c->flags[row] != nonfinite;
    }
    for (int64_t g = 0; k->by_column && g < c->groups; g++) {
        for (int64_t row = c->rows; row % 4; row++) wrong += written_scale(c, k, row, g) != 0;
    }
    const uint8_t *behind = (const uint8_t *)&c->scales[k->codes == CPA_NORM_FP8_STATIC ? 0 : c->n_scales];
    return wrong + (*behind != POISON);
}

/* All rows of few, and some of many. */
static void check_kind(call *c, const kind *k) {
    float *norm = malloc((size_t)c->width * sizeof *norm);
    const int64_t step = c->rows > 64 ? c->rows / 61 : 1;
    run(c, k);
    for (int64_t row = 0; row < c->rows; row += step) {
        norm_of(c, row, norm);
        CU_ASSERT_EQUAL(wrong_in_row(c, k, row, norm), 0);
    }
    CU_ASSERT_EQUAL(wrong_beside(c, k), 0);
    if (c->residual.rows) {
        cpa_test_tensor residual = c->residual;
        residual.values = malloc((size_t)(residual.rows * residual.stride) * sizeof *residual.values);
        cpa_test_tensor_fetch(&residual, stream);
        int wrong = 0;
        for (int64_t i = 0; i < c->rows * c->width; i++) {
            const float got = cpa_test_row(&residual, i / c->width)[i % c->width];
            wrong += got != c->sums[i] && !(isnan(got) && isnan(c->sums[i]));
        }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&residual));
        free(residual.values);
    }
    forget(c);
    free(norm);
}

/* vLLM's grid of tests/kernels/core/test_fused_quant_layernorm.py and test_layernorm.py; daily, few of its rows. */
static void codes_are_those_of_float64(void) {
    static const int32_t WIDTHS[] = {1, 64, 128, 1024, 1025, 1027, 1029, 5120, 5137};
    static const int64_t FEW[] = {1, 5}, MANY[] = {1, 5, 2048, 4096};
    cpa_test_device_open(2, &device, &stream);
    for (size_t w = 0; w < sizeof WIDTHS / sizeof *WIDTHS; w++) {
        for (int r = 0; r < (whole_grid ? 4 : 2); r++) {
            for (int form = 0; form < 4; form++) { /* bf16 or fp32, with a residual or without */
                call c;
                if (!whole_grid && (w + (size_t)r + (size_t)form) % 2) continue;
                make(&c, form % 2 ? CPA_F32 : CPA_BF16, whole_grid ? MANY[r] : FEW[r], WIDTHS[w], form / 2);
                for (int k = 0; k < N_KINDS; k++) check_kind(&c, &KINDS[k]);
                destroy(&c);
            }
        }
    }
    cpa_test_device_close(device, stream);
}

static void infinite_elements_saturate_and_are_told(void) {
    enum { WIDTH = 128, ROWS = 2, AT = 70 };
    cpa_test_device_open(1, &device, &stream);
    call c;
    make(&c, CPA_F16, ROWS, WIDTH, 0);
    c.weight.values[AT] = INFINITY;
    cpa_test_row(&c.x, 0)[AT] = -1;
    cpa_test_tensor_send(&c.x, stream);
    cpa_test_tensor_send(&c.weight, stream);
    for (int k = 0; k < N_KINDS; k++) {
        const int is_int8 = KINDS[k].codes == CPA_NORM_INT8_TOKEN;
        run(&c, &KINDS[k]);
        CU_ASSERT_EQUAL(c.out[AT], is_int8 ? 0x81 : 0xfe);
        CU_ASSERT_EQUAL(c.out[c.out_stride + AT], 0); /* 0 times infinity */
        CU_ASSERT_TRUE(isfinite(written_scale(&c, &KINDS[k], 0, c.groups - 1)));
        CU_ASSERT_TRUE(c.flags[0] && c.flags[1]);
        forget(&c);
    }
    destroy(&c);
    cpa_test_device_close(device, stream);
}

/* ---- rmsnorm2 ---- */

/* Two slices of one product, to rows with strides of their own, against rmsnorm of each. */
static void check_two(cpa_dtype dtype, int64_t rows, int32_t first, int32_t second) {
    const int32_t widths[2] = {first, second}, gap = 8;
    cpa_test_tensor x = cpa_test_tensor_make(stream, dtype, rows, first + gap + second, 0, 7);
    cpa_test_tensor weight[2], apart[2], out[2];
    cpa_rmsnorm2_args args = {.size = sizeof args, .rows = rows, .dtype = dtype, .eps = EPS, .weight_offset = 1};
    for (int i = 0; i < 2; i++) {
        const int64_t offset = i * (first + gap) * cpa_dtype_bytes(dtype);
        weight[i] = cpa_test_tensor_make(stream, dtype, 1, widths[i], 0, 8 + (uint64_t)i);
        apart[i] = cpa_test_tensor_blank(stream, dtype, rows, widths[i], 0);
        out[i] = cpa_test_tensor_blank(stream, dtype, rows, widths[i], widths[i] + 8);
        args.parts[i] = (cpa_norm_rows){.x = (char *)x.device + offset,
                                        .x_stride = x.stride,
                                        .weight = weight[i].device,
                                        .out = out[i].device,
                                        .out_stride = out[i].stride,
                                        .width = widths[i]};
        const cpa_rmsnorm_args one = {.size = sizeof one,
                                      .rows = rows,
                                      .width = widths[i],
                                      .dtype = dtype,
                                      .x = args.parts[i].x,
                                      .x_stride = x.stride,
                                      .weight = weight[i].device,
                                      .weight_offset = 1,
                                      .eps = EPS,
                                      .out = apart[i].device};
        CU_ASSERT_EQUAL(cpa_rmsnorm(&one, stream), CPA_OK);
    }
    CU_ASSERT_EQUAL(cpa_rmsnorm2(&args, stream), CPA_OK);
    for (int i = 0; i < 2; i++) {
        int64_t wrong = 0;
        cpa_test_tensor_fetch(&apart[i], stream);
        cpa_test_tensor_fetch(&out[i], stream);
        for (int64_t row = 0; row < rows; row++)
            wrong += memcmp(cpa_test_row(&apart[i], row), cpa_test_row(&out[i], row),
                            (size_t)widths[i] * sizeof(float)) != 0;
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(&out[i]));
        cpa_test_tensor_free(&out[i], stream);
        cpa_test_tensor_free(&apart[i], stream);
        cpa_test_tensor_free(&weight[i], stream);
    }
    cpa_test_tensor_free(&x, stream);
}

/* vLLM's grid of fused_q_kv_rmsnorm, whose last row counts lie at the limit of a grid's y; daily, few of its rows. */
static void rmsnorm2_has_the_bits_of_two_rmsnorm(void) {
    static const int32_t WIDTHS[][2] = {{192, 576}, {1536, 512}, {17, 9000}};
    static const int64_t ROWS[] = {1, 17, 1024, 8192, 65535, 65536, 131072};
    cpa_test_device_open(2, &device, &stream);
    for (int w = 0; w < 3; w++) {
        for (int r = 0; r < (!whole_grid ? 2 : w == 0 ? 7 : 4); r++)
            check_two(w == 1 ? CPA_F16 : CPA_BF16, ROWS[r], WIDTHS[w][0], WIDTHS[w][1]);
    }
    check_two(CPA_F32, 5, 1536, 512);
    cpa_test_device_close(device, stream);
}

/* ---- plain rows with strides, and weights in fp32 ---- */

static void strides_and_weights_change_no_bit(void) {
    enum { ROWS = 5, WIDTH = 136 };
    cpa_test_device_open(1, &device, &stream);
    for (int plain = 0; plain < CPA_DTYPE_COUNT; plain++) {
        const cpa_dtype dtype = (cpa_dtype)plain;
        cpa_test_tensor x = cpa_test_tensor_make(stream, dtype, ROWS, WIDTH, WIDTH + 24, 1);
        cpa_test_tensor weight = cpa_test_tensor_make(stream, dtype, 1, WIDTH, 0, 2), wide;
        cpa_test_tensor residual = cpa_test_tensor_make(stream, dtype, ROWS, WIDTH, 0, 3);
        cpa_test_tensor apart = cpa_test_tensor_make(stream, dtype, ROWS, WIDTH, WIDTH + 8, 3);
        cpa_test_tensor out = cpa_test_tensor_blank(stream, dtype, ROWS, WIDTH, 0);
        cpa_test_tensor strided = cpa_test_tensor_blank(stream, dtype, ROWS, WIDTH, WIDTH + 16);
        wide = cpa_test_tensor_blank(stream, CPA_F32, 1, WIDTH, 0);
        memcpy(wide.values, weight.values, WIDTH * sizeof(float));
        cpa_test_tensor_send(&wide, stream);
        cpa_rmsnorm_args args = {.size = sizeof args,
                                 .rows = ROWS,
                                 .width = WIDTH,
                                 .dtype = dtype,
                                 .x = x.device,
                                 .x_stride = x.stride,
                                 .residual = residual.device,
                                 .weight = weight.device,
                                 .eps = EPS,
                                 .out = out.device};
        CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
        args.residual = apart.device, args.residual_stride = apart.stride;
        args.weight = wide.device, args.weight_is_f32 = 1;
        args.out = strided.device, args.out_stride = strided.stride;
        CU_ASSERT_EQUAL(cpa_rmsnorm(&args, stream), CPA_OK);
        cpa_test_tensor *const pairs[][2] = {{&residual, &apart}, {&out, &strided}};
        for (int i = 0; i < 2; i++) {
            cpa_test_tensor_fetch(pairs[i][0], stream);
            cpa_test_tensor_fetch(pairs[i][1], stream);
            for (int row = 0; row < ROWS; row++)
                CU_ASSERT_EQUAL(
                    memcmp(cpa_test_row(pairs[i][0], row), cpa_test_row(pairs[i][1], row), WIDTH * sizeof(float)), 0);
            CU_ASSERT_TRUE(cpa_test_tensor_pads_are_poison(pairs[i][1]));
        }
        cpa_test_tensor *const all[] = {&x, &weight, &residual, &apart, &out, &strided, &wide};
        for (int i = 0; i < 7; i++) cpa_test_tensor_free(all[i], stream);
    }
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"codes here are those of the format", codes_here_are_those_of_the_format},
    {"codes are those of float64", codes_are_those_of_float64},
    {"infinite elements saturate and are told", infinite_elements_saturate_and_are_told},
    {"rmsnorm2 has the bits of two rmsnorm", rmsnorm2_has_the_bits_of_two_rmsnorm},
    {"strides and weights change no bit", strides_and_weights_change_no_bit},
};

/* --whole: all rows of the grids. */
int main(int argc, char **argv) {
    const int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;
    whole_grid = cpa_test_take_option(&argc, argv, "--whole");
    return cpa_test_main(argc, argv, "norm_codes", tests, (int)(sizeof tests / sizeof tests[0]));
}
