/* attend over blocks of 1, 2, 4 and 8 tokens against the float64 reference: dtypes, groups of heads, widths, masks,
 * shards; tables that lie on the device. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

enum { LEAST = 1, MOST = 8 };

static int64_t cases;

/* Rows that disagree with the reference over the keys of each slot, with tables on the host, or on the device. */
static int64_t wrong_rows(const cpa_attend_case *shape, int64_t stride, int tables_on_device) {
    cpa_attend_case placed = *shape;
    placed.tables_on_device = tables_on_device;
    cases++;
    return cpa_test_wrong_rows(&placed, 0, stride);
}

/* As prefill, and as decode of the last token. The host takes every third case. */
static void grid(void) {
    static const cpa_dtype dtypes[][2] = {
        {CPA_F32, CPA_F32}, {CPA_BF16, CPA_BF16}, {CPA_F16, CPA_F16}, {CPA_BF16, CPA_FP8_E4M3}, {CPA_F16, CPA_INT8}};
    static const int32_t heads[][2] = {{4, 4}, {8, 2}, {8, 1}};
    static const int32_t widths[][2] = {{13, 13}, {64, 64}, {80, 80}, {128, 128}, {192, 128}, {256, 256}};
    const int thin = cpa_test_promises_bits() ? 3 : 1;
    int turn = 0;
    cases = 0;
    for (int d = 0; d < 5; d++)
        for (int h = 0; h < 3; h++)
            for (int w = 0; w < (d == 0 ? 4 : 6); w++) /* fp32 rounds the LSE of the widest by more than its bar */
                for (int32_t block = LEAST; block <= MOST; block *= 2)
                    for (int late = 0; late < 2; late++) {
                        const int64_t length = 150 + turn % 7;
                        const cpa_attend_case shape = {.q_dtype = dtypes[d][0],
                                                       .kv_dtype = dtypes[d][1],
                                                       .q_heads = heads[h][0],
                                                       .kv_heads = heads[h][1],
                                                       .k_dim = widths[w][0],
                                                       .v_dim = widths[w][1],
                                                       .block_size = block,
                                                       .cp_size = 1,
                                                       .interleave = block,
                                                       .start = late ? length - 1 : 0,
                                                       .length = length,
                                                       .mask = {.causal = 1},
                                                       .head_major = turn / 4 % 2};
                        if (turn++ % thin == 0) CU_ASSERT_EQUAL(wrong_rows(&shape, 37, 0), 0);
                    }
    printf("%lld cases ", (long long)cases);
}

static void windows_and_shards(void) {
    static const cpa_mask masks[] = {{.causal = 0}, {.causal = 1, .window = 70, .sinks = 5}};
    for (int base = 0; base < CPA_ATTEND_BASES; base++)
        for (int32_t block = LEAST; block <= MOST; block *= 2)
            for (int m = 0; m < 2; m++) {
                cpa_attend_case shape = CPA_ATTEND_BASE[base];
                shape.block_size = block;
                shape.interleave = m ? block : 3 * block;
                shape.cp_size = m ? 1 : 3;
                shape.mask = masks[m];
                CU_ASSERT_EQUAL(wrong_rows(&shape, 41, 0), 0);
                shape.start = shape.length - 4;
                CU_ASSERT_EQUAL(wrong_rows(&shape, 1, 0), 0);
            }
}

/* Keys enough for every stage of every warp, and for cuts; on devices also rows enough that nothing is cut, and every
 * stage filled several times. */
static void long_sequences(void) {
    for (int base = 1; base < CPA_ATTEND_BASES; base++)
        for (int32_t block = LEAST; block <= MOST; block *= 8) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            shape.block_size = shape.interleave = block;
            shape.length = 3001;
            shape.start = 2900;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 29, 0), 0);
            shape.start = 2999;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 1, 0), 0);
            if (cpa_test_promises_bits()) continue;
            shape.start = 0;
            CU_ASSERT_EQUAL(wrong_rows(&shape, 97, 0), 0);
        }
}

static void tables_on_the_device(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++)
        for (int32_t block = LEAST; block <= 64; block *= 4) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            shape.block_size = shape.interleave = block;
            shape.cp_size = 2;
            shape.length = 1100;
            for (shape.start = 0; shape.start < shape.length; shape.start += shape.length - 2)
                CU_ASSERT_EQUAL(wrong_rows(&shape, 73, 1), 0);
        }
}

/* Tables of several items that lie in any order, with entries between them that nobody uses; some items have no keys,
 * some no rows. The same bits as from the host. */
static void tables_of_many_items_on_the_device(void) {
    static const int64_t ends[] = {40, 0, 300, 17, 16, 129, 1};
    enum { ITEMS = sizeof ends / sizeof *ends };
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[base];
        cpa_attend_fixture f;
        cpa_attend_item items[ITEMS];
        cpa_attend_result result[2];
        shape.block_size = shape.interleave = base % 2 ? 1 : 16;
        cpa_attend_fixture_init(&f, &shape, 1);
        for (int i = 0; i < ITEMS; i++) {
            items[i] = cpa_attend_fixture_item(&f, 0, 40 * i, i == 4 ? 0 : i % 2 ? 1 : 40, 0, 0, ends[i]);
            if (i == 2) items[i] = cpa_attend_fixture_item(&f, 0, 40 * i, 40, 0, 128, 300); /* begins within a table */
        }
        for (f.tables_on_device = 0; f.tables_on_device < 2; f.tables_on_device++) {
            cpa_attend_result *r = &result[f.tables_on_device];
            cpa_attend_result_init(r, &f);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, ITEMS, 0, r), CPA_OK);
        }
        CU_ASSERT(cpa_attend_result_same(&result[0], &result[1]));
        cpa_attend_result_destroy(&result[1]);
        cpa_attend_result_destroy(&result[0]);
        cpa_attend_fixture_destroy(&f);
    }
}

/* Items of many lengths over one table, as those of sequences that begin alike. */
static void items_over_one_table(void) {
    static const int64_t counts[] = {40, 1, 70, 2, 33, 1, 100, 53};
    enum { ITEMS = sizeof counts / sizeof *counts };
    for (int base = 1; base < CPA_ATTEND_BASES; base++)
        for (int32_t block = LEAST; block <= 16; block *= 4) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_fixture f;
            cpa_attend_item items[ITEMS];
            cpa_attend_result result;
            int64_t row = 0;
            shape.block_size = shape.interleave = block;
            cpa_attend_fixture_init(&f, &shape, 1);
            for (int i = 0; i < ITEMS; row += counts[i++])
                items[i] = cpa_attend_fixture_item(&f, 0, row, counts[i], 0, 0, row + counts[i]);
            cpa_attend_result_init(&result, &f);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&f, items, ITEMS, 0, &result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&f, 0, 3, &result, NULL), 0);
            cpa_attend_result_destroy(&result);
            cpa_attend_fixture_destroy(&f);
        }
}

/* On the host they are refused; a device reads blocks of the pool in their place, and nothing beyond it. */
static void entries_that_are_no_blocks(void) {
    static const int32_t entries[] = {-1, INT32_MIN, INT32_MAX, 1000};
    for (int i = 0; i < 2 * 4; i++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[1];
        cpa_attend_fixture f;
        cpa_attend_result result;
        shape.block_size = shape.interleave = 4;
        shape.start = i % 2 ? 299 : 0;
        cpa_attend_fixture_init(&f, &shape, 1);
        cpa_attend_result_init(&result, &f);
        f.tables_on_device = 1;
        f.tables[50] = entries[i / 2];
        const cpa_status status = cpa_attend_fixture_run_slot(&f, 0, &result);
        CU_ASSERT_EQUAL(status, cpa_test_promises_bits() ? CPA_INVALID : CPA_OK);
        cpa_attend_result_destroy(&result);
        cpa_attend_fixture_destroy(&f);
    }
}

static const cpa_test tests[] = {
    {"block sizes, dtypes, groups and widths match the reference", grid},
    {"windows and shards match the reference", windows_and_shards},
    {"long sequences match the reference", long_sequences},
    {"tables on the device match the reference", tables_on_the_device},
    {"tables of many items on the device", tables_of_many_items_on_the_device},
    {"items over one table match the reference", items_over_one_table},
    {"entries that are no blocks", entries_that_are_no_blocks},
};

CPA_DEVICE_TEST_MAIN("attend over blocks of few tokens", tests)
