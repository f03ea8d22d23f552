/* attend over blocks of 128 keys that each query head selects for blocks of 128 queries, as XAttention does
 * (cpattn/xattn.h), against float64 over the keys of the same bits; and blocks by a pattern. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/hash.h"
#include "src/check/cases/selection.h"
#include "tests/fixtures/attend_case.h"
#include "tests/fixtures/unit.h"

enum { BLOCK = 128 };

/* A fixture whose rows have blocks; those of its first, partial block of queries attend all keys. */
typedef struct blocks_case {
    cpa_attend_fixture fixture;
    cpa_case_score score;
    cpa_attend_result result;
    int64_t words;
} blocks_case;

static int64_t index_of_row(const cpa_attend_fixture *f, int64_t row) {
    for (int32_t slot = f->shape.cp_size - 1; slot >= 0; slot--) {
        if (row < f->q_row[slot] || f->q_count[slot] == 0) continue;
        const int64_t local = f->q_first[slot] + row - f->q_row[slot];
        return f->shape.cp_size == 1 ? local : cpa_shard_pos(f->map, slot, local);
    }
    return 0;
}

static uint32_t *line_of(const blocks_case *b, int64_t q_block, int32_t head) {
    return b->score.blocks + (q_block * b->score.q_heads + head) * b->words;
}

static void begin(blocks_case *b, const cpa_attend_case *shape, int what, unsigned percent) {
    const int64_t blocks = (shape->length + BLOCK - 1) / BLOCK;
    cpa_attend_fixture_init(&b->fixture, shape, 2);
    cpa_attend_result_init(&b->result, &b->fixture);
    b->score = cpa_test_score_of(&b->fixture, what);
    b->words = cpa_mask_words(blocks);
    CU_ASSERT_EQUAL_FATAL(cpa_case_score_add_blocks(&b->score, BLOCK, shape->length, NULL), CPA_OK);
    free(b->score.blocks);
    b->score.n_blocks = (int32_t)blocks;
    b->score.n_block_words = blocks * shape->q_heads * b->words;
    b->score.blocks = calloc((size_t)b->score.n_block_words, sizeof *b->score.blocks);
    if (!b->score.blocks) abort();
    for (int64_t q_block = 0; q_block < blocks; q_block++)
        for (int32_t head = 0; head < shape->q_heads; head++)
            for (int64_t block = 0; block < blocks; block++)
                if (cpa_mix64((uint64_t)((q_block * 64 + head) * 4096 + block)) % 100 < percent)
                    line_of(b, q_block, head)[block / 32] |= 1u << block % 32;
    for (int64_t row = 0; row < b->score.rows; row++) {
        const int64_t index = index_of_row(&b->fixture, row), first = (shape->start + BLOCK - 1) / BLOCK;
        b->score.block_word[row] = index / BLOCK < first ? -1 : index / BLOCK * shape->q_heads * b->words;
    }
    b->fixture.score = &b->score;
}

static void end(blocks_case *b) {
    cpa_attend_result_destroy(&b->result);
    cpa_case_score_release(&b->score);
    cpa_attend_fixture_destroy(&b->fixture);
}

static void judge(blocks_case *b, int64_t stride) {
    for (int32_t slot = 0; slot < b->fixture.shape.cp_size; slot++) {
        CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&b->fixture, slot, &b->result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b->fixture, slot, stride, &b->result, NULL), 0);
    }
}

static cpa_attend_case case_of(cpa_dtype dtype, int32_t q_heads, int32_t kv_heads, int32_t dim, int64_t length) {
    return (cpa_attend_case){.q_dtype = dtype,
                             .kv_dtype = dtype,
                             .q_heads = q_heads,
                             .kv_heads = kv_heads,
                             .k_dim = dim,
                             .v_dim = dim,
                             .block_size = 16,
                             .cp_size = 1,
                             .interleave = BLOCK,
                             .length = length,
                             .mask = {.causal = 1}};
}

static void every_width_and_density(void) {
    static const int32_t dims[][2] = {{64, 64}, {128, 128}, {192, 128}, {256, 256}, {80, 80}};
    static const unsigned percents[] = {0, 15, 60, 100};
    for (int d = 0; d < 5; d++)
        for (int p = 0; p < 4; p++) {
            cpa_attend_case shape = case_of(d % 2 ? CPA_BF16 : CPA_F16, 4, 2, dims[d][0], 1400 + 37 * p);
            blocks_case b;
            shape.v_dim = dims[d][1];
            shape.block_size = p == 1 ? 64 : p == 2 ? 8 : 16;
            shape.head_major = p == 2;
            begin(&b, &shape, p == 3 ? CPA_TEST_SINKS : 0, percents[p]);
            judge(&b, 23);
            end(&b);
        }
}

/* A chunk that begins anywhere over keys that are there, in items that are cut anywhere. */
static void chunks_begin_anywhere(void) {
    static const int64_t starts[] = {1, 128, 500, 1279, 1280};
    for (int i = 0; i < 5; i++) {
        cpa_attend_case shape = case_of(CPA_BF16, 8, 2, 128, 1700);
        blocks_case b;
        shape.start = starts[i];
        begin(&b, &shape, 0, 40);
        judge(&b, 17);
        cpa_attend_item items[3];
        const int64_t third = b.fixture.q_count[0] / 3;
        for (int64_t n = 0; n < 3; n++)
            items[n] = cpa_attend_fixture_item(&b.fixture, 0, n * third,
                                               n < 2 ? third : b.fixture.q_count[0] - 2 * third, 0, 0, shape.length);
        memset(b.result.o, 0xff, (size_t)b.result.o_bytes);
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, 3, 0, &b.result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b.fixture, 0, 17, &b.result, NULL), 0);
        end(&b);
    }
}

static void windows_and_shards_stay(void) {
    static const cpa_mask masks[] = {
        {.causal = 1}, {.causal = 1, .window = 300}, {.causal = 1, .window = 257, .sinks = 4}, {.causal = 0}};
    for (int32_t n = 1; n <= 3; n++)
        for (int m = 0; m < 4; m++) {
            cpa_attend_case shape = case_of(CPA_BF16, 4, 1, 128, 1500);
            blocks_case b;
            shape.mask = masks[m];
            shape.cp_size = n;
            shape.interleave = n == 3 ? 16 : BLOCK * n;
            shape.start = m == 1 ? 700 : 0;
            begin(&b, &shape, 0, 50);
            judge(&b, 29);
            end(&b);
        }
}

/* Over codes, of items that are whole and of some that are cut. */
static void codes_are_attended_too(void) {
    static const cpa_dtype caches[] = {CPA_FP8_E4M3, CPA_INT8, CPA_FP8_E5M2};
    for (int c = 0; c < 3; c++)
        for (int wide = 0; wide < 2; wide++) {
            cpa_attend_case shape = case_of(CPA_BF16, 8, 2, wide ? 128 : 64, 1501);
            blocks_case b;
            shape.kv_dtype = caches[c];
            shape.block_size = wide ? 16 : 4;
            shape.start = 300;
            begin(&b, &shape, 0, 30);
            const int64_t first = 513, all = b.fixture.q_count[0];
            const cpa_attend_item items[] = {
                cpa_attend_fixture_item(&b.fixture, 0, 0, first, 0, 0, shape.length),
                cpa_attend_fixture_item(&b.fixture, 0, first, all - first, 0, 0, shape.length)};
            CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, 2, 0, &b.result), CPA_OK);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b.fixture, 0, 3, &b.result, NULL), 0);
            end(&b);
        }
}

/* Rows [first, first + n) of a fixture as an item. */
static cpa_attend_item rows_as_item(const blocks_case *b, int64_t first, int64_t n) {
    return cpa_attend_fixture_item(&b->fixture, 0, first, n, 0, 0, b->fixture.shape.length);
}

/* Whether the first rows have the same bits. */
static int rows_are_same(const blocks_case *b, const cpa_attend_result *other, int64_t rows) {
    const cpa_attend_case *shape = &b->fixture.shape;
    const size_t heads = (size_t)(rows * shape->q_heads), width = heads * (size_t)shape->v_dim;
    return !memcmp(b->result.o, other->o, width * sizeof(float)) &&
           !memcmp(b->result.lse, other->lse, heads * sizeof(float)) &&
           !memcmp(b->result.out, other->out, width * (size_t)cpa_dtype_bytes(shape->q_dtype));
}

/* Items of few rows, which attend all keys, beside others that select blocks: the former have the bits that they have
 * without a selection. `select`: some of few rows select as well. */
static void few_rows_lie_beside(const cpa_attend_case *shape, int select) {
    enum { FEW = 6 };
    blocks_case b;
    cpa_attend_result plain;
    begin(&b, shape, 0, 30);
    const int64_t all = b.fixture.q_count[0], end_of_chunk = all - (select ? 5 : 0);
    const cpa_attend_item items[] = {rows_as_item(&b, 0, 1),
                                     rows_as_item(&b, 1, 1),
                                     rows_as_item(&b, FEW, 300),
                                     rows_as_item(&b, 2, 2),
                                     rows_as_item(&b, FEW + 300, end_of_chunk - FEW - 300),
                                     rows_as_item(&b, 4, 2),
                                     rows_as_item(&b, end_of_chunk, 2),
                                     rows_as_item(&b, end_of_chunk + 2, 3)};
    const int64_t n_items = select ? 8 : 6;
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, n_items, 0, &b.result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b.fixture, 0, 1, &b.result, NULL), 0);
    cpa_attend_result_init(&plain, &b.fixture);
    b.fixture.score = NULL;
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, n_items, 0, &plain), CPA_OK);
    CU_ASSERT(rows_are_same(&b, &plain, FEW));
    CU_ASSERT_FALSE(cpa_attend_result_same(&b.result, &plain));
    cpa_attend_result_destroy(&plain);
    end(&b);
}

static void decode_lies_beside(void) {
    static const cpa_dtype caches[] = {CPA_BF16, CPA_FP8_E4M3, CPA_INT8};
    for (int c = 0; c < 3; c++)
        for (int select = 0; select < 2; select++) {
            cpa_attend_case shape = case_of(CPA_BF16, 8, 2, select ? 64 : 128, 1103);
            shape.kv_dtype = caches[c];
            shape.start = 402;
            few_rows_lie_beside(&shape, select);
        }
}

/* The same over codes without others beside: the first four attend all keys, those behind select. */
static void few_rows_are_alone(void) {
    static const cpa_dtype caches[] = {CPA_FP8_E4M3, CPA_INT8, CPA_TQ_4BIT};
    for (int c = 0; c < 3; c++) {
        cpa_attend_case shape = case_of(CPA_BF16, 8, 2, 128, 1030);
        cpa_attend_result plain;
        blocks_case b;
        shape.kv_dtype = caches[c];
        shape.start = 1020;
        begin(&b, &shape, 0, 30);
        const cpa_attend_item items[] = {rows_as_item(&b, 0, 1), rows_as_item(&b, 1, 3), rows_as_item(&b, 4, 2),
                                         rows_as_item(&b, 6, 1), rows_as_item(&b, 7, 3)};
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, 5, 0, &b.result), CPA_OK);
        CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b.fixture, 0, 1, &b.result, NULL), 0);
        cpa_attend_result_init(&plain, &b.fixture);
        b.fixture.score = NULL;
        CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, 5, 0, &plain), CPA_OK);
        CU_ASSERT(rows_are_same(&b, &plain, 4));
        CU_ASSERT_FALSE(cpa_attend_result_same(&b.result, &plain));
        cpa_attend_result_destroy(&plain);
        end(&b);
    }
}

/* A padded step over codes of more query heads a KV head than decode has rows elsewhere: its rows select blocks too. */
static void padded_rows_of_wide_groups_select(void) {
    enum { PADDED = 16 };
    cpa_attend_case shape = case_of(CPA_BF16, 64, 2, 128, 1030);
    blocks_case b;
    shape.kv_dtype = CPA_FP8_E4M3;
    shape.start = 1020;
    begin(&b, &shape, 0, 30);
    b.fixture.fusion.padded_items = PADDED;
    const cpa_attend_item items[] = {rows_as_item(&b, 0, 1), rows_as_item(&b, 1, 3), rows_as_item(&b, 4, 3),
                                     rows_as_item(&b, 7, 3)};
    CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, 4, 0, &b.result), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b.fixture, 0, 1, &b.result, NULL), 0);
    end(&b);
}

/* The keys of a peer behind those of the own shard: few rows and many go on from their states, those that select blocks
 * and those that attend all keys. */
static void rows_go_on_from_states(void) {
    enum { FEW = 6, CUT = 512 };
    static const cpa_dtype caches[] = {CPA_BF16, CPA_FP8_E4M3, CPA_INT8, CPA_TQ_4BIT};
    for (int c = 0; c < 4; c++)
        for (int alone = 0; alone < 2; alone++) {
            cpa_attend_case shape = case_of(CPA_BF16, 8, 2, 128, alone ? 1030 : 1103);
            blocks_case b;
            shape.kv_dtype = caches[c];
            shape.start = alone ? 1020 : 402;
            begin(&b, &shape, 0, 30);
            const int64_t all = b.fixture.q_count[0], n_items = alone ? 2 : 5;
            cpa_attend_item items[] = {rows_as_item(&b, 0, 2), rows_as_item(&b, 2, alone ? all - 2 : FEW - 2),
                                       rows_as_item(&b, FEW, 300), rows_as_item(&b, FEW + 300, all - FEW - 302),
                                       rows_as_item(&b, all - 2, 2)};
            for (int resume = 0; resume < 2; resume++) {
                for (int64_t i = 0; i < n_items; i++) {
                    items[i].k_first = resume ? CUT : 0;
                    items[i].k_count = resume ? shape.length - CUT : CUT;
                    items[i].table = b.fixture.table[0] + items[i].k_first / shape.block_size;
                }
                CU_ASSERT_EQUAL(cpa_attend_fixture_run(&b.fixture, items, n_items, resume, &b.result), CPA_OK);
            }
            cpa_narrow(b.result.out, b.result.o, shape.q_dtype, b.result.o_bytes / (int64_t)sizeof *b.result.o);
            CU_ASSERT_EQUAL(cpa_attend_fixture_check(&b.fixture, 0, 1, &b.result, NULL), 0);
            end(&b);
        }
}

/* Over blocks that are all selected a row has the result that it has without a selection, on the host to the bit. */
static void all_blocks_are_no_selection(void) {
    cpa_attend_case shape = case_of(CPA_BF16, 4, 2, 128, 1111);
    cpa_attend_result plain;
    blocks_case b;
    begin(&b, &shape, 0, 100);
    judge(&b, 7);
    cpa_attend_result_init(&plain, &b.fixture);
    b.fixture.score = NULL;
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&b.fixture, 0, &plain), CPA_OK);
    if (b.fixture.device->caps.bit_exact) CU_ASSERT(cpa_attend_result_same(&plain, &b.result));
    cpa_attend_result_destroy(&plain);
    end(&b);
}

/* Blocks of NaN that no row of any head selects do not show. */
static void blocks_that_nobody_selects_may_hold_anything(void) {
    enum { HIDDEN = 4 };
    cpa_attend_case shape = case_of(CPA_BF16, 4, 2, 128, 1400);
    float nan[CPA_MAX_HEAD_DIM];
    blocks_case b;
    for (int d = 0; d < CPA_MAX_HEAD_DIM; d++) nan[d] = NAN;
    begin(&b, &shape, 0, 70);
    for (int64_t i = 0; i < b.score.n_block_words; i++) b.score.blocks[i] &= ~(1u << HIDDEN);
    for (int64_t key = HIDDEN * BLOCK; key < (HIDDEN + 1) * BLOCK; key++)
        for (int32_t head = 0; head < shape.kv_heads; head++)
            cpa_kv_fixture_store(&b.fixture.kv, b.fixture.tables[b.fixture.table[0] + key / shape.block_size],
                                 key % shape.block_size, head, nan, nan);
    cpa_kv_view_free(&b.fixture.device_kv, b.fixture.stream);
    b.fixture.device_kv = cpa_kv_fixture_upload(&b.fixture.kv, b.fixture.stream);
    judge(&b, 5);
    end(&b);
}

static int shown(const cpa_block_pattern *p, int64_t row, int64_t block, int64_t offset) {
    if (block > row) return 0;
    for (int64_t i = 0; i < p->local_blocks; i++)
        if (block == row - i) return 1;
    int64_t t = block + offset;
    while (t >= p->vert_stride) t -= p->vert_stride;
    return t == 0;
}

static void patterns_are_those_of_their_formula(void) {
    static const cpa_block_pattern patterns[] = {{sizeof(cpa_block_pattern), 8, 2, 0, 2, 4, 1, 0, 20, 20},
                                                 {sizeof(cpa_block_pattern), 8, 2, 8, 1, 7, 0, 33, 5, 40},
                                                 {sizeof(cpa_block_pattern), 8, 4, 16, 3, 5, -2, 2, 9, 64},
                                                 {sizeof(cpa_block_pattern), 2, 1, 0, 0, 1, 3, 0, 4, 3}};
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        const cpa_block_pattern *p = &patterns[i];
        const int64_t words = cpa_mask_words(p->k_blocks), n = p->q_heads * p->rows * words;
        uint32_t *bits = malloc((size_t)n * sizeof *bits);
        int wrong = 0;
        CU_ASSERT_EQUAL(cpa_block_pattern_bits(p, bits, NULL), CPA_OK);
        for (int64_t j = 0; j < p->q_heads * p->rows; j++) {
            const int64_t head = p->first_head + j / p->rows, group = p->q_heads / p->kv_heads;
            const int64_t offset = (p->head_step >= 0 ? head * p->head_step : head / group * -p->head_step) + 1;
            for (int64_t block = 0; block < 32 * words; block++) {
                const int has = bits[j * words + block / 32] >> block % 32 & 1;
                wrong += has != (block < p->k_blocks && shown(p, p->first_row + j % p->rows, block, offset));
            }
        }
        CU_ASSERT_EQUAL(wrong, 0);
        free(bits);
    }
}

static void bad_patterns_and_selections_are_refused(void) {
    const cpa_block_pattern good = {sizeof good, 4, 2, 0, 1, 2, 1, 0, 2, 2};
    cpa_block_pattern bad = good;
    uint32_t bits[8] = {0};
    cpa_error err = {0};
    bad.vert_stride = 0;
    CU_ASSERT_EQUAL(cpa_block_pattern_bits(&bad, bits, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "vert_stride 0"));
    bad = good, bad.q_heads = 5;
    CU_ASSERT_EQUAL(cpa_block_pattern_bits(&bad, bits, &err), CPA_INVALID);
    CU_ASSERT_EQUAL(cpa_block_pattern_bits(&good, NULL, &err), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "bits is NULL"));

    cpa_attend_case shape = case_of(CPA_BF16, 2, 1, 64, 300);
    blocks_case b;
    shape.start = 290;
    begin(&b, &shape, CPA_TEST_WHOLE_MASK, 50);
    CU_ASSERT_EQUAL(cpa_attend_fixture_run_slot(&b.fixture, 0, &b.result), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(b.fixture.stream), "bits and blocks, expected one of them"));
    end(&b);
}

static const cpa_test tests[] = {
    {"every width of heads and density", every_width_and_density},
    {"chunks begin anywhere", chunks_begin_anywhere},
    {"windows and shards stay", windows_and_shards_stay},
    {"codes are attended too", codes_are_attended_too},
    {"decode lies beside", decode_lies_beside},
    {"few rows are alone", few_rows_are_alone},
    {"padded rows of wide groups select", padded_rows_of_wide_groups_select},
    {"rows go on from states", rows_go_on_from_states},
    {"all blocks are no selection", all_blocks_are_no_selection},
    {"blocks that nobody selects may hold anything", blocks_that_nobody_selects_may_hold_anything},
    {"patterns are those of their formula", patterns_are_those_of_their_formula},
    {"bad patterns and selections are refused", bad_patterns_and_selections_are_refused},
};
CPA_DEVICE_TEST_MAIN("attend_blocks", tests)
