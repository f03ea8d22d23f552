/* Cascade attention on a CUDA device as it is planned: which keys sequences share there, and the pieces and rows over
 * them, of ordinary heads and of latents. Needs no device. */
#include <stdlib.h>
#include <string.h>

#include "base/min_max.h"
#include "kernels/cuda/attend/attend_cascade.h"
#include "kernels/cuda/attend/attend_kernels.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/unit.h"

enum { SEQUENCES = 64, SPREAD = 1 << 12, CASCADE_BLOCK = 64, DEVICE = 132, TILE_ROWS = 128 };

typedef struct cascade_batch {
    cpa_attend_item items[SEQUENCES];
    int32_t tables[SEQUENCES * SPREAD / CASCADE_BLOCK * 16];
    cpa_attend_batch batch;
    int32_t tile_rows;
} cascade_batch;

/* n sequences that share `shared` keys, and have as many more of their own. */
static void deal_cascade(cascade_batch *b, int64_t n, int64_t shared, int64_t own, int64_t rows) {
    const int64_t stride = (shared + own + CASCADE_BLOCK - 1) / CASCADE_BLOCK;
    b->tile_rows = TILE_ROWS;
    b->batch = (cpa_attend_batch){
        .map = {1, CASCADE_BLOCK},
        .shape = {.q_heads = 32, .kv_heads = 8, .k_dim = 128, .v_dim = 128, .dtype = CPA_BF16, .kv_dtype = CPA_BF16},
        .block_size = CASCADE_BLOCK,
        .items = b->items,
        .n_items = n,
        .block_tables = b->tables,
        .n_table_entries = n * stride};
    for (int64_t i = 0; i < n; i++) {
        b->items[i] = (cpa_attend_item){.q_row = i * rows,
                                        .q_count = rows,
                                        .q_first = shared + own - rows,
                                        .k_count = shared + own,
                                        .table = i * stride,
                                        .q_set = {CPA_TOKENS_ALL, 0},
                                        .k_set = {CPA_TOKENS_ALL, 0}};
        for (int64_t e = 0; e < stride; e++)
            b->tables[i * stride + e] = (int32_t)(e < shared / CASCADE_BLOCK ? e : 100000 + i * stride + e);
    }
}

static cpa_cuda_cascade_cut plan_cascade(cpa_cuda_cascade *cascade, const cascade_batch *b) {
    cpa_cuda_cascade_cut cut;
    CU_ASSERT_EQUAL_FATAL(
        cpa_cuda_cascade_plan(cascade, &b->batch, (cpa_table_set){0}, b->tile_rows, DEVICE, &cut, NULL), CPA_OK);
    return cut;
}

/* What is shared fills the device once; where it is little, or few share it, every sequence stays alone. */
static void keys_are_shared_where_that_takes_less_time(void) {
    static cascade_batch b;
    static const struct {
        int64_t sequences, shared, own, pieces;
    } cases[] = {{64, 16384, 1024, 16}, {16, 16384, 1024, 16}, {64, 4096, 256, 16},
                 {64, 1024, 1024, 4},   {64, 512, 1024, 0},    {4, 16384, 1024, 16},
                 {2, 16384, 1024, 0},   {4, 2048, 2048, 0},    {1, 16384, 1024, 0}};
    cpa_cuda_cascade *cascade = calloc(1, sizeof *cascade);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        deal_cascade(&b, cases[i].sequences, cases[i].shared, cases[i].own, 1);
        const cpa_cuda_cascade_cut cut = plan_cascade(cascade, &b);
        CU_ASSERT_EQUAL(cut.pieces, cases[i].pieces);
        CU_ASSERT_EQUAL(cut.rows, cases[i].pieces > 0 ? cases[i].sequences : 0);
    }
    cpa_cuda_cascade_destroy(cascade);
}

/* The same of latents under so many heads. */
static void deal_latents(cascade_batch *b, int32_t heads, cpa_dtype kv_dtype, int64_t n, int64_t shared, int64_t own,
                         int64_t rows) {
    deal_cascade(b, n, shared, own, rows);
    b->tile_rows = CPA_CUDA_WIDE_ROWS;
    b->batch.shape = (cpa_attention_shape){.q_heads = heads,
                                           .kv_heads = 1,
                                           .k_dim = 576,
                                           .v_dim = 512,
                                           .v_in_k = 1,
                                           .dtype = CPA_BF16,
                                           .kv_dtype = kv_dtype};
}

/* Rows of few heads share tiles of rows; those that have tiles of their own have nothing to gain. */
static void latents_are_shared_where_that_takes_less_time(void) {
    static cascade_batch b;
    static const struct {
        int32_t heads;
        cpa_dtype kv_dtype;
        int64_t sequences, shared, own, pieces, entries;
    } cases[] = {{16, CPA_BF16, 64, 16384, 1024, 128, 64},   {16, CPA_FP8_T128, 64, 16384, 1024, 128, 64},
                 {16, CPA_BF16, 24, 16384, 1024, 132, 24},   {32, CPA_BF16, 64, 16384, 1024, 128, 64},
                 {16, CPA_BF16, 2, 16384, 1024, 0, 0},       {16, CPA_BF16, 64, 256, 2048, 0, 0},
                 {64, CPA_BF16, 64, 16384, 1024, 0, 0},      {128, CPA_BF16, 64, 16384, 1024, 0, 0},
                 {128, CPA_FP8_E4M3, 64, 16384, 1024, 0, 0}, {1, CPA_BF16, 64, 16384, 1024, 32, 64}};
    cpa_cuda_cascade *cascade = calloc(1, sizeof *cascade);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        deal_latents(&b, cases[i].heads, cases[i].kv_dtype, cases[i].sequences, cases[i].shared, cases[i].own, 1);
        const cpa_cuda_cascade_cut cut = plan_cascade(cascade, &b);
        CU_ASSERT_EQUAL(cut.pieces, cases[i].pieces);
        CU_ASSERT_EQUAL(cut.rows, cases[i].entries);
    }
    cpa_cuda_cascade_destroy(cascade);
}

/* Every row meets each key of its sequence once: those of the listed pieces, then those that are left to its item. The
 * states of a row lie one behind the other. */
static void pieces_over_shared_keys_cover_them(void) {
    enum { MOST_PIECES = 256, MOST_ROWS = 8 * SEQUENCES };
    static cascade_batch b;
    static cpa_cuda_piece pieces[MOST_PIECES];
    static cpa_cuda_listed_row rows[MOST_ROWS];
    cpa_cuda_cascade *cascade = calloc(1, sizeof *cascade);
    int64_t wrong = 0;
    for (int64_t trial = 0; trial < 200; trial++) {
        const int64_t n = 2 + cpa_test_random_below(SEQUENCES - 1), shared = 128 * cpa_test_random_below(30),
                      count = 1 + cpa_test_random_below(4), own = count + cpa_test_random_below(600);
        deal_cascade(&b, n, shared, own, count);
        const int64_t nested = 128 * cpa_test_random_below(1 + own / 128) / CASCADE_BLOCK, stride = b.items[1].table;
        for (int64_t i = 1; i < n; i += 2) /* every other one goes on like the first of them */
            for (int64_t e = 0; e < nested; e++)
                b.tables[i * stride + shared / CASCADE_BLOCK + e] = b.tables[stride + shared / CASCADE_BLOCK + e];
        b.batch.cascade_attention = CPA_CASCADE_ALWAYS;
        const cpa_cuda_cascade_cut cut = plan_cascade(cascade, &b);
        if (cut.split_keys == 0) continue;
        CU_ASSERT_FATAL(cut.pieces <= MOST_PIECES && cut.rows <= MOST_ROWS);
        for (int64_t i = 0; i < n; i++) cascade->items[i].first_partial = (int32_t)(i * 10000);
        CU_ASSERT_EQUAL(cpa_cuda_cascade_write(cascade, &b.batch, TILE_ROWS, &cut, n - 1, pieces, rows, NULL), CPA_OK);
        int64_t keys[SEQUENCES] = {0}, states[SEQUENCES] = {0};
        for (int64_t p = 0; p < cut.pieces; p++) {
            const cpa_cuda_piece *piece = &pieces[p];
            wrong += piece->row_begin != 0 || piece->row_end > TILE_ROWS || piece->row_end % 4;
            for (int64_t t = 0; t < piece->row_end / 4; t++) {
                const cpa_cuda_listed_row *row = &rows[piece->q_row + t];
                const int64_t item = row->row / count, token = row->row % count;
                const int32_t block = b.tables[piece->table + piece->k_begin / CASCADE_BLOCK];
                const int64_t at = piece->k_first + piece->k_begin;
                wrong += row->partial != item * 10000 + token * 4 || row->stride != count * 4;
                wrong += row->ready != (item == n - 1) || row->position != shared + own - count + token;
                wrong += block != b.tables[item * stride + at / CASCADE_BLOCK];
                if (token > 0) continue;
                wrong += at != keys[item] || piece->partial != states[item]++;
                keys[item] += piece->k_end - piece->k_begin;
            }
        }
        for (int64_t i = 0; i < n; i++) {
            const cpa_attend_item *left = &cascade->own[i];
            wrong += left->k_first != keys[i] || left->k_count != b.items[i].k_count - keys[i] ||
                     left->table != b.items[i].table + keys[i] / CASCADE_BLOCK ||
                     cascade->items[i].states != states[i] || keys[i] < shared;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_cuda_cascade_destroy(cascade);
}

enum { OF_ITEM = 10000, OWN_PIECES = 2 }; /* rows of the work space; decode pieces of an item */

/* Where decode leaves state `state` of packed row `row` of an item, whose rows are in tiles as those of a team are. */
static int64_t state_at(const cascade_batch *b, const cpa_cuda_cascade *cascade, int64_t item, int64_t row,
                        int64_t state) {
    const int64_t group = b->batch.shape.q_heads, rows = b->batch.items[item].q_count * group;
    const int64_t tile = group > b->tile_rows ? row / b->tile_rows : 0, begin = tile * b->tile_rows;
    const int64_t of_tile = group > b->tile_rows ? cpa_min64(rows - begin, b->tile_rows) : rows;
    return item * OF_ITEM + begin * cascade->items[item].all_states + state * of_tile + row - begin;
}

/* The rows of a piece that are not where they belong, each of which meets `keys` of its item. */
static int64_t count_misplaced(const cascade_batch *b, const cpa_cuda_cascade *cascade, const cpa_cuda_piece *piece,
                               const cpa_cuda_listed_row *list, int64_t (*keys)[CPA_CUDA_MOST_DECODE_ROWS]) {
    const int64_t group = b->batch.shape.q_heads, tokens = b->batch.items[0].q_count;
    int64_t wrong = 0;
    for (int64_t row = piece->row_begin; row < piece->row_end; row++) {
        const cpa_cuda_listed_row *listed = &list[piece->q_row + row / group];
        const int64_t item = listed->row / tokens, of_item = listed->row % tokens * group + row % group;
        const int64_t at = listed->partial + (int64_t)piece->partial * listed->stride + row % group;
        wrong += at != state_at(b, cascade, item, of_item, piece->partial);
        keys[item][of_item] += piece->k_end - piece->k_begin;
    }
    return wrong;
}

/* Few heads, of which tiles hold several tokens; more; and so many that a token has several tiles, of 70 one of six
 * rows. */
static void pieces_over_shared_latents_cover_them(void) {
    enum { MOST_PIECES = 1024, MOST_ROWS = 4 * SEQUENCES };
    static const int32_t heads[] = {1, 3, 16, 40, 64, 70, 128};
    static cascade_batch b;
    static cpa_cuda_piece pieces[MOST_PIECES];
    static cpa_cuda_listed_row rows[MOST_ROWS];
    static int64_t keys[SEQUENCES][CPA_CUDA_MOST_DECODE_ROWS];
    cpa_cuda_cascade *cascade = calloc(1, sizeof *cascade);
    int64_t wrong = 0;
    for (int64_t trial = 0; trial < 210; trial++) {
        const int32_t group = heads[trial % 7];
        const int64_t n = 2 + cpa_test_random_below(SEQUENCES - 1), shared = 128 * (1 + cpa_test_random_below(30)),
                      count = 1 + cpa_test_random_below(cpa_max64(cpa_min64(64 / group, 4), 1)),
                      own = count + cpa_test_random_below(600);
        deal_latents(&b, group, CPA_BF16, n, shared, own, count);
        b.batch.cascade_attention = CPA_CASCADE_ALWAYS;
        const cpa_cuda_cascade_cut cut = plan_cascade(cascade, &b);
        CU_ASSERT_FATAL(cut.split_keys > 0 && cut.pieces <= MOST_PIECES && cut.rows <= MOST_ROWS);
        for (int64_t i = 0; i < n; i++) {
            cascade->items[i].first_partial = (int32_t)(i * OF_ITEM);
            cascade->items[i].all_states = cascade->items[i].states + OWN_PIECES;
        }
        memset(keys, 0, sizeof keys);
        CU_ASSERT_EQUAL(cpa_cuda_cascade_write(cascade, &b.batch, b.tile_rows, &cut, n, pieces, rows, NULL), CPA_OK);
        for (int64_t p = 0; p < cut.pieces; p++) {
            wrong += pieces[p].row_end - pieces[p].row_begin > b.tile_rows;
            wrong += count_misplaced(&b, cascade, &pieces[p], rows, keys);
            wrong += pieces[p].row_begin >= pieces[p].row_end;
        }
        for (int64_t i = 0; i < n; i++)
            for (int64_t row = 0; row < count * group; row++)
                wrong += keys[i][row] != b.batch.items[i].k_count - cascade->own[i].k_count || keys[i][row] < shared;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    cpa_cuda_cascade_destroy(cascade);
}

static const cpa_test tests[] = {
    {"keys are shared where that takes less time", keys_are_shared_where_that_takes_less_time},
    {"latents are shared where that takes less time", latents_are_shared_where_that_takes_less_time},
    {"pieces over shared keys cover them", pieces_over_shared_keys_cover_them},
    {"pieces over shared latents cover them", pieces_over_shared_latents_cover_them},
};

CPA_TEST_MAIN("cascade_plan", tests)
