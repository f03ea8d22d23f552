/* attend gives a row the same bits however the work is cut: rows into items, keys into resumed calls, items over
 * threads. And every instruction set that this CPU has matches the reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/host/device/host.h"
#include "tests/fixtures/attend_fixture.h"
#include "tests/fixtures/unit.h"

static const cpa_attend_case CASES[] = {
    {.q_heads = 4,
     .kv_heads = 2,
     .k_dim = 64,
     .v_dim = 64,
     .block_size = 16,
     .cp_size = 1,
     .interleave = 16,
     .start = 2450,
     .length = 2600,
     .mask = {.causal = 1}},
    {.q_heads = 10,
     .kv_heads = 2,
     .k_dim = 80,
     .v_dim = 33,
     .block_size = 64,
     .cp_size = 3,
     .interleave = 128,
     .start = 6800,
     .length = 7001,
     .mask = {.causal = 1, .sinks = 4, .window = 2100},
     .q_dtype = CPA_BF16,
     .kv_dtype = CPA_BF16},
    {.q_heads = 3,
     .kv_heads = 3,
     .k_dim = 128,
     .v_dim = 128,
     .block_size = 16,
     .cp_size = 2,
     .interleave = 16,
     .start = 5100,
     .length = 5203,
     .mask = {.causal = 0},
     .q_dtype = CPA_F16,
     .kv_dtype = CPA_F16,
     .head_major = 1},
    {.q_heads = 16,
     .kv_heads = 1,
     .k_dim = 192,
     .v_dim = 128,
     .block_size = 256,
     .cp_size = 1,
     .interleave = 256,
     .start = 3000,
     .length = 3100,
     .mask = {.causal = 1, .sinks = 300, .window = 700}},
    {.q_heads = 8,
     .kv_heads = 2,
     .k_dim = 128,
     .v_dim = 128,
     .block_size = 32,
     .cp_size = 2,
     .interleave = 64,
     .start = 5100,
     .length = 5203,
     .mask = {.causal = 1},
     .kv_dtype = CPA_INT8},
    {.q_heads = 10,
     .kv_heads = 2,
     .k_dim = 80,
     .v_dim = 33,
     .block_size = 16,
     .cp_size = 1,
     .interleave = 16,
     .start = 3150,
     .length = 3301,
     .mask = {.causal = 1, .sinks = 4, .window = 2100},
     .q_dtype = CPA_BF16,
     .kv_dtype = CPA_FP8_E4M3,
     .head_major = 1},
    {.q_heads = 12,
     .kv_heads = 3,
     .k_dim = 128,
     .v_dim = 128,
     .block_size = 16,
     .cp_size = 1,
     .interleave = 16,
     .start = 1500,
     .length = 1633,
     .mask = {.causal = 1, .sinks = 5, .window = 1100},
     .q_dtype = CPA_BF16,
     .kv_dtype = CPA_BF16},
    {.q_heads = 16,
     .kv_heads = 1,
     .k_dim = 576,
     .v_dim = 512,
     .v_in_k = 1,
     .scale = 0.07f,
     .block_size = 64,
     .cp_size = 1,
     .interleave = 64,
     .start = 1031,
     .length = 1040,
     .mask = {.causal = 1},
     .q_dtype = CPA_BF16,
     .kv_dtype = CPA_BF16},
    {.q_heads = 5,
     .kv_heads = 1,
     .k_dim = 576,
     .v_dim = 512,
     .v_in_k = 1,
     .scale = 0.07f,
     .block_size = 16,
     .cp_size = 1,
     .interleave = 16,
     .start = 1031,
     .length = 1040,
     .mask = {.causal = 1, .sinks = 4, .window = 900},
     .q_dtype = CPA_BF16,
     .kv_dtype = CPA_FP8_T128},
    {.q_heads = 5,
     .kv_heads = 1,
     .k_dim = 512,
     .v_dim = 512,
     .v_in_k = 1,
     .scale = 0.07f,
     .block_size = 16,
     .cp_size = 1,
     .interleave = 16,
     .start = 1031,
     .length = 1040,
     .mask = {.causal = 1, .sinks = 4, .window = 900},
     .q_dtype = CPA_BF16,
     .kv_dtype = CPA_FP8_T64},
};
enum { N_CASES = sizeof CASES / sizeof CASES[0], SPLIT = CPA_HOST_SPLIT_TOKENS, MAX_ITEMS = 4096 };

/* The results of one case in one call on one thread, which every other way of computing them must equal. */
typedef struct baseline {
    cpa_attend_fixture fixture;
    cpa_attend_result expected, result;
} baseline;

static void begin(baseline *base, const cpa_attend_case *shape, int32_t threads) {
    cpa_attend_fixture one;
    cpa_attend_fixture_init(&one, shape, 1);
    cpa_attend_fixture_init(&base->fixture, shape, threads);
    cpa_attend_result_init(&base->expected, &one);
    cpa_attend_result_init(&base->result, &base->fixture);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&one, 0, &base->expected), CPA_OK);
    cpa_attend_fixture_destroy(&one);
}

static void end(baseline *base) {
    cpa_attend_result_destroy(&base->expected);
    cpa_attend_result_destroy(&base->result);
    cpa_attend_fixture_destroy(&base->fixture);
}

/* The queries of every slot in items of `rows` rows. */
static int64_t cut_rows(const cpa_attend_fixture *fixture, int64_t rows, cpa_attend_item *items) {
    int64_t n = 0;
    for (int32_t slot = 0; slot < fixture->shape.cp_size; slot++) {
        for (int64_t row = 0; row < fixture->q_count[slot]; row += rows, n++) {
            int64_t count = fixture->q_count[slot] - row < rows ? fixture->q_count[slot] - row : rows;
            items[n] = cpa_attend_fixture_item(fixture, slot, row, count, 0, 0, fixture->k_tokens[0]);
        }
    }
    return n;
}

static void rows_cut_into_items(void) {
    static const int64_t rows[] = {1, 2, 3, 7, 64, 121};
    static cpa_attend_item items[MAX_ITEMS];
    for (int i = 0; i < N_CASES; i++) {
        baseline base;
        begin(&base, &CASES[i], 1);
        for (size_t j = 0; j < sizeof rows / sizeof rows[0]; j++) {
            int64_t n = cut_rows(&base.fixture, rows[j], items);
            memset(base.result.o, 0xff, (size_t)base.result.o_bytes);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&base.fixture, items, n, 0, &base.result), CPA_OK);
            CU_ASSERT_TRUE(cpa_attend_result_same(&base.expected, &base.result));
        }
        end(&base);
    }
}

static void rows_cut_into_calls(void) {
    static cpa_attend_item items[MAX_ITEMS];
    for (int i = 0; i < N_CASES; i++) {
        baseline base;
        begin(&base, &CASES[i], 1);
        int64_t n = cut_rows(&base.fixture, 5, items);
        for (int64_t item = n - 1; item >= 0; item--)
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&base.fixture, &items[item], 1, 0, &base.result), CPA_OK);
        CU_ASSERT_TRUE(cpa_attend_result_same(&base.expected, &base.result));
        end(&base);
    }
}

/* Attends the keys [begin, end) of slot 0 for all queries. */
static cpa_status run_keys(baseline *base, int64_t k_begin, int64_t k_end, int resume) {
    cpa_attend_item items[CPA_TEST_MAX_SLOTS];
    for (int32_t slot = 0; slot < base->fixture.shape.cp_size; slot++)
        items[slot] = cpa_attend_fixture_item(&base->fixture, slot, 0, base->fixture.q_count[slot], 0, k_begin, k_end);
    return cpa_attend_fixture_run(&base->fixture, items, base->fixture.shape.cp_size, resume, &base->result);
}

static void keys_cut_into_resumed_calls(void) {
    for (int i = 0; i < N_CASES; i++) {
        baseline base;
        begin(&base, &CASES[i], 1);
        const int64_t keys = base.fixture.k_tokens[0];
        for (int64_t step = SPLIT; step <= 2 * SPLIT; step += SPLIT) {
            memset(base.result.o, 0xff, (size_t)base.result.o_bytes);
            memset(base.result.lse, 0xff, (size_t)base.result.lse_bytes);
            for (int64_t key = 0; key < keys; key += step)
                CU_ASSERT_EQUAL(run_keys(&base, key, key + step < keys ? key + step : keys, key > 0), CPA_OK);
            CU_ASSERT_EQUAL(memcmp(base.expected.o, base.result.o, (size_t)base.result.o_bytes), 0);
            CU_ASSERT_EQUAL(memcmp(base.expected.lse, base.result.lse, (size_t)base.result.lse_bytes), 0);
        }
        end(&base);
    }
}

static void resume_does_not_read_the_o_of_an_empty_state(void) {
    baseline base;
    begin(&base, &CASES[0], 1);
    CU_ASSERT_EQUAL(run_keys(&base, 0, 0, 0), CPA_OK);
    memset(base.result.o, 0xff, (size_t)base.result.o_bytes);
    CU_ASSERT_EQUAL(run_keys(&base, 0, base.fixture.k_tokens[0], 1), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(base.expected.o, base.result.o, (size_t)base.result.o_bytes), 0);
    end(&base);
}

/* The last token over many splits: several units share its rows. */
static void check_decode(baseline *base, const cpa_attend_case *shape) {
    cpa_attend_fixture *fixture = &base->fixture;
    const int64_t last = fixture->q_count[0] - 1, width = (int64_t)shape->q_heads * shape->v_dim;
    const int64_t row = fixture->q_row[0] + last;
    const cpa_attend_item item = cpa_attend_fixture_item(fixture, 0, last, 1, 0, 0, fixture->k_tokens[0]);
    memset(base->result.o, 0xff, (size_t)base->result.o_bytes);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(fixture, &item, 1, 0, &base->result), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(base->expected.o + row * width, base->result.o + row * width, (size_t)width * sizeof(float)),
                    0);
}

static void any_number_of_threads(void) {
    for (int i = 0; i < N_CASES; i++) {
        for (int32_t threads = 1; threads <= 3; threads++) {
            baseline base;
            begin(&base, &CASES[i], threads);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&base.fixture, 0, &base.result), CPA_OK);
            CU_ASSERT_TRUE(cpa_attend_result_same(&base.expected, &base.result));
            check_decode(&base, &CASES[i]);
            end(&base);
        }
    }
}

/* Queries in items of few rows, which read the pages, have the bits of all in one item, which share packed tiles. */
static void cut_rows_on(const cpa_attend_isa *isa, const cpa_attend_case *shape) {
    static const int64_t rows[] = {1, 3, 13};
    static cpa_attend_item items[MAX_ITEMS];
    cpa_attend_fixture fixture;
    cpa_attend_result expected, result;
    cpa_attend_fixture_init(&fixture, shape, 2);
    cpa_host_use_isa((cpa_host_device *)fixture.device, isa);
    cpa_attend_result_init(&expected, &fixture);
    cpa_attend_result_init(&result, &fixture);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&fixture, 0, &expected), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&fixture, 0, 41, &expected, NULL), 0);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const int64_t n = cut_rows(&fixture, rows[i], items);
        memset(result.o, 0xff, (size_t)result.o_bytes);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&fixture, items, n, 0, &result), CPA_OK);
        CU_ASSERT_TRUE(cpa_attend_result_same(&expected, &result));
    }
    cpa_attend_result_destroy(&result);
    cpa_attend_result_destroy(&expected);
    cpa_attend_fixture_destroy(&fixture);
}

static void every_instruction_set_keeps_bits_and_matches_the_reference(void) {
    for (int set = 0; cpa_attend_isas[set]; set++) {
        if (!cpa_attend_isas[set]->supported()) {
            printf("(skipped: this CPU lacks %s) ", cpa_attend_isas[set]->name);
            continue;
        }
        for (int i = 0; i < N_CASES; i++) {
            const int pairs = CASES[i].q_dtype == CPA_BF16 && CASES[i].kv_dtype == CPA_BF16;
            if (pairs || !cpa_attend_isas[set]->pairs) cut_rows_on(cpa_attend_isas[set], &CASES[i]);
        }
    }
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"rows cut into items keep their bits", rows_cut_into_items},
        {"rows cut into calls keep their bits", rows_cut_into_calls},
        {"keys cut into resumed calls keep the bits", keys_cut_into_resumed_calls},
        {"resume does not read the O of an empty state", resume_does_not_read_the_o_of_an_empty_state},
        {"prefill and decode have the same bits on any number of threads", any_number_of_threads},
        {"every instruction set keeps bits and matches the reference",
         every_instruction_set_keeps_bits_and_matches_the_reference},
    };
    return cpa_test_main(argc, argv, "attend bits", tests, (int)(sizeof tests / sizeof tests[0]));
}
