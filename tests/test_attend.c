/* attend against the float64 reference: dtypes, shapes, masks, shards, ragged tails, page orders. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attend_fixture.h"
#include "unit.h"

static const cpa_attend_case BASE = {.q_heads = 4,
                                     .kv_heads = 2,
                                     .k_dim = 64,
                                     .v_dim = 64,
                                     .block_size = 16,
                                     .cp_size = 1,
                                     .interleave = 16,
                                     .start = 0,
                                     .length = 300,
                                     .mask = {.causal = 1}};

/* Attends over the keys of each slot in turn and counts rows that disagree with the reference. */
static int64_t wrong_rows(const cpa_attend_case *shape, int64_t stride) {
    cpa_attend_fixture fixture;
    cpa_attend_fixture_init(&fixture, shape, 1);
    int64_t wrong = 0;
    for (int32_t slot = 0; slot < shape->cp_size; slot++) {
        cpa_attend_result result;
        cpa_attend_result_init(&result, &fixture);
        wrong += cpa_attend_fixture_run_slot(&fixture, slot, &result) != CPA_OK;
        wrong += cpa_attend_fixture_check(&fixture, slot, stride, &result, NULL);
        cpa_attend_result_destroy(&result);
    }
    cpa_attend_fixture_destroy(&fixture);
    return wrong;
}

static void every_pair_of_dtypes(void) {
    for (int q = 0; q < CPA_DTYPE_COUNT; q++) {
        for (int kv = 0; kv < CPA_DTYPE_COUNT; kv++) {
            cpa_attend_case shape = BASE;
            shape.q_dtype = (cpa_dtype)q;
            shape.kv_dtype = (cpa_dtype)kv;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 7), 0);
        }
    }
}

static void every_width_of_heads(void) {
    static const int32_t widths[][2] = {{64, 64}, {80, 80}, {96, 96}, {128, 128}, {256, 256}, {192, 128},
                                        {1, 1},   {7, 3},   {33, 65}, {8, 256},   {255, 17}};
    for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        cpa_attend_case shape = BASE;
        shape.k_dim = widths[i][0];
        shape.v_dim = widths[i][1];
        for (int dtype = 0; dtype < CPA_DTYPE_COUNT; dtype++) {
            shape.q_dtype = shape.kv_dtype = (cpa_dtype)dtype;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 31), 0);
        }
    }
}

static void every_grouping_of_heads(void) {
    static const int32_t heads[][2] = {{1, 1}, {4, 4}, {6, 2}, {8, 1}, {10, 2}, {32, 1}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        cpa_attend_case shape = BASE;
        shape.q_heads = heads[i][0];
        shape.kv_heads = heads[i][1];
        CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
    }
}

static void every_block_size_and_page_order(void) {
    static const int32_t sizes[] = {1, 2, 16, 64, 256};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int head_major = 0; head_major < 2; head_major++) {
            cpa_attend_case shape = BASE;
            shape.block_size = shape.interleave = sizes[i];
            shape.head_major = head_major;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
        }
    }
}

/* With many splits, and with queries that begin in the middle of the sequence. */
static void long_sequences_with_ragged_tails(void) {
    static const int64_t lengths[] = {1, 15, 16, 17, 1023, 1024, 1025, 2600};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = BASE;
            shape.length = lengths[i];
            shape.start = late ? lengths[i] - 1 - lengths[i] / 5 : 0;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 61), 0);
        }
    }
}

static void shards_of_every_rank_count(void) {
    static const int32_t interleaves[] = {16, 48, 256};
    for (int32_t n = 1; n <= 5; n++) {
        for (size_t i = 0; i < sizeof interleaves / sizeof interleaves[0]; i++) {
            for (int causal = 0; causal < 2; causal++) {
                cpa_attend_case shape = BASE;
                shape.cp_size = n;
                shape.interleave = interleaves[i];
                shape.mask.causal = causal;
                shape.length = 333;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 13), 0);
            }
        }
    }
}

static void windows_and_sinks(void) {
    static const cpa_mask masks[] = {{1, 0, 1}, {1, 0, 100}, {1, 4, 64}, {1, 40, 17}, {0, 4, 50}, {1, 4, 5000}};
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        for (int32_t n = 1; n <= 3; n += 2) {
            cpa_attend_case shape = BASE;
            shape.cp_size = n;
            shape.length = 1500;
            shape.mask = masks[i];
            CU_ASSERT_EQUAL(wrong_rows(&shape, 29), 0);
        }
    }
}

static void scale_of_the_caller(void) {
    static const float scales[] = {0.05f, 0.2f, -0.1f};
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        cpa_attend_case shape = BASE;
        shape.scale = scales[i];
        CU_ASSERT_EQUAL(wrong_rows(&shape, 17), 0);
    }
}

static void decode_of_one_token(void) {
    for (int32_t n = 1; n <= 4; n++) {
        cpa_attend_case shape = BASE;
        shape.cp_size = n;
        shape.length = 2222;
        shape.start = shape.length - 1;
        CU_ASSERT_EQUAL(wrong_rows(&shape, 1), 0);
    }
}

static void empty_shard_gives_the_empty_state(void) {
    cpa_attend_fixture fixture;
    cpa_attend_result result;
    cpa_attend_fixture_init(&fixture, &BASE, 1);
    cpa_attend_result_init(&result, &fixture);
    cpa_attend_item item = cpa_attend_fixture_item(&fixture, 0, 0, fixture.q_count[0], 0, 0, 0);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&fixture, &item, 1, 0, &result), CPA_OK);
    int64_t elements = result.o_bytes / (int64_t)sizeof *result.o, wrong = 0;
    for (int64_t i = 0; i < elements; i++) wrong += result.o[i] != 0 || ((float *)result.out)[i] != 0;
    for (int64_t i = 0; i < elements / BASE.v_dim; i++) wrong += result.lse[i] != -INFINITY;
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&fixture);
}

static void rows_of_no_item_are_left_alone(void) {
    cpa_attend_fixture fixture;
    cpa_attend_result result, untouched;
    cpa_attend_fixture_init(&fixture, &BASE, 2);
    cpa_attend_result_init(&result, &fixture);
    cpa_attend_result_init(&untouched, &fixture);
    cpa_attend_item item = cpa_attend_fixture_item(&fixture, 0, 10, 20, 0, 0, fixture.k_tokens[0]);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&fixture, &item, 1, 0, &result), CPA_OK);
    int64_t row = (int64_t)BASE.q_heads * BASE.v_dim, bytes = row * (int64_t)sizeof(float);
    CU_ASSERT_EQUAL(memcmp(result.o, untouched.o, (size_t)(10 * bytes)), 0);
    CU_ASSERT_EQUAL(memcmp(result.o + 30 * row, untouched.o, (size_t)(270 * bytes)), 0);
    CU_ASSERT_EQUAL(memcmp(result.lse, untouched.lse, 10 * sizeof(float) * (size_t)BASE.q_heads), 0);
    cpa_attend_result_destroy(&untouched);
    cpa_attend_result_destroy(&result);
    cpa_attend_fixture_destroy(&fixture);
}

int main(void) {
    static const cpa_test tests[] = {
        {"every pair of dtypes matches the reference", every_pair_of_dtypes},
        {"every width of heads matches the reference", every_width_of_heads},
        {"every grouping of heads matches the reference", every_grouping_of_heads},
        {"every block size and page order matches the reference", every_block_size_and_page_order},
        {"long sequences with ragged tails match the reference", long_sequences_with_ragged_tails},
        {"shards of every rank count match the reference", shards_of_every_rank_count},
        {"windows and sinks match the reference", windows_and_sinks},
        {"a scale of the caller matches the reference", scale_of_the_caller},
        {"decode of one token matches the reference", decode_of_one_token},
        {"an empty shard gives O = 0 and LSE = -inf whatever memory held", empty_shard_gives_the_empty_state},
        {"rows of no item are left alone", rows_of_no_item_are_left_alone},
    };
    return cpa_test_main("attend", tests, (int)(sizeof tests / sizeof tests[0]));
}
