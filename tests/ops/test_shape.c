/* Sizes that follow from a dtype's row of the table: those of today's dtypes, and of forms that the table can say. */
#include <string.h>

#include <cpattn/cpattn.h>

#include "kernels/operators.h"
#include "src/ops/check_args.h"
#include "src/ops/check_shape.h"
#include "tests/fixtures/unit.h"

static void names_and_kinds(void) {
    CU_ASSERT_STRING_EQUAL(cpa_dtype_name(CPA_FP8_E4M3), "fp8_e4m3");
    CU_ASSERT_STRING_EQUAL(cpa_dtype_name(CPA_KV_DTYPE_COUNT), "none");
    CU_ASSERT_PTR_NULL(cpa_dtype_traits_of((cpa_dtype)-1));
    CU_ASSERT_EQUAL(cpa_dtype_bytes((cpa_dtype)-1), 0);
    for (int dtype = 0; dtype < CPA_KV_DTYPE_COUNT; dtype++) {
        CU_ASSERT_EQUAL(cpa_dtype_is_plain((cpa_dtype)dtype), dtype < CPA_DTYPE_COUNT);
        CU_ASSERT_EQUAL(cpa_dtype_is_quantised((cpa_dtype)dtype), dtype >= CPA_DTYPE_COUNT);
    }
}

static void formats_are_known_by_name(void) {
    cpa_dtype dtype = CPA_F32;
    cpa_kv_layout layout = CPA_TOKEN_MAJOR;
    cpa_error err;
    for (int i = 0; i < CPA_KV_DTYPE_COUNT; i++) {
        CU_ASSERT_EQUAL(cpa_dtype_of_name(cpa_dtype_name((cpa_dtype)i), &dtype, &err), CPA_OK);
        CU_ASSERT_EQUAL(dtype, i);
    }
    CU_ASSERT_EQUAL(cpa_dtype_of_name("float8_e4m3fn", &dtype, &err), CPA_OK);
    CU_ASSERT_EQUAL(dtype, CPA_FP8_E4M3);
    const char *const refused[] = {"none", "", "BF16", "auto", NULL};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        CU_ASSERT_EQUAL(cpa_dtype_of_name(refused[i], &dtype, &err), CPA_INVALID);
    const char *further[] = {"nvfp4", "int4", "fp8_inc", "fp8_e4m3fnuz", "turboquant", "turboquant_2bit"};
    for (size_t i = 0; i < sizeof further / sizeof *further; i++)
        CU_ASSERT_EQUAL(cpa_dtype_of_name(further[i], &dtype, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(dtype, CPA_FP8_E4M3);
    for (int i = CPA_TOKEN_MAJOR; i <= CPA_VLLM_X; i++) {
        CU_ASSERT_EQUAL(cpa_kv_layout_of_name(cpa_kv_layout_name((cpa_kv_layout)i), &layout, &err), CPA_OK);
        CU_ASSERT_EQUAL(layout, i);
    }
    CU_ASSERT_EQUAL(cpa_kv_layout_of_name("HND", &layout, &err), CPA_OK);
    CU_ASSERT_EQUAL(layout, CPA_HEAD_MAJOR);
    CU_ASSERT_EQUAL(cpa_kv_layout_of_name("hnd", &layout, &err), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_kv_layout_name((cpa_kv_layout)3), "none");
}

static void sizes_of_dtypes(void) {
    /* Blocks of 16 tokens, 2 heads of 10: 32 rows. */
    const struct {
        cpa_dtype dtype;
        float scale;
        int64_t element, row, scales, block;
    } sizes[] = {
        {CPA_F32, 0, 4, 40, 0, 1280},     {CPA_BF16, 0, 2, 20, 0, 640},        {CPA_F16, 0, 2, 20, 0, 640},
        {CPA_FP8_E4M3, 0, 1, 10, 4, 448}, {CPA_FP8_E4M3, 0.5f, 1, 10, 0, 320}, {CPA_INT8, 0, 1, 10, 4, 448},
        {CPA_FP8_E5M2, 0, 1, 10, 4, 448}, {CPA_FP8_E5M2, 2, 1, 10, 0, 320},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CU_ASSERT_EQUAL(cpa_dtype_bytes(sizes[i].dtype), sizes[i].element);
        for (int part = CPA_KEYS; part <= CPA_VALUES; part++) {
            const cpa_kv_part p = (cpa_kv_part)part;
            CU_ASSERT_EQUAL(cpa_kv_row_bytes(sizes[i].dtype, p, 10), sizes[i].row);
            CU_ASSERT_EQUAL(cpa_kv_scale_bytes(sizes[i].dtype, p, sizes[i].scale), sizes[i].scales);
            CU_ASSERT_EQUAL(cpa_kv_block_bytes(sizes[i].dtype, p, sizes[i].scale, 16, 2, 10), sizes[i].block);
        }
    }
    /* A block of codes is filled up to whole 16 bytes: 3 rows of 5 codes and a word. */
    CU_ASSERT_EQUAL(cpa_kv_block_bytes(CPA_INT8, CPA_KEYS, 0, 1, 3, 5), 32);
}

/* Codes of less than a byte, keys and values of different widths, scales inside rows: keys with a 16-bit norm, values
 * with a 16-bit scale and least value, the two of a token and head side by side. */
static void sizes_of_codes_below_a_byte(void) {
    const struct {
        cpa_dtype_traits traits;
        int64_t slot; /* bytes of a key and a value of 128 */
    } forms[] = {
        {{"k8v4", 1, 0, 1, {{8, 0, 1, 0, 0, 0}, {4, 4, 1, 0, 0, 0}}}, 196},
        {{"4bit", 1, 0, 1, {{4, 2, 1, 0, 0, 0}, {4, 4, 1, 0, 0, 0}}}, 134},
        {{"k3v4", 1, 0, 1, {{3, 2, 1, 0, 0, 0}, {4, 4, 1, 0, 0, 0}}}, 118},
        {{"3bit", 1, 0, 1, {{3, 2, 1, 0, 0, 0}, {3, 4, 1, 0, 0, 0}}}, 102},
    };
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        const cpa_dtype_traits *traits = &forms[i].traits;
        CU_ASSERT_EQUAL(cpa_row_bytes(&traits->rows[CPA_KEYS], 128) + cpa_row_bytes(&traits->rows[CPA_VALUES], 128),
                        forms[i].slot);
        CU_ASSERT_EQUAL(cpa_traits_block_bytes(traits, CPA_KEYS, 0, 16, 8, 128) +
                            cpa_traits_block_bytes(traits, CPA_VALUES, 0, 16, 8, 128),
                        16 * 8 * forms[i].slot);
    }
    /* Latents: 512 codes, 4 scales of tiles and 64 elements of bf16; and 128 codes and a scale. */
    CU_ASSERT_EQUAL(cpa_kv_row_bytes(CPA_FP8_T128, CPA_KEYS, 576), 656);
    CU_ASSERT_EQUAL(cpa_kv_row_bytes(CPA_FP8_T128, CPA_KEYS, 192), 128 + 4 + 128);
    /* 448 codes and 64 elements of bf16; 8 bytes of scales right behind the rows, and blocks of whole 576 bytes. */
    CU_ASSERT_EQUAL(cpa_kv_row_bytes(CPA_FP8_T64, CPA_KEYS, 512), 576);
    CU_ASSERT_EQUAL(cpa_kv_scale_bytes(CPA_FP8_T64, CPA_KEYS, 0), 8);
    CU_ASSERT_EQUAL(cpa_kv_scales_at(CPA_FP8_T64, CPA_KEYS, 0, 64, 1, 512), 36864);
    CU_ASSERT_EQUAL(cpa_kv_block_bytes(CPA_FP8_T64, CPA_KEYS, 0, 64, 1, 512), 37440);
    CU_ASSERT_EQUAL(cpa_kv_block_bytes(CPA_FP8_T64, CPA_KEYS, 0, 1, 1, 512), 1152);
    CU_ASSERT_EQUAL(cpa_kv_scales_at(CPA_INT8, CPA_KEYS, 0, 1, 3, 5), 32 - 12);
    const cpa_row_traits odd = {3, 2, 1, 0, 0, 0};
    CU_ASSERT_EQUAL(cpa_row_bytes(&odd, 3), 2 + 2); /* 9 bits */
}

static void sizes_of_shapes(void) {
    cpa_attention_shape shape = {
        .q_heads = 8, .kv_heads = 2, .k_dim = 24, .v_dim = 16, .dtype = CPA_BF16, .kv_dtype = CPA_INT8};
    CU_ASSERT_EQUAL(sizeof shape, 64);
    CU_ASSERT_EQUAL(cpa_shape_q_bytes(&shape), 8 * 24 * 2);
    CU_ASSERT_EQUAL(cpa_shape_k_bytes(&shape), 2 * 24 * 2);
    CU_ASSERT_EQUAL(cpa_shape_v_bytes(&shape), 2 * 16 * 2);
    CU_ASSERT_EQUAL(cpa_shape_out_bytes(&shape), 8 * 16 * 2);
    CU_ASSERT_EQUAL(cpa_shape_block_bytes(&shape, CPA_KEYS, 16), 16 * 2 * (24 + 4));
    CU_ASSERT_EQUAL(cpa_shape_block_bytes(&shape, CPA_VALUES, 16), 16 * 2 * (16 + 4));
    /* A latent cache of 512 + 64 has one pool: 1152 bytes a token in bf16. */
    shape = (cpa_attention_shape){.q_heads = 128,
                                  .kv_heads = 1,
                                  .k_dim = 576,
                                  .v_dim = 512,
                                  .v_in_k = 1,
                                  .dtype = CPA_BF16,
                                  .kv_dtype = CPA_BF16};
    CU_ASSERT_EQUAL(cpa_shape_block_bytes(&shape, CPA_KEYS, 64), 64 * 1152);
    CU_ASSERT_EQUAL(cpa_shape_block_bytes(&shape, CPA_VALUES, 64), 0);
    shape.kv_dtype = CPA_FP8_T128;
    CU_ASSERT_EQUAL(cpa_shape_block_bytes(&shape, CPA_KEYS, 64), 64 * 656);
    shape.kv_dtype = CPA_FP8_E4M3, shape.k_scale = 0.5f;
    CU_ASSERT_EQUAL(cpa_shape_block_bytes(&shape, CPA_KEYS, 64), 64 * 576);
}

static const cpa_attention_shape GOOD = {.q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 32, .dtype = CPA_F16};

static void refuse(cpa_attention_shape shape, cpa_status status, const char *expected) {
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_check_shape("here", &shape, &err), status);
    CU_ASSERT_PTR_EQUAL(strstr(err.message, "here: "), err.message);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
}

static void bad_shapes(void) {
    cpa_attention_shape bad;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &GOOD, NULL), CPA_OK);
    bad = GOOD, bad.q_heads = 3, refuse(bad, CPA_INVALID, "q_heads is 3, expected a positive multiple of kv_heads, 2");
    bad = GOOD, bad.kv_heads = 0, refuse(bad, CPA_INVALID, "kv_heads, 0");
    bad = GOOD, bad.k_dim = 577, refuse(bad, CPA_INVALID, "k_dim is 577, expected 1..576");
    bad = GOOD, bad.v_dim = 0, refuse(bad, CPA_INVALID, "v_dim is 0");
    bad = GOOD, bad.dtype = CPA_INT8, refuse(bad, CPA_INVALID, "dtype is 4");
    bad = GOOD, bad.kv_dtype = CPA_KV_DTYPE_COUNT, refuse(bad, CPA_INVALID, "kv_dtype is 12");
    bad = GOOD, bad.layout = (cpa_kv_layout)3, refuse(bad, CPA_INVALID, "layout is 3");
    bad = GOOD, bad.k_scale = bad.v_scale = 1, refuse(bad, CPA_INVALID, "k_scale is 1");
    bad.kv_dtype = CPA_FP8_E4M3;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &bad, NULL), CPA_OK);
    bad.v_scale = 0, refuse(bad, CPA_INVALID, "v_scale is 0 for a cache of fp8_e4m3");
    bad.k_scale = bad.v_scale = -1, refuse(bad, CPA_INVALID, "k_scale is -1");
    bad = GOOD, bad.reserved[0] = 1, refuse(bad, CPA_INVALID, "the reserved bytes of the shape");
}

static const cpa_attention_shape LATENT = {.q_heads = 128, .kv_heads = 1, .k_dim = 576, .v_dim = 512, .v_in_k = 1};

static void values_in_keys(void) {
    cpa_attention_shape bad;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &LATENT, NULL), CPA_OK);
    bad = LATENT, bad.k_dim = 511, refuse(bad, CPA_INVALID, "v_dim is 512 and k_dim is 511");
    bad = LATENT, bad.k_dim = INT32_MAX, refuse(bad, CPA_INVALID, "expected 1..576");
    bad = LATENT, bad.layout = CPA_VLLM_X, refuse(bad, CPA_INVALID, "layout is 2 with v_in_k");
    bad = LATENT, bad.v_in_k = 2, refuse(bad, CPA_INVALID, "v_in_k is 2");
    CU_ASSERT_EQUAL(cpa_check_cache_shape("here", &bad, NULL), CPA_INVALID);
}

/* Values in keys have the scales of keys, and tiles are those of latents. */
static void scales_of_latents(void) {
    static const float scales[1] = {1}, others[1] = {1};
    cpa_attention_shape bad = LATENT;
    bad.kv_dtype = CPA_FP8_E4M3, bad.k_scale = 0.5f;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &bad, NULL), CPA_OK);
    bad.v_scale = 0.5f;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &bad, NULL), CPA_OK);
    bad.v_scale = 0.25f, refuse(bad, CPA_INVALID, "k_scale is 0.5 and v_scale is 0.25, expected one");
    bad.k_scale = bad.v_scale = 0, bad.k_scales = scales, bad.n_scales = 1;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &bad, NULL), CPA_OK);
    bad.v_scales = others, refuse(bad, CPA_INVALID, "v_scales are other scales than k_scales");
    bad = LATENT, bad.kv_dtype = CPA_FP8_T128;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &bad, NULL), CPA_OK);
    bad.k_dim = 512 + 32,
    refuse(bad, CPA_INVALID, "k_dim is 544 for a cache of fp8_t128, expected a multiple of 128 and 64");
    bad = GOOD, bad.kv_dtype = CPA_FP8_T128, refuse(bad, CPA_INVALID, "kv_dtype is fp8_t128 and v_in_k is 0");
    bad = LATENT, bad.kv_dtype = CPA_FP8_T64, bad.k_dim = bad.v_dim = 512;
    CU_ASSERT_EQUAL(cpa_check_shape("here", &bad, NULL), CPA_OK);
    bad.k_dim = 576,
    refuse(bad, CPA_INVALID, "k_dim is 576 with 1 KV heads for a cache of fp8_t64, expected 512 and 1");
    bad.k_dim = 512, bad.kv_heads = 2;
    refuse(bad, CPA_INVALID, "k_dim is 512 with 2 KV heads for a cache of fp8_t64, expected 512 and 1");
}

/* Each number tells two caches apart; dtype and scales do not where widths alone matter. */
static void caches_that_differ(void) {
    enum { WIDTHS = 5, NUMBERS = 9 };
    static const char *const lines[NUMBERS] = {
        "here: the one has block_size 32, but the other has 16", "here: the one has kv_heads 4, but the other has 2",
        "here: the one has k_dim 32, but the other has 64",      "here: the one has v_dim 64, but the other has 32",
        "here: the one has v_in_k 1, but the other has 0",       "here: the one has dtype 3, but the other has 2",
        "here: the one has k_scale 0.5, but the other has 0",    "here: the one has v_scale 0.25, but the other has 0",
        "here: the one has n_scales 1, but the other has 0",
    };
    cpa_attention_shape shape = GOOD;
    shape.kv_dtype = CPA_F16;
    const cpa_cache_form other = {"the other", shape, 16};
    cpa_cache_form same = {"the one", shape, 16};
    CU_ASSERT_EQUAL(cpa_check_same_cache("here", &same, &other, 0, NULL), CPA_OK);
    for (int i = 0; i < NUMBERS; i++) {
        cpa_cache_form one = same;
        cpa_error err = {CPA_OK, ""};
        if (i == 0) one.block_size = 32;
        if (i == 1) one.shape.kv_heads = 4;
        if (i == 2) one.shape.k_dim = 32;
        if (i == 3) one.shape.v_dim = 64;
        if (i == 4) one.shape.v_in_k = 1;
        if (i == 5) one.shape.kv_dtype = CPA_FP8_E4M3;
        if (i == 6) one.shape.k_scale = 0.5f;
        if (i == 7) one.shape.v_scale = 0.25f;
        if (i == 8) one.shape.n_scales = 1;
        CU_ASSERT_EQUAL(cpa_check_same_cache("here", &one, &other, 0, &err), CPA_INVALID);
        CU_ASSERT_STRING_EQUAL(err.message, lines[i]);
        CU_ASSERT_EQUAL(cpa_check_same_cache("here", &one, &other, 1, &err), i < WIDTHS ? CPA_INVALID : CPA_OK);
    }
}

static void expect_supported(const cpa_device *device, cpa_attention_shape shape, cpa_mask mask, cpa_status status,
                             const char *expected) {
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_attend_supported(device, &shape, &mask, &err), status);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
}

/* Stands for a back end without a kernel for windows. */
static cpa_status no_windows(const cpa_device *device, const char *where, const cpa_attention_shape *shape,
                             const cpa_mask *mask, cpa_error *err) {
    (void)device, (void)shape;
    return mask && mask->window ? cpa_fail(err, CPA_UNSUPPORTED, "%s: no windows", where) : CPA_OK;
}

static void supported_shapes(void) {
    const cpa_device_options options = {.size = sizeof options, .backend = CPA_BACKEND_HOST, .threads = 1};
    const cpa_mask causal = {.causal = 1}, window = {.causal = 1, .window = 5};
    cpa_device *device;
    cpa_attend_plan *plan;
    cpa_stream *stream;
    CU_ASSERT_EQUAL_FATAL(cpa_device_open(&options, &device, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, NULL), CPA_OK);
    CU_ASSERT_EQUAL_FATAL(cpa_stream_create(device, &stream, NULL), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_supported(NULL, &GOOD, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_attend_supported(device, NULL, NULL, NULL), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_attend_supported(device, &GOOD, NULL, NULL), CPA_OK);
    expect_supported(device, GOOD, window, CPA_OK, "");
    expect_supported(device, GOOD, (cpa_mask){.window = -1}, CPA_INVALID, "attend: window is -1");
    expect_supported(device, LATENT, causal, CPA_OK, "");

    /* The plan asks for its shape, an attend for its mask too; no row is attended before. */
    const cpa_owner_map map = {1, 16};
    const cpa_attend_item item = {.q_count = 1, .k_count = 1};
    const int32_t table = 0;
    cpa_attend_batch batch = {.size = sizeof batch,
                              .map = map,
                              .shape = GOOD,
                              .block_size = 16,
                              .items = &item,
                              .n_items = 1,
                              .block_tables = &table,
                              .n_table_entries = 1};
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, &batch, NULL), CPA_OK);
    cpa_operator_table table_without_windows = *device->operators;
    table_without_windows.attend_supported = no_windows;
    device->operators = &table_without_windows;
    expect_supported(device, GOOD, causal, CPA_OK, "");
    expect_supported(device, GOOD, window, CPA_UNSUPPORTED, "attend: no windows");
    static float q[4 * 64], pool[16 * 2 * (64 + 32)], o[4 * 32], lse[4];
    cpa_attend_args args = {.size = sizeof args, .q = q, .mask = causal, .state = {.o = o, .lse = lse}};
    args.kv = (cpa_kv_view){.k = pool, .v = pool + 16 * 2 * 64, .block_size = 16, .num_blocks = 1, .kv_heads = 2};
    args.kv.k_dim = 64, args.kv.v_dim = 32;
    lse[0] = 3;
    args.mask = window;
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_UNSUPPORTED);
    CU_ASSERT_EQUAL(lse[0], 3);
    args.mask = causal;
    CU_ASSERT_EQUAL(cpa_attend(plan, &args, stream), CPA_OK);
    CU_ASSERT_EQUAL(lse[0], 0);
    cpa_stream_destroy(stream);
    cpa_attend_plan_destroy(plan);
    cpa_device_close(device);
}

static const cpa_test tests[] = {
    {"a bad shape is refused with its numbers", bad_shapes},
    {"caches that differ are told apart by each number", caches_that_differ},
    {"values may lie in keys that are at least as wide", values_in_keys},
    {"values in keys have the scales of keys, and tiles of scales are those of latents", scales_of_latents},
    {"a device says which shapes and masks it attends, and is asked before it does", supported_shapes},
    {"a dtype has a name, and is one of tensors or one of caches alone", names_and_kinds},
    {"formats are known by their names, and by those of others", formats_are_known_by_name},
    {"rows, scales and blocks of each dtype have their bytes", sizes_of_dtypes},
    {"the table can say codes of less than a byte with scales inside rows", sizes_of_codes_below_a_byte},
    {"a shape knows the bytes of its rows and blocks, one pool where values lie in keys", sizes_of_shapes},
};
CPA_TEST_MAIN("shape", tests)
