/* The engine over quantised caches, over the layouts of the cache and over layers with windows of their own: every
 * algorithm is checked row by row against float64, and gives the same bits where the back end promises them. */
#include <math.h>
#include <string.h>

#include <cpattn/context.h>

#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { LAYERS = 3, REQUESTS = 6 };

static const cpa_mask MIXED[LAYERS] = {
    {.causal = 1, .window = 50, .sinks = 3}, {.causal = 1}, {.causal = 1, .window = 33}};

static cpa_engine_options default_options(void) {
    cpa_engine_options options = cpa_test_engine_options();
    options.model.layers = LAYERS;
    return options;
}

/* Equal bits where the first ranks of sequences may differ, which hashes of the cache's form and of tokens decide. Ranks
 * that are a power of two meet in pairs, so that the order of merging, from 4 ranks on, depends on the first one. */
static void expect_same_bits_from_any_rank(uint64_t a, uint64_t b) {
    int size;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size < 4 || (size & (size - 1)) != 0) cpa_test_expect_same_bits(a, b);
}

/* The digest under pass-Q, after checking that pass-KV, the other layouts and other steps give the same; and once the
 * self-test of that form. */
static uint64_t common_digest(cpa_engine_options options) {
    options.algorithm = CPA_PASS_Q;
    options.skip_self_test = 0;
    uint64_t digest = cpa_test_mixed_digest(&options);
    options.skip_self_test = 1;
    options.algorithm = CPA_PASS_KV;
    options.model.attention.layout = CPA_HEAD_MAJOR;
    cpa_test_expect_same_bits(cpa_test_mixed_digest(&options), digest);
    options.algorithm = CPA_AUTO;
    if (!cpa_dtype_is_turboquant(options.model.attention.kv_dtype)) options.model.attention.layout = CPA_VLLM_X;
    options.max_num_batched_tokens = 37;
    cpa_test_expect_same_bits(cpa_test_mixed_digest(&options), digest);
    return digest;
}

static void every_quantised_cache_is_checked_and_gives_the_same_bits(void) {
    uint64_t plain = common_digest(default_options());
    for (int kind = 0; kind < 3; kind++) {
        cpa_engine_options options = default_options();
        options.model.attention.kv_dtype = kind == 2 ? CPA_INT8 : CPA_FP8_E4M3;
        if (kind == 1) options.model.attention.k_scale = 0.03125f, options.model.attention.v_scale = 0.0625f;
        CU_ASSERT_NOT_EQUAL(common_digest(options), plain);
    }
}

static void every_cache_of_turboquant_is_checked_and_gives_the_same_bits(void) {
    uint64_t last = 0;
    for (int dtype = CPA_TQ_K8V4; dtype <= CPA_TQ_3BIT; dtype++) {
        cpa_engine_options options = default_options();
        options.model.attention.k_dim = 64;
        options.model.attention.v_dim = 32;
        options.model.attention.kv_dtype = (cpa_dtype)dtype;
        const uint64_t digest = common_digest(options);
        CU_ASSERT_NOT_EQUAL(digest, last);
        last = digest;
    }
}

/* Scales of heads that lie on the device: those that are all the same are that of the tensor. */
static void scales_of_heads_are_checked_too(void) {
    float all[8], apart[8];
    cpa_device *device;
    cpa_stream *stream;
    cpa_engine_options options = default_options();
    const int32_t heads = options.model.attention.kv_heads;
    for (int32_t h = 0; h < 8; h++) all[h] = 0.03125f, apart[h] = 0.03125f * (1 + 0.3f * (float)(1 + h % 3));
    cpa_test_device_open(1, &device, &stream);
    float *device_all = cpa_test_upload(stream, all, sizeof all),
          *device_apart = cpa_test_upload(stream, apart, sizeof apart);
    options.model.attention.kv_dtype = CPA_FP8_E4M3;
    options.model.attention.k_scale = options.model.attention.v_scale = 0.03125f;
    const uint64_t of_tensor = cpa_test_mixed_digest(&options);
    options.model.attention.k_scale = options.model.attention.v_scale = 0;
    options.model.attention.n_scales = heads;
    options.model.attention.k_scales = options.model.attention.v_scales = device_all;
    expect_same_bits_from_any_rank(common_digest(options), of_tensor);
    options.model.attention.k_scales = device_apart;
    const uint64_t of_heads = common_digest(options);
    CU_ASSERT_NOT_EQUAL(of_heads, of_tensor);
    options.scales_on_host = 1;
    options.model.attention.k_scales = apart;
    options.model.attention.v_scales = all;
    expect_same_bits_from_any_rank(cpa_test_mixed_digest(&options), of_heads);
    options.scales_on_host = 0;
    options.model.attention.v_scales = device_all;
    options.model.attention.n_scales = 1;
    options.model.attention.k_scales = device_all;
    expect_same_bits_from_any_rank(cpa_test_mixed_digest(&options), of_tensor);
    cpa_test_free(stream, device_apart);
    cpa_test_free(stream, device_all);
    cpa_test_device_close(device, stream);
}

/* Those of no layer are left, those of some, or those of all: which is a cache of the model's dtype. */
static void layers_that_are_left_unquantised_are_checked_too(void) {
    static const uint8_t ENDS[LAYERS] = {1, 0, 1}, ALL[LAYERS] = {1, 1, 1};
    static const cpa_dtype dtypes[][2] = {{CPA_BF16, CPA_FP8_E4M3}, {CPA_F32, CPA_INT8}, {CPA_BF16, CPA_TQ_4BIT}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        cpa_engine_options options = default_options();
        options.model.attention.k_dim = 64;
        options.model.attention.v_dim = 32;
        options.model.attention.dtype = options.model.attention.kv_dtype = dtypes[i][0];
        const uint64_t plain = cpa_test_mixed_digest(&options);
        options.model.attention.kv_dtype = dtypes[i][1];
        const uint64_t quantised = cpa_test_mixed_digest(&options);
        options.model.unquantised_layers = ENDS;
        const uint64_t ends = common_digest(options);
        CU_ASSERT_NOT_EQUAL(ends, quantised);
        CU_ASSERT_NOT_EQUAL(ends, plain);
        options.model.unquantised_layers = ALL;
        expect_same_bits_from_any_rank(cpa_test_mixed_digest(&options), plain);
    }
}

/* A block has what each of its layers takes of it. */
static void layers_that_are_left_take_the_bytes_of_their_dtype(void) {
    static const uint8_t ENDS[LAYERS] = {1, 0, 1};
    const cpa_request request = {.size = sizeof request, .prompt_tokens = 40, .output_tokens = 2};
    cpa_engine_options options = default_options();
    cpa_engine_stats stats;
    int64_t bytes[3];
    for (int of = 0; of < 3; of++) {
        options.model.attention.kv_dtype = of == 0 ? options.model.attention.dtype : CPA_INT8;
        options.model.unquantised_layers = of == 2 ? ENDS : NULL;
        CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
        bytes[of] = stats.kv_group[0].block_bytes / LAYERS;
    }
    CPA_ASSERT_ORDER(stats.kv_group[0].block_bytes, ==, 2 * bytes[0] + bytes[1]);
}

static void sixteen_bit_queries_over_quantised_caches(void) {
    for (int dtype = CPA_BF16; dtype <= CPA_F16; dtype++) {
        cpa_engine_options options = default_options();
        options.model.attention.dtype = (cpa_dtype)dtype;
        options.model.attention.kv_dtype = dtype == CPA_BF16 ? CPA_INT8 : CPA_FP8_E4M3;
        options.skip_self_test = 0;
        cpa_test_mixed_digest(&options);
    }
}

static void layers_with_windows_of_their_own_are_checked(void) {
    cpa_engine_options options = default_options();
    uint64_t full = cpa_test_mixed_digest(&options);
    options.model.layer_masks = MIXED;
    uint64_t mixed = common_digest(options);
    CU_ASSERT_NOT_EQUAL(mixed, full);
    /* The masks of the layers go over the one of the model. */
    options.model.mask.window = 7;
    cpa_test_expect_same_bits(cpa_test_mixed_digest(&options), mixed);
    options.model.attention.kv_dtype = CPA_INT8;
    CU_ASSERT_NOT_EQUAL(common_digest(options), mixed);
}

static int64_t least_staging(const cpa_engine_options *options) {
    enum { BLOCK = 16 };
    const cpa_context_options of_context = {.size = sizeof of_context,
                                            .shape = options->model.attention,
                                            .block_size = BLOCK,
                                            .max_rows = options->max_num_batched_tokens};
    cpa_device *device;
    cpa_stream *stream;
    int ranks;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    cpa_test_device_open(1, &device, &stream);
    const int64_t least = cpa_context_least_staging(device, &of_context, ranks);
    cpa_test_device_close(device, stream);
    CU_ASSERT(least > 0);
    return least;
}

/* Where the least staging is all that there is, what is widened for prefill goes through a workspace of 150 tokens. */
static void little_staging_takes_long_prompts(void) {
    static const struct {
        cpa_dtype dtype;
        cpa_kv_layout layout;
    } caches[] = {{CPA_FP8_E4M3, CPA_TOKEN_MAJOR},
                  {CPA_INT8, CPA_HEAD_MAJOR},
                  {CPA_BF16, CPA_VLLM_X},
                  {CPA_FP8_E4M3, CPA_VLLM_X}};
    for (size_t i = 0; i < sizeof caches / sizeof *caches; i++) {
        uint64_t of_ample = 0;
        for (cpa_algorithm algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
            const cpa_request request = {.size = sizeof request, .prompt_tokens = 900, .output_tokens = 3};
            cpa_engine_options options = default_options();
            cpa_engine_stats ample, little;
            options.algorithm = algorithm;
            options.model.attention.dtype = CPA_BF16;
            options.model.attention.kv_dtype = caches[i].dtype;
            options.model.attention.layout = caches[i].layout;
            options.model.layer_masks = MIXED;
            options.max_num_batched_tokens = 300;
            if (algorithm == CPA_PASS_KV) {
                CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &ample));
                of_ample = ample.output_digest;
            }
            options.staging_bytes = least_staging(&options);
            CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &little));
            CPA_ASSERT_ORDER(little.verify_rows, >, 500);
            CPA_ASSERT_ORDER(little.staging_bytes, <=, options.staging_bytes);
            cpa_test_expect_same_bits(little.output_digest, of_ample);
        }
    }
}

/* By pass-Q a row sends a query of 4 * 32 elements and gets a state back: O of 4 * 16 elements and 4 LSEs. */
static void states_travel_in_the_dtype_of_the_model(void) {
    enum { QUERY = 4 * 32 * 2, WIDE = 4 * 16 * 4 + 16, NARROW = 4 * 16 * 2 + 16 };
    for (int dtype = CPA_BF16; dtype <= CPA_F16; dtype++) {
        cpa_engine_options options = default_options();
        cpa_request requests[REQUESTS];
        cpa_engine_stats wide, narrow;
        options.algorithm = CPA_PASS_Q;
        options.local_context = CPA_LOCAL_CONTEXT_NONE;
        options.model.attention.dtype = options.model.attention.kv_dtype = (cpa_dtype)dtype;
        cpa_test_mixed_requests(requests, REQUESTS);
        CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &wide));
        options.state_dtype = (cpa_dtype)dtype;
        CU_ASSERT_TRUE(cpa_test_engine_run(&options, requests, REQUESTS, NULL, NULL, &narrow));
        CPA_ASSERT_ORDER(narrow.verify_rows, >, 500);
        CU_ASSERT_EQUAL(narrow.bytes_sent * (QUERY + WIDE), wide.bytes_sent * (QUERY + NARROW));
        CU_ASSERT_EQUAL(narrow.output_digest == wide.output_digest, wide.bytes_sent == 0);
    }
}

static void states_of_another_dtype_are_refused(void) {
    static const struct {
        int dtype;
        const char *message;
    } bad[] = {{CPA_BF16, "state_dtype is bf16, expected fp32, or fp16 as the model"},
               {CPA_INT8, "state_dtype is int8, expected fp32, or fp16 as the model"},
               {77, "state_dtype is "}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_engine_options options = default_options();
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        options.model.attention.dtype = options.model.attention.kv_dtype = CPA_F16;
        options.state_dtype = (cpa_dtype)bad[i].dtype;
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, bad[i].message));
    }
}

static void scales_that_make_no_sense_are_named(void) {
    cpa_engine_options options = default_options();
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    options.model.attention.k_scale = options.model.attention.v_scale = 1;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "k_scale is 1"));
    options.model.attention.kv_dtype = CPA_FP8_E4M3;
    options.model.attention.v_scale = 0;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "v_scale is 0"));
}

static void layers_of_no_quantised_cache_are_not_left(void) {
    static const uint8_t LAST[LAYERS] = {0, 0, 1};
    cpa_engine_options options = default_options();
    cpa_engine *engine = NULL;
    cpa_error err = {CPA_OK, ""};
    options.model.unquantised_layers = LAST;
    CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "layer 2: unquantised in a cache of fp32 with v_in_k 0, expected"));
}

static void scales_on_the_host_are_numbers(void) {
    static const struct {
        int32_t on_host;
        float scale;
        const char *message;
    } bad[] = {{2, 1, "scales_on_host: 2, expected 0 or 1"},
               {1, 0, "v_scales[1]: 0, expected a finite number above 0"},
               {1, NAN, "v_scales[1]: nan, expected a finite number above 0"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const float k[] = {1, 2}, v[] = {3, bad[i].scale};
        cpa_engine_options options = default_options();
        cpa_engine *engine = NULL;
        cpa_error err = {CPA_OK, ""};
        options.model.attention.kv_heads = options.model.attention.n_scales = 2;
        options.model.attention.kv_dtype = CPA_FP8_E4M3;
        options.model.attention.k_scales = k;
        options.model.attention.v_scales = v;
        options.scales_on_host = bad[i].on_host;
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, bad[i].message));
    }
}

static const cpa_test tests[] = {
    {"every quantised cache is checked and gives the same bits",
     every_quantised_cache_is_checked_and_gives_the_same_bits},
    {"every cache of TurboQuant is checked and gives the same bits",
     every_cache_of_turboquant_is_checked_and_gives_the_same_bits},
    {"scales of heads are checked too", scales_of_heads_are_checked_too},
    {"layers that are left unquantised are checked too", layers_that_are_left_unquantised_are_checked_too},
    {"layers that are left take the bytes of their dtype", layers_that_are_left_take_the_bytes_of_their_dtype},
    {"layers of no quantised cache are not left", layers_of_no_quantised_cache_are_not_left},
    {"16-bit queries over quantised caches", sixteen_bit_queries_over_quantised_caches},
    {"layers with windows of their own are checked", layers_with_windows_of_their_own_are_checked},
    {"little staging takes long prompts", little_staging_takes_long_prompts},
    {"states travel in the dtype of the model", states_travel_in_the_dtype_of_the_model},
    {"states of another dtype are refused", states_of_another_dtype_are_refused},
    {"scales on the host are numbers", scales_on_the_host_are_numbers},
    {"scales that make no sense are named", scales_that_make_no_sense_are_named},
};
CPA_MPI_DEVICE_TEST_MAIN("quant engine", tests)
