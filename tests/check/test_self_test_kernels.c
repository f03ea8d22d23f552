/* The self-test of the operations: sound back ends pass it in every shape, and a broken attend fails it by name. With
 * --small one shape is left. */
#include <stdio.h>
#include <string.h>

#include "src/check/self_test_kernels.h"
#include "tests/faults/fault.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static int small; /* the common shape alone: for tools that slow a device down a thousandfold */

static cpa_worker_options options_of(cpa_dtype dtype, cpa_dtype kv_dtype, int32_t q_heads, int32_t kv_heads,
                                     int32_t k_dim, int32_t v_dim, int32_t block_size) {
    return (cpa_worker_options){.model = {.layers = 1,
                                          .attention.q_heads = q_heads,
                                          .attention.kv_heads = kv_heads,
                                          .attention.k_dim = k_dim,
                                          .attention.v_dim = v_dim,
                                          .attention.dtype = dtype,
                                          .attention.kv_dtype = kv_dtype,
                                          .mask = {.causal = 1, .window = 90}},
                                .map = {1, block_size},
                                .block_size = block_size};
}

static cpa_worker_options in_layout(cpa_worker_options options, cpa_kv_layout layout) {
    options.model.attention.layout = layout;
    return options;
}

static cpa_worker_options of_latents(cpa_worker_options options) {
    options.model.attention.v_in_k = 1;
    return options;
}

static void every_shape_passes(void) {
    const cpa_worker_options shapes[] = {
        options_of(CPA_F32, CPA_F32, 4, 2, 64, 64, 16),
        options_of(CPA_BF16, CPA_BF16, 8, 2, 128, 128, 16),
        options_of(CPA_BF16, CPA_BF16, 4, 4, 64, 64, 64),
        options_of(CPA_BF16, CPA_BF16, 16, 1, 128, 128, 256),
        options_of(CPA_BF16, CPA_BF16, 8, 2, 96, 96, 32),
        options_of(CPA_BF16, CPA_BF16, 4, 2, 192, 128, 64),
        options_of(CPA_BF16, CPA_BF16, 4, 2, 256, 256, 16),
        options_of(CPA_F16, CPA_F16, 8, 2, 128, 128, 128),
        options_of(CPA_F16, CPA_F16, 6, 2, 72, 40, 16),
        options_of(CPA_BF16, CPA_F32, 4, 2, 64, 64, 32),
        options_of(CPA_BF16, CPA_BF16, 8, 2, 128, 128, 1),
        options_of(CPA_F16, CPA_F16, 4, 2, 64, 64, 4),
        in_layout(options_of(CPA_BF16, CPA_BF16, 8, 2, 128, 128, 16), CPA_VLLM_X),
        in_layout(options_of(CPA_BF16, CPA_FP8_E4M3, 8, 2, 128, 128, 32), CPA_VLLM_X),
        in_layout(options_of(CPA_F16, CPA_F16, 4, 4, 96, 96, 32), CPA_VLLM_X),
        in_layout(options_of(CPA_F16, CPA_INT8, 4, 2, 64, 64, 16), CPA_HEAD_MAJOR),
        of_latents(options_of(CPA_BF16, CPA_BF16, 7, 1, 576, 512, 64)),
        of_latents(options_of(CPA_BF16, CPA_FP8_T128, 3, 1, 576, 512, 16)),
        of_latents(options_of(CPA_BF16, CPA_FP8_T64, 3, 1, 512, 512, 16)),
        of_latents(options_of(CPA_F16, CPA_FP8_E4M3, 4, 1, 48, 32, 32)),
    };
    for (size_t i = small ? 1 : 0; i < (small ? 2 : sizeof shapes / sizeof shapes[0]); i++) {
        cpa_self_test_kernels_stats stats;
        cpa_error err = {CPA_OK, ""};
        CU_ASSERT_EQUAL(cpa_self_test_kernels(device, &shapes[i], 5 + i, &stats, &err), CPA_OK);
        if (err.status != CPA_OK) printf("shape %zu: %s\n", i, err.message);
        CPA_ASSERT_ORDER(stats.rows, >, 100);
        if (i == 0) printf("%d paths, %s%s ", stats.paths, stats.on_blas ? "BLAS" : "float64 ", stats.why);
    }
}

static void check_fault(cpa_fault fault, cpa_kv_layout layout, const char *expected) {
    cpa_worker_options options = in_layout(options_of(CPA_BF16, CPA_BF16, 8, 2, 128, 128, 16), layout);
    cpa_self_test_kernels_stats stats;
    cpa_error err = {CPA_OK, ""};
    cpa_fault_armed = fault;
    CU_ASSERT_EQUAL(cpa_self_test_kernels(device, &options, 5, &stats, &err), CPA_CHECK_FAILED);
    cpa_fault_armed = CPA_FAULT_NONE;
    const char *parts[] = {"self-test: ", expected, "path ",   "bf16 over bf16, 8/2 heads of 128/128",
                           "row ",        "head ",  "allowed "};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        CU_ASSERT_PTR_NOT_NULL(strstr(err.message, parts[i]));
        if (!strstr(err.message, parts[i])) printf("no '%s' in: %s\n", parts[i], err.message);
    }
}

static void a_mask_off_by_one_fails_by_name(void) {
    check_fault(CPA_FAULT_OFF_BY_ONE_MASK, CPA_TOKEN_MAJOR, "causal");
}

static void a_swapped_kv_head_fails_by_name(void) {
    check_fault(CPA_FAULT_SWAPPED_KV_HEAD, CPA_TOKEN_MAJOR, "attend, path ");
}

static void rows_read_where_runs_lie_fail_by_name(void) {
    check_fault(CPA_FAULT_ROWS_FOR_RUNS, CPA_VLLM_X, "attend, path ");
}

static void rules_that_are_lost_fail_by_name(void) {
    check_fault(CPA_FAULT_LOST_RULES, CPA_TOKEN_MAJOR, "attend with softcap, path ");
}

static const cpa_test TESTS[] = {
    {"every shape passes", every_shape_passes},
    {"a mask off by one fails by name", a_mask_off_by_one_fails_by_name},
    {"a swapped KV head fails by name", a_swapped_kv_head_fails_by_name},
    {"rules that are lost fail by name", rules_that_are_lost_fail_by_name},
    {"rows read where runs lie fail by name", rows_read_where_runs_lie_fail_by_name},
};

int main(int argc, char **argv) {
    cpa_stream *stream;
    int missing = cpa_test_device_missing();
    if (missing) return missing == 1 ? CPA_TEST_SKIPPED : missing;
    small = cpa_test_take_option(&argc, argv, "--small");
    cpa_test_device_open(0, &device, &stream);
    int code = cpa_test_main(argc, argv, "self-test of the operations", TESTS, (int)(sizeof TESTS / sizeof TESTS[0]));
    cpa_test_device_close(device, stream);
    return code;
}
