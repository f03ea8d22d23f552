/* Quantised caches: rounding, saturation, zeros, what is not a number; attend over them; copies. On the host, and the
 * same on a device. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/cache/quantise.h"
#include "kernels/kv_view.h"
#include "src/check/reference.h"
#include "src/check/reference_rows.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

enum { DIM = 96, HEADS = 3, BLOCK_SIZE = 16, BLOCKS = 6 };

/* The ways to quantise: dtype, and the scale of the tensor. */
static const struct {
    cpa_dtype dtype;
    float scale;
} KINDS[] = {{CPA_FP8_E4M3, 0}, {CPA_FP8_E4M3, 0.0625f}, {CPA_INT8, 0}, {CPA_FP8_E5M2, 0.0625f}, {CPA_FP8_E5M2, 0}};
enum { N_KINDS = sizeof KINDS / sizeof KINDS[0] };

static cpa_device *device;
static cpa_stream *stream;

static cpa_kv_view view_of(int kind) {
    return (cpa_kv_view){.dtype = KINDS[kind].dtype,
                         .block_size = BLOCK_SIZE,
                         .num_blocks = BLOCKS,
                         .kv_heads = HEADS,
                         .k_dim = DIM,
                         .v_dim = DIM,
                         .k_scale = KINDS[kind].scale,
                         .v_scale = KINDS[kind].scale};
}

/* Writes one token of fp32 rows (values are the negated keys) to a slot and reads a key and a value back. */
static void pass_through(cpa_kv_fixture *f, const float *rows, int64_t slot, float *k, float *v) {
    float keys[HEADS * DIM], values[HEADS * DIM];
    for (int i = 0; i < HEADS * DIM; i++) keys[i] = rows[i % DIM], values[i] = -rows[i % DIM];
    cpa_kv_view view = cpa_kv_fixture_upload(f, stream);
    void *device_k = cpa_test_upload(stream, keys, sizeof keys);
    void *device_v = cpa_test_upload(stream, values, sizeof values);
    int64_t *device_slot = cpa_test_upload(stream, &slot, sizeof slot);
    cpa_kv_write_args args = {sizeof args, 1, CPA_F32, device_k, device_v, device_slot, view, NULL, 0, 0, 0, 0};
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_OK);
    cpa_kv_fixture_download(f, &view, stream);
    cpa_test_free(stream, device_slot);
    cpa_test_free(stream, device_v);
    cpa_test_free(stream, device_k);
    cpa_kv_view_free(&view, stream);
    cpa_kv_fixture_load(f, slot / BLOCK_SIZE, slot % BLOCK_SIZE, 1, k, v);
}

static void e4m3_rounds_every_float_to_the_nearest_code(void) {
    float values[127];
    for (int code = 0; code < 127; code++) values[code] = cpa_from_e4m3((uint8_t)code);
    CU_ASSERT_EQUAL(values[0], 0);
    CU_ASSERT_EQUAL(values[1], 0x1p-9f);
    CU_ASSERT_EQUAL(values[8], 0x1p-6f);
    CU_ASSERT_EQUAL(values[126], 448);
    CU_ASSERT(isnan(cpa_from_e4m3(0x7f)) && isnan(cpa_from_e4m3(0xff)));
    for (int code = 0; code < 127; code++) {
        CU_ASSERT_EQUAL(cpa_to_e4m3(values[code]), code);
        CU_ASSERT_EQUAL(cpa_from_e4m3((uint8_t)(code | 0x80)), -values[code]);
        if (code == 126) break;
        float middle = (values[code] + values[code + 1]) / 2;
        CU_ASSERT_EQUAL(cpa_to_e4m3(middle), code + code % 2);
        CU_ASSERT_EQUAL(cpa_to_e4m3(nextafterf(middle, 0)), code);
        CU_ASSERT_EQUAL(cpa_to_e4m3(-nextafterf(middle, 1e9f)), 0x80 | (code + 1));
    }
    CU_ASSERT_EQUAL(cpa_to_e4m3(449), 126);
    CU_ASSERT_EQUAL(cpa_to_e4m3(-INFINITY), 0x80 | 126);
    CU_ASSERT_EQUAL(cpa_to_e4m3(NAN), 0);
}

static void e5m2_rounds_every_float_to_the_nearest_code(void) {
    enum { FINITE = 0x7c };
    float values[FINITE];
    for (int code = 0; code < FINITE; code++) values[code] = cpa_from_e5m2((uint8_t)code);
    CU_ASSERT_EQUAL(values[1], 0x1p-16f);
    CU_ASSERT_EQUAL(values[4], 0x1p-14f);
    CU_ASSERT_EQUAL(values[FINITE - 1], 57344);
    CU_ASSERT(isinf(cpa_from_e5m2(0x7c)) && isnan(cpa_from_e5m2(0x7d)) && isnan(cpa_from_e5m2(0xff)));
    for (int code = 0; code < FINITE; code++) {
        CU_ASSERT_EQUAL(cpa_to_e5m2(values[code]), code);
        CU_ASSERT_EQUAL(cpa_from_e5m2((uint8_t)(code | 0x80)), -values[code]);
        if (code == FINITE - 1) break;
        float middle = (values[code] + values[code + 1]) / 2;
        CU_ASSERT_EQUAL(cpa_to_e5m2(middle), code + code % 2);
        CU_ASSERT_EQUAL(cpa_to_e5m2(nextafterf(middle, 0)), code);
        CU_ASSERT_EQUAL(cpa_to_e5m2(-nextafterf(middle, 1e9f)), 0x80 | (code + 1));
    }
    CU_ASSERT_EQUAL(cpa_to_e5m2(1e9f), FINITE - 1);
    CU_ASSERT_EQUAL(cpa_to_e5m2(-INFINITY), 0x80 | (FINITE - 1));
    CU_ASSERT_EQUAL(cpa_to_e5m2(NAN), 0);
}

/* Rows of all magnitudes, one-sided rows, a single outlier. */
static void make_row(float *row, int i) {
    for (int d = 0; d < DIM; d++) {
        float x = (float)((d * 37 + i * 101) % 199 - 99) / 99;
        row[d] = ldexpf(i % 4 == 1 ? fabsf(x) + 3 : i % 4 == 2 ? -fabsf(x) : x, i % 40 - 20);
    }
    if (i % 4 == 3) row[i % DIM] *= 300;
}

static void rows_return_within_half_a_step(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int kind = 0; kind < N_KINDS; kind++) {
        cpa_kv_fixture f;
        cpa_kv_fixture_init_view(&f, view_of(kind), kind == 1);
        for (int i = 0; i < 200; i++) {
            float row[DIM], negated[DIM], k[DIM], v[DIM];
            make_row(row, i);
            for (int d = 0; d < DIM; d++) negated[d] = -row[d];
            pass_through(&f, row, i % (BLOCKS * BLOCK_SIZE), k, v);
            CU_ASSERT(cpa_reference_may_hold(k, row, KINDS[kind].dtype, CPA_KEYS, KINDS[kind].scale, DIM));
            CU_ASSERT(cpa_reference_may_hold(v, negated, KINDS[kind].dtype, CPA_VALUES, KINDS[kind].scale, DIM));
            /* The bound is tight where the row fills the range: a scale 15% off breaks it, so does another row. */
            if (KINDS[kind].scale != 0 && i % 40 != 22) continue;
            for (int d = 0; d < DIM; d++) k[d] *= 1.15f;
            CU_ASSERT_FALSE(cpa_reference_may_hold(k, row, KINDS[kind].dtype, CPA_KEYS, KINDS[kind].scale, DIM));
            if (i % 4 == 0)
                CU_ASSERT_FALSE(cpa_reference_may_hold(v, row, KINDS[kind].dtype, CPA_VALUES, KINDS[kind].scale, DIM));
        }
        cpa_kv_fixture_destroy(&f);
    }
    cpa_test_device_close(device, stream);
}

static void zeros_return_as_zeros(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int kind = 0; kind < N_KINDS; kind++) {
        cpa_kv_fixture f;
        float row[DIM] = {0}, k[DIM], v[DIM];
        cpa_kv_fixture_init_view(&f, view_of(kind), 0);
        pass_through(&f, row, 5, k, v);
        for (int d = 0; d < DIM; d++) CU_ASSERT(k[d] == 0 && v[d] == 0);
        /* Zeros among others are exact as well. */
        for (int d = 0; d < DIM; d += 2) row[d] = (float)d - 17;
        pass_through(&f, row, 5, k, v);
        for (int d = 1; d < DIM; d += 2) CU_ASSERT(k[d] == 0 && v[d] == 0);
        cpa_kv_fixture_destroy(&f);
    }
    cpa_test_device_close(device, stream);
}

static void what_is_out_of_range_saturates_and_nan_becomes_zero(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int kind = 0; kind < N_KINDS; kind++) {
        cpa_kv_fixture f;
        float row[DIM], k[DIM], v[DIM];
        cpa_kv_fixture_init_view(&f, view_of(kind), 0);
        for (int d = 0; d < DIM; d++) row[d] = (float)(d % 21 - 10);
        row[3] = INFINITY, row[4] = -INFINITY, row[5] = NAN, row[6] = -NAN;
        pass_through(&f, row, 7, k, v);
        const float most = KINDS[kind].dtype == CPA_FP8_E5M2 ? 57344 : 448;
        float top = KINDS[kind].scale != 0 ? most * KINDS[kind].scale : 10;
        CU_ASSERT_DOUBLE_EQUAL(k[3], top, 0.04);
        CU_ASSERT_DOUBLE_EQUAL(k[4], -top, 0.04);
        CU_ASSERT(k[5] == 0 && k[6] == 0 && v[5] == 0);
        CU_ASSERT_DOUBLE_EQUAL(k[20], 10, 10 / 16.0);
        /* The largest floats neither overflow nor become NaN. */
        for (int d = 0; d < DIM; d++) row[d] = d % 2 ? 3.4e38f : -3.4e38f;
        pass_through(&f, row, 8, k, v);
        for (int d = 0; d < DIM; d++) CU_ASSERT(isfinite(k[d]) && (k[d] > 0) == (row[d] > 0));
        for (int d = 0; d < DIM; d++) row[d] = d % 2 ? INFINITY : NAN;
        pass_through(&f, row, 9, k, v);
        for (int d = 0; d < DIM; d++) CU_ASSERT(isfinite(k[d]) && isfinite(v[d]));
        cpa_kv_fixture_destroy(&f);
    }
    cpa_test_device_close(device, stream);
}

/* Attends over the keys of each slot in turn and counts rows that disagree with float64 of the dequantised cache. */
static int64_t wrong_rows(const cpa_attend_case *shape, int spoil_scale) {
    cpa_attend_fixture fixture;
    int64_t wrong = 0;
    cpa_attend_fixture_init(&fixture, shape, 2);
    if (spoil_scale) {
        /* The scale of the last key: every query that sees it now sees another one. */
        const cpa_kv_view *kv = &fixture.kv.view;
        int64_t key = fixture.k_tokens[0] - 1;
        int32_t block = fixture.tables[fixture.table[0] + key / kv->block_size];
        char *words = (char *)kv->v + block * kv->v_block_stride + cpa_kv_pool_of(kv, CPA_VALUES).scales_at;
        float *scale = (float *)(void *)words + key % kv->block_size;
        *scale *= 16;
        cpa_kv_view_free(&fixture.device_kv, fixture.stream);
        fixture.device_kv = cpa_kv_fixture_upload(&fixture.kv, fixture.stream);
    }
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        cpa_attend_result result;
        cpa_attend_result_init(&result, &fixture);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, slot, &result), CPA_OK);
        wrong += cpa_attend_fixture_check(&fixture, slot, 7, &result, NULL);
        cpa_attend_result_destroy(&result);
    }
    cpa_attend_fixture_destroy(&fixture);
    return wrong;
}

static const cpa_attend_case BASE = {.q_heads = 4,
                                     .kv_heads = 2,
                                     .k_dim = 64,
                                     .v_dim = 64,
                                     .block_size = 16,
                                     .cp_size = 1,
                                     .interleave = 16,
                                     .length = 300,
                                     .mask = {.causal = 1}};

static void attend_equals_float64_of_the_dequantised_cache(void) {
    static const int32_t widths[][2] = {{64, 64}, {128, 128}, {192, 128}, {7, 3}, {256, 1}};
    for (int kind = 0; kind < N_KINDS; kind++) {
        for (size_t w = 0; w < sizeof widths / sizeof widths[0]; w++) {
            cpa_attend_case shape = BASE;
            shape.kv_dtype = KINDS[kind].dtype;
            shape.k_scale = KINDS[kind].scale;
            shape.v_scale = KINDS[kind].scale * 2;
            shape.q_dtype = (cpa_dtype)(w % 3);
            shape.k_dim = widths[w][0];
            shape.v_dim = widths[w][1];
            shape.head_major = w % 2;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
            shape.cp_size = 3;
            shape.start = 290; /* few rows: the path that reads pages */
            shape.mask = (cpa_mask){.causal = 1, .sinks = 5, .window = 100};
            CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        }
    }
}

static void long_caches_are_split_without_error(void) {
    for (int kind = 0; kind < N_KINDS; kind++) {
        cpa_attend_case shape = BASE;
        shape.kv_dtype = KINDS[kind].dtype;
        shape.k_scale = shape.v_scale = KINDS[kind].scale;
        shape.q_dtype = kind == 1 ? CPA_F16 : CPA_BF16;
        shape.k_dim = shape.v_dim = 128;
        shape.q_heads = 32;
        shape.kv_heads = 4;
        shape.length = 5000;
        shape.start = 4999;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        shape.q_heads = 24;
        shape.kv_heads = 3; /* no pairs of heads */
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
        shape.start = 4950;
        shape.cp_size = 2;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 0), 0);
    }
}

static void a_wrong_scale_shows(void) {
    cpa_attend_case shape = BASE;
    shape.start = 290;
    shape.kv_dtype = CPA_INT8;
    CPA_ASSERT_ORDER(wrong_rows(&shape, 1), >, 0);
    shape.kv_dtype = CPA_FP8_E4M3;
    CPA_ASSERT_ORDER(wrong_rows(&shape, 1), >, 0);
}

/* Whether a token of one pool equals that of another, and is not poison. */
static int same_token(const cpa_kv_fixture *a, int64_t block_a, const cpa_kv_fixture *b, int64_t block_b,
                      int64_t offset) {
    for (int32_t head = 0; head < HEADS; head++) {
        float k[2][DIM], v[2][DIM];
        cpa_kv_fixture_load(a, block_a, offset, head, k[0], v[0]);
        cpa_kv_fixture_load(b, block_b, offset, head, k[1], v[1]);
        if (isnan(k[0][0]) || memcmp(k[0], k[1], sizeof k[0]) != 0 || memcmp(v[0], v[1], sizeof v[0]) != 0) return 0;
    }
    return 1;
}

static int is_poison(const cpa_kv_fixture *f, int64_t block, int64_t offset) {
    for (int32_t head = 0; head < HEADS; head++) {
        float k[DIM], v[DIM];
        cpa_kv_fixture_load(f, block, offset, head, k, v);
        /* Codes of int8 and of one scale are no NaN: all bits set. */
        const cpa_kv_view *kv = &f->view;
        int64_t at = block * kv->k_block_stride + offset * kv->k_token_stride + head * kv->k_head_stride;
        if (((const uint8_t *)kv->k)[at] != 0xff || !isnan(k[0])) return 0;
    }
    return 1;
}

static void copies_and_packed_ranges_carry_their_scales(void) {
    cpa_test_device_open(2, &device, &stream);
    for (int kind = 0; kind < N_KINDS; kind++) {
        cpa_kv_fixture src, dst;
        cpa_kv_fixture_init_view(&src, view_of(kind), 0);
        cpa_kv_fixture_init_view(&dst, view_of(kind), 1);
        for (int slot = 0; slot < BLOCKS * BLOCK_SIZE; slot++) {
            float row[DIM], k[DIM], v[DIM];
            make_row(row, slot);
            pass_through(&src, row, slot, k, v);
        }
        const int64_t pairs[1][2] = {{3, 5}};
        cpa_kv_view from = cpa_kv_fixture_upload(&src, stream), to = cpa_kv_fixture_upload(&dst, stream);
        cpa_kv_copy_args copy = {sizeof copy, from, to, pairs, 1};
        CU_ASSERT_EQUAL(cpa_kv_copy(&copy, stream), CPA_OK);
        const int32_t tables[3] = {4, 2, 0};
        const cpa_kv_range range = {.table = 0, .first = 16, .count = 21, .dst_block = 1};
        cpa_kv_pack_args pack = {sizeof pack, from, to, tables, sizeof tables / sizeof tables[0], &range, 1};
        CU_ASSERT_EQUAL(cpa_kv_pack(&pack, stream), CPA_OK);
        cpa_kv_fixture_download(&dst, &to, stream);
        cpa_kv_view_free(&to, stream);
        cpa_kv_view_free(&from, stream);
        for (int64_t offset = 0; offset < BLOCK_SIZE; offset++) {
            CU_ASSERT(same_token(&src, 3, &dst, 5, offset));
            CU_ASSERT(same_token(&src, 2, &dst, 1, offset));
            CU_ASSERT(offset < 5 ? same_token(&src, 0, &dst, 2, offset) : is_poison(&dst, 2, offset));
            CU_ASSERT(is_poison(&dst, 0, offset) && is_poison(&dst, 4, offset));
        }
        cpa_kv_fixture_destroy(&dst);
        cpa_kv_fixture_destroy(&src);
    }
    cpa_test_device_close(device, stream);
}

static void views_without_room_for_scales_are_refused(void) {
    cpa_kv_fixture f;
    cpa_test_device_open(2, &device, &stream);
    cpa_kv_fixture_init_view(&f, view_of(2), 0);
    float rows[HEADS * DIM] = {0};
    int64_t slot = 0;
    cpa_kv_write_args args = {sizeof args, 1, CPA_F32, rows, rows, &slot, f.view, NULL, 0, 0, 0, 0};
    args.kv.k_block_stride = BLOCK_SIZE * HEADS * DIM;
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "scales included"));
    args.kv = f.view;
    args.kv.k_scale = 2;
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_INVALID);
    args.kv = f.view;
    args.dtype = CPA_INT8;
    CU_ASSERT_EQUAL(cpa_kv_write(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "expected fp32, bf16 or fp16"));
    cpa_kv_fixture_destroy(&f);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"e4m3 rounds every float to the nearest code", e4m3_rounds_every_float_to_the_nearest_code},
    {"e5m2 rounds every float to the nearest code", e5m2_rounds_every_float_to_the_nearest_code},
    {"rows return within half a step", rows_return_within_half_a_step},
    {"zeros return as zeros", zeros_return_as_zeros},
    {"what is out of range saturates and NaN becomes zero", what_is_out_of_range_saturates_and_nan_becomes_zero},
    {"attend equals float64 of the dequantised cache", attend_equals_float64_of_the_dequantised_cache},
    {"long caches are split without error", long_caches_are_split_without_error},
    {"a wrong scale shows", a_wrong_scale_shows},
    {"copies and packed ranges carry their scales", copies_and_packed_ranges_carry_their_scales},
    {"views without room for scales are refused", views_without_room_for_scales_are_refused},
};
CPA_DEVICE_TEST_MAIN("quant", tests)
