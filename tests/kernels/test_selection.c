/* attend over keys that are selected by lists and by blocks (cpattn/selection.h), against the float64 reference over
 * those that both name. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

/* Prefill of a whole sequence, of its end, and decode; dtypes, and a quantised cache. */
static void every_selection_in_every_base(void) {
    for (int i = 0; i < CPA_TEST_N_SELECTIONS; i++) {
        for (int base = 0; base < CPA_ATTEND_BASES; base++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SELECTIONS[i], 13), 0);
            shape.start = shape.length - 45;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SELECTIONS[i], 7), 0);
            shape.start = shape.length - 1;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SELECTIONS[i], 1), 0);
        }
    }
}

/* Indices are those of the sequence, wherever a key lies. */
static void every_selection_over_shards(void) {
    for (int i = 0; i < CPA_TEST_N_SELECTIONS; i++) {
        for (int32_t n = 2; n <= 4; n++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[n % 2];
            shape.cp_size = n;
            shape.length = 333;
            shape.interleave = n == 3 ? 48 : 16;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SELECTIONS[i], 17), 0);
            shape.start = shape.length - 6;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_SELECTIONS[i], 1), 0);
        }
    }
}

/* The mask stays: causality, windows and their sinks; and rows that look ahead. */
static void the_mask_stays(void) {
    static const cpa_mask masks[] = {
        {.causal = 1, .window = 64}, {.causal = 1, .window = 100, .sinks = 5}, {.causal = 0}};
    for (size_t m = 0; m < sizeof masks / sizeof *masks; m++) {
        for (int base = 0; base < 2; base++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            shape.mask = masks[m];
            shape.length = 700;
            shape.start = 650;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_UNITS, 3), 0);
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_BLOCKS, 3), 0);
            shape.start = 698;
            CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_LISTS | CPA_TEST_BLOCKS, 1), 0);
        }
    }
}

/* Few rows of many keys, which several threads share and a device would split. */
static void decode_over_many_keys(void) {
    for (int base = 0; base < 2; base++) {
        cpa_attend_case shape = CPA_ATTEND_BASE[base];
        shape.block_size = shape.interleave = 64;
        shape.length = 3001;
        shape.start = shape.length - 2;
        CU_ASSERT_EQUAL(cpa_test_wrong_rows(&shape, CPA_TEST_UNITS | CPA_TEST_BLOCKS, 1), 0);
    }
}

/* A fixture whose rows have a selection, and what comes of it. */
typedef struct selected {
    cpa_attend_fixture fixture;
    cpa_case_score score;
    cpa_attend_result result;
} selected;

static void begin(selected *s, const cpa_attend_case *shape, int what) {
    cpa_attend_fixture_init(&s->fixture, shape, 1);
    cpa_attend_result_init(&s->result, &s->fixture);
    s->score = cpa_test_score_of(&s->fixture, what);
    s->fixture.score = &s->score;
}

static void end(selected *s) {
    cpa_attend_result_destroy(&s->result);
    cpa_case_score_release(&s->score);
    cpa_attend_fixture_destroy(&s->fixture);
}

/* Every unit in each list, and every block. */
static void select_all(cpa_case_score *score, int64_t keys) {
    if (score->lists) {
        score->list_width = (int32_t)((keys + score->unit - 1) / score->unit);
        free(score->lists);
        const int64_t n = score->rows * score->kv_heads * score->list_width;
        score->lists = malloc((size_t)n * sizeof *score->lists);
        for (int64_t i = 0; i < n; i++) score->lists[i] = (int32_t)(i % score->list_width);
        for (int64_t i = 0; i < score->rows; i++) score->counts[i] = score->list_width;
    }
    if (score->blocks) {
        memset(score->blocks, 0xff, (size_t)score->n_block_words * sizeof *score->blocks);
        for (int64_t i = 0; i < score->rows; i++) score->block_word[i] = 0;
        score->n_blocks = (int32_t)(cpa_mask_words(score->n_blocks) * 32);
    }
}

static void all_keys_give_the_bits_of_no_selection(void) {
    static const int kinds[] = {CPA_TEST_LISTS, CPA_TEST_UNITS, CPA_TEST_BLOCKS};
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            cpa_attend_result plain;
            selected s;
            shape.length = 300; /* less than the blocks that a word tells of */
            begin(&s, &shape, kinds[i]);
            select_all(&s.score, shape.length);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&s.fixture, 0, &s.result), CPA_OK);
            if (s.fixture.device->caps.bit_exact) {
                cpa_attend_result_init(&plain, &s.fixture);
                s.fixture.score = NULL;
                CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&s.fixture, 0, &plain), CPA_OK);
                CU_ASSERT(cpa_attend_result_same(&plain, &s.result));
                cpa_attend_result_destroy(&plain);
            }
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&s.fixture, 0, 7, &s.result, NULL), 0);
            end(&s);
        }
    }
}

/* No key, one key, and one that the mask hides. */
static void rows_of_few_keys(void) {
    for (int base = 0; base < CPA_ATTEND_BASES; base++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            selected s;
            shape.start = late ? shape.length - 3 : shape.length - 45;
            begin(&s, &shape, CPA_TEST_LISTS | CPA_TEST_SINKS);
            for (int64_t row = 0; row < s.score.rows; row++) {
                for (int32_t head = 0; head < s.score.kv_heads; head++)
                    s.score.lists[(row * s.score.kv_heads + head) * s.score.list_width] =
                        row % 3 == 1 ? (int32_t)row : (int32_t)shape.length - 1;
                s.score.counts[row] = row % 3 > 0;
            }
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&s.fixture, 0, &s.result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&s.fixture, 0, 1, &s.result, NULL), 0);
            CU_ASSERT_EQUAL(s.result.lse[0], -INFINITY);
            CU_ASSERT_NOT_EQUAL(s.result.lse[s.score.q_heads], -INFINITY);
            end(&s);
        }
    }
}

/* Keys and values of NaN that no row selects do not show. */
static void keys_that_are_not_selected_may_hold_anything(void) {
    enum { UNIT = 4, HIDDEN = 9 };
    for (int base = 0; base < 2; base++) {
        for (int late = 0; late < 2; late++) {
            cpa_attend_case shape = CPA_ATTEND_BASE[base];
            float nan[CPA_MAX_HEAD_DIM];
            selected s;
            for (int d = 0; d < CPA_MAX_HEAD_DIM; d++) nan[d] = NAN;
            shape.start = late ? shape.length - 2 : 50;
            begin(&s, &shape, CPA_TEST_UNITS);
            for (int64_t i = 0; i < s.score.rows * s.score.kv_heads * s.score.list_width; i++)
                s.score.lists[i] = (int32_t)(2 * (i % s.score.list_width)); /* HIDDEN is odd */
            for (int64_t row = 0; row < s.score.rows; row++) s.score.counts[row] = s.score.list_width;
            for (int64_t key = HIDDEN * UNIT; key < (HIDDEN + 1) * UNIT; key++)
                for (int32_t head = 0; head < shape.kv_heads; head++)
                    cpa_kv_fixture_store(&s.fixture.kv, s.fixture.tables[s.fixture.table[0] + key / shape.block_size],
                                         key % shape.block_size, head, nan, nan);
            cpa_kv_view_free(&s.fixture.device_kv, s.fixture.stream);
            s.fixture.device_kv = cpa_kv_fixture_upload(&s.fixture.kv, s.fixture.stream);
            CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&s.fixture, 0, &s.result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&s.fixture, 0, 1, &s.result, NULL), 0);
            end(&s);
        }
    }
}

/* Rows in items of any size, and keys in several calls, have the bits of all at once. */
static void bits_do_not_depend_on_the_batch(void) {
    enum { ITEMS = 400 };
    cpa_attend_case shape = CPA_ATTEND_BASE[0];
    cpa_attend_item items[ITEMS];
    cpa_attend_result cut;
    selected s;
    shape.length = 1100;
    shape.start = 900;
    begin(&s, &shape, CPA_TEST_UNITS | CPA_TEST_BLOCKS | CPA_TEST_ALIBI);
    cpa_attend_result_init(&cut, &s.fixture);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&s.fixture, 0, &s.result), CPA_OK);
    for (int64_t rows = 1; rows <= 49 && s.fixture.device->caps.bit_exact; rows += 16) {
        int64_t n = 0;
        for (int64_t row = 0; row < s.fixture.q_count[0]; row += rows, n++) {
            const int64_t left = s.fixture.q_count[0] - row;
            items[n] = cpa_attend_fixture_item(&s.fixture, 0, row, left < rows ? left : rows, 0, 0, shape.length);
        }
        memset(cut.o, 0xff, (size_t)cut.o_bytes);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&s.fixture, items, n, 0, &cut), CPA_OK);
        CU_ASSERT(cpa_attend_result_same(&s.result, &cut));
    }
    const int64_t split = cpa_attend_split_tokens(s.fixture.device);
    for (int64_t key = 0; key < shape.length && s.fixture.device->caps.bit_exact; key += split) {
        const int64_t key_end = key + split < shape.length ? key + split : shape.length;
        items[0] = cpa_attend_fixture_item(&s.fixture, 0, 0, s.fixture.q_count[0], 0, key, key_end);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&s.fixture, items, 1, key > 0, &cut), CPA_OK);
    }
    CU_ASSERT_EQUAL(memcmp(s.result.o, cut.o, (size_t)cut.o_bytes) != 0 && s.fixture.device->caps.bit_exact, 0);
    cpa_attend_result_destroy(&cut);
    end(&s);
}

int main(int argc, char **argv) {
    static const cpa_test tests[] = {
        {"every selection in every dtype, as prefill and as decode", every_selection_in_every_base},
        {"every selection over shards", every_selection_over_shards},
        {"the mask stays beside a selection", the_mask_stays},
        {"decode over many keys", decode_over_many_keys},
        {"all keys selected give the bits of no selection", all_keys_give_the_bits_of_no_selection},
        {"rows of no key and of one", rows_of_few_keys},
        {"keys that are not selected may hold anything", keys_that_are_not_selected_may_hold_anything},
        {"bits do not depend on the batch", bits_do_not_depend_on_the_batch},
    };
    return cpa_test_main(argc, argv, "selection", tests, (int)(sizeof tests / sizeof tests[0]));
}
