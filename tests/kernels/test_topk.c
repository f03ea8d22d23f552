/* topk: the entries that are chosen of rows of scores, beside a sort. Columns that do not count are +infinity, which
 * would be chosen, and entries of tables that are not used are huge. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/topk.h>

#include "base/hash.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/topk_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

enum { POISON = 2147480000, PAD = 5 };

/* Rows in host memory and what was chosen of them, PAD elements behind each row of indices and scores. */
typedef struct batch {
    cpa_topk_args args; /* pointers are those of the host */
    float *logits, *scores;
    int32_t *indices, *counts;
    int32_t *first, *end, *until, *from; /* forced are [first, until) and [from, end) */
    int64_t table_entries;
} batch;

static void *allocate(int64_t n, size_t bytes) {
    void *memory = calloc((size_t)n + 1, bytes);
    if (!memory) abort();
    return memory;
}

static float *row_of(const batch *b, int64_t row) {
    return b->logits + row * b->args.logits_stride;
}

/* Row r is of kind r modulo their number, and counts from column r % 7 to r % 5 before its end. */
static batch batch_of(int64_t rows, int64_t width, int64_t stride, int32_t k) {
    batch b = {.args = {.size = sizeof b.args, .rows = rows, .width = width, .logits_stride = stride, .k = k}};
    b.logits = allocate(rows * stride, sizeof *b.logits);
    b.args.indices_stride = b.args.scores_stride = k + PAD;
    b.indices = allocate(rows * (k + PAD), sizeof *b.indices);
    b.scores = allocate(rows * (k + PAD), sizeof *b.scores);
    b.counts = allocate(rows, sizeof *b.counts);
    int32_t **const bounds[] = {&b.first, &b.end, &b.until, &b.from};
    for (int i = 0; i < 4; i++) *bounds[i] = allocate(rows, sizeof **bounds[i]);
    memset(b.indices, 0x77, (size_t)(rows * (k + PAD)) * sizeof *b.indices);
    memset(b.scores, 0x77, (size_t)(rows * (k + PAD)) * sizeof *b.scores);
    for (int64_t i = 0; i < rows * stride; i++) b.logits[i] = INFINITY;
    for (int64_t row = 0; row < rows; row++) {
        b.first[row] = b.until[row] = (int32_t)(row % 7 < width ? row % 7 : 0);
        b.end[row] = (int32_t)(width - row % 5 > b.first[row] ? width - row % 5 : b.first[row]);
        b.from[row] = b.end[row];
        for (int64_t i = b.first[row]; i < b.end[row]; i++)
            row_of(&b, row)[i] = cpa_test_score((cpa_topk_kind)(row % CPA_TOPK_KINDS), (uint64_t)row, i, width);
    }
    return b;
}

static void batch_free(batch *b) {
    void *const all[] = {b->logits, b->scores, b->indices, b->counts, b->first, b->end, b->until, b->from};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void run(batch *b) {
    cpa_topk_args args = b->args;
    const int64_t rows = args.rows, listed = rows * args.indices_stride * 4;
    cpa_test_device_open(2, &device, &stream);
    void *const used[] = {
        cpa_test_upload(stream, b->logits, rows * args.logits_stride * 4),
        cpa_test_upload(stream, b->first, rows * 4),
        cpa_test_upload(stream, b->end, rows * 4),
        cpa_test_upload(stream, b->indices, listed),
        cpa_test_upload(stream, b->scores, listed),
        cpa_test_upload(stream, b->counts, rows * 4),
        args.tables ? cpa_test_upload(stream, args.tables, b->table_entries * 4) : NULL,
        args.table_rows ? cpa_test_upload(stream, args.table_rows, rows * 4) : NULL,
        args.shards ? cpa_test_upload(stream, args.shards, rows * 4) : NULL,
        args.lengths ? cpa_test_upload(stream, args.lengths, rows * 4) : NULL,
        args.out_rows ? cpa_test_upload(stream, args.out_rows, rows * 4) : NULL,
        args.tails ? cpa_test_upload(stream, args.tails, rows * 4) : NULL,
    };
    args.logits = used[0], args.first = used[1], args.end = used[2];
    args.indices = used[3], args.scores = args.tails ? NULL : used[4], args.counts = used[5];
    args.tables = used[6], args.table_rows = used[7], args.shards = used[8], args.lengths = used[9];
    args.out_rows = used[10], args.tails = used[11];
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_OK);
    cpa_test_download(stream, b->indices, args.indices, listed);
    cpa_test_download(stream, b->scores, used[4], listed);
    cpa_test_download(stream, b->counts, args.counts, rows * 4);
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if (used[i]) cpa_test_free(stream, used[i]);
    cpa_test_device_close(device, stream);
}

/* What `indices` is to have for a column of a row. */
static int32_t index_of(const batch *b, int64_t row, int32_t column) {
    const cpa_topk_args *a = &b->args;
    if (column < 0) return -1;
    if (a->shards && a->shards[row] >= 0) {
        int32_t t = -1; /* by counting the tokens of the shard */
        for (int32_t seen = -1; seen < column;) seen += ++t / a->map.interleave % a->map.cp_size == a->shards[row];
        return t;
    }
    if (!a->tables) return column;
    const int64_t table = a->table_rows ? a->table_rows[row] : row;
    return a->tables[table * a->table_stride + column / a->block_size] * a->block_size + column % a->block_size;
}

static int is_right(const batch *b, int64_t row, int32_t *wanted) {
    const cpa_topk_args *a = &b->args;
    const int32_t count =
        cpa_test_topk(row_of(b, row), b->first[row], b->end[row], b->until[row], b->from[row], a->k, wanted);
    const int32_t *got = b->indices + row * a->indices_stride;
    const float *scores = b->scores + row * a->scores_stride;
    int right = b->counts[row] == count;
    for (int32_t i = 0; i < a->k; i++) {
        const float score = wanted[i] < 0 ? -INFINITY : row_of(b, row)[wanted[i]];
        right &= got[i] == index_of(b, row, wanted[i]) && scores[i] == (isnan(score) ? -INFINITY : score);
    }
    for (int32_t i = a->k; i < a->k + PAD; i++) right &= got[i] == 0x77777777;
    return right;
}

static int count_wrong(const batch *b) {
    int32_t *wanted = allocate(b->args.k, sizeof *wanted);
    int wrong = 0;
    for (int64_t row = 0; row < b->args.rows; row++) {
        const int right = is_right(b, row, wanted);
        if (!right) printf("  row %d of width %d, k %d\n", (int)row, (int)b->args.width, b->args.k);
        wrong += !right;
    }
    free(wanted);
    return wrong;
}

static void run_and_compare(batch *b) {
    run(b);
    CU_ASSERT_EQUAL(count_wrong(b), 0);
    batch_free(b);
}

static void rows_are_as_sorted(void) {
    const int32_t ks[] = {1, 2, 7, 8, 31, 63, 64, 512, 513, 1024, 2000, 2048, 4095, 4096};
    const int64_t widths[] = {1, 6, 33, 700, 4096, 4103, 20011};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
            batch b = batch_of(i % 2 ? 24 : 9, widths[w], widths[w] + (int64_t)(i % 3), ks[i]);
            run_and_compare(&b);
        }
}

/* One row, and more than a device has multiprocessors; strides of many rows' length. */
static void long_and_many_rows_are_as_sorted(void) {
    for (int kind = 0; kind < CPA_TOPK_KINDS; kind++) {
        batch b = batch_of(1, 131072 + 3, 131072 + 4, 2048);
        for (int64_t i = 0; i < b.args.width; i++)
            b.logits[i] = cpa_test_score((cpa_topk_kind)kind, 99, i, b.args.width);
        run_and_compare(&b);
    }
    batch many = batch_of(700, 3000, 3000, 257), far = batch_of(8, 9000, 1 << 20, 2048);
    run_and_compare(&many);
    run_and_compare(&far);
}

/* As many rows as give teams of several sizes, too long to be listed as a whole, with bounds that are no multiples of
 * vectors, and forced entries. */
static void teams_of_any_size_agree_with_a_sort(void) {
    const int64_t rows[] = {9, 27, 45, 90, 279};
    const int32_t ks[] = {1, 300, 2048, 4096};
    const size_t sizes = cpa_test_promises_bits() ? 2 : sizeof rows / sizeof *rows; /* the host has no teams */
    for (size_t r = 0; r < sizes; r++)
        for (size_t i = 0; i < sizeof ks / sizeof *ks; i++) {
            batch b = batch_of(rows[r], r % 2 ? 8800 : 17001, r % 2 ? 8800 : 17001, ks[i]);
            b.args.forced_last = 1;
            for (int64_t row = 0; row < b.args.rows; row++) b.from[row] = b.end[row] - 1;
            run_and_compare(&b);
        }
}

/* Scores with a period, and large ones side by side. */
static void rows_of_a_pattern_are_as_sorted(void) {
    enum { WIDTH = 70000, ROWS = 24 };
    for (int32_t k = 64; k <= 4096; k *= 8) {
        batch b = batch_of(ROWS, WIDTH, WIDTH, k);
        for (int64_t row = 0; row < ROWS; row++) {
            const int64_t period = (int64_t)1 << row % 12;
            for (int64_t i = b.first[row]; i < b.end[row]; i++) {
                const float x = cpa_test_score(CPA_TOPK_PEAKS, (uint64_t)row, i, WIDTH) / 64;
                row_of(&b, row)[i] = x + (float)(row < 12 ? i % period == 0 : i / period % 16 == 3);
            }
        }
        run_and_compare(&b);
    }
}

/* The cut lies within equal scores that differ from their neighbours in one bit, whichever it is. */
static void ties_at_any_bit_are_cut_by_index(void) {
    enum { WIDTH = 9001 };
    batch b = batch_of(62, WIDTH, WIDTH, 3100);
    for (int64_t row = 0; row < 62; row++) {
        const uint32_t sign = row < 31 ? 0 : 0x80000000u, bit = 1u << row % 31, base = 0x00a5a5a5u & ~bit;
        for (int64_t i = b.first[row]; i < b.end[row]; i++) {
            const uint32_t bits = sign | base | (cpa_mix64((uint64_t)(row * WIDTH + i)) % 2 ? bit : 0);
            memcpy(&row_of(&b, row)[i], &bits, sizeof bits);
        }
        for (int64_t i = 0; i < 50; i++) row_of(&b, row)[b.first[row] + 170 * i] = -1e38f;
    }
    run_and_compare(&b);
}

/* Forced entries count within k, whatever their scores are. */
static void forced_entries_are_chosen(void) {
    const int32_t forced[][2] = {{1, 0}, {0, 1}, {4, 128}, {300, 300}, {600, 0}, {0, 600}};
    const int64_t widths[] = {5, 250, 450, 5003};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)
        for (size_t f = 0; f < sizeof forced / sizeof *forced; f++) {
            batch b = batch_of(16, widths[w], widths[w], 600);
            b.args.forced_first = forced[f][0], b.args.forced_last = forced[f][1];
            for (int64_t row = 0; row < b.args.rows; row++) {
                b.until[row] = b.first[row] + forced[f][0];
                b.from[row] = b.end[row] - forced[f][1];
            }
            run_and_compare(&b);
        }
}

/* Several rows of a table, with entries that no column needs poisoned. */
static void slots_are_those_of_the_table(void) {
    enum { ROWS = 16, WIDTH = 2111, BLOCK = 16, STRIDE = 140, TABLES = 3 };
    int32_t tables[TABLES * STRIDE], table_rows[ROWS];
    for (int32_t i = 0; i < TABLES * STRIDE; i++)
        tables[i] = i % STRIDE * BLOCK < WIDTH ? (i * 37 + 11) % 5000 : POISON;
    for (int row = 0; row < ROWS; row++) table_rows[row] = row * 5 % TABLES;
    for (int shared = 0; shared < 2; shared++) {
        batch b = batch_of(ROWS, WIDTH, WIDTH, 300);
        b.args.tables = tables;
        b.args.table_rows = shared ? NULL : table_rows;
        b.args.table_stride = shared ? 0 : STRIDE;
        b.args.block_size = BLOCK;
        b.table_entries = TABLES * STRIDE;
        run_and_compare(&b);
    }
}

/* Columns are the entries of a shard; forced are the first and the last of the sequence that it has. */
static void shards_give_indices_of_the_sequence(void) {
    enum { ROWS = 24, WIDTH = 611, K = 100 };
    int32_t shards[ROWS], lengths[ROWS];
    for (int32_t n = 1; n <= 4; n++)
        for (int32_t interleave = 1; interleave <= 64; interleave = interleave < 4 ? interleave + 1 : interleave * 4) {
            batch b = batch_of(ROWS, WIDTH, WIDTH, K);
            b.args.map = (cpa_owner_map){n, interleave};
            b.args.shards = shards, b.args.lengths = lengths;
            b.args.forced_first = 9, b.args.forced_last = 70;
            for (int32_t row = 0; row < ROWS; row++) {
                shards[row] = row % (n + 1) - 1;
                b.first[row] = b.until[row] = 0;
                for (int32_t i = 0; i < 7; i++) row_of(&b, row)[i] = -8;
                lengths[row] = row % 11 == 0 ? 5 : index_of(&b, row, b.end[row] - 1) + 1 + row % 3;
                if (row % 11 == 0) b.end[row] = b.from[row] = 0;
                for (int32_t i = 0; i < b.end[row]; i++) {
                    const int32_t index = index_of(&b, row, i);
                    b.until[row] += index < b.args.forced_first && b.until[row] == i;
                    b.from[row] -= index >= lengths[row] - b.args.forced_last;
                }
            }
            run_and_compare(&b);
        }
}

/* Results go where they are to go, and those of a row without a place nowhere. */
static void results_go_to_their_rows(void) {
    enum { ROWS = 9, K = 40 };
    batch b = batch_of(ROWS, 300, 300, K);
    const int32_t out_rows[ROWS] = {4, 3, -1, 8, 0, 7, 6, -5, 1};
    int32_t wanted[K], written = 0;
    b.args.out_rows = out_rows;
    run(&b);
    for (int row = 0; row < ROWS; row++) {
        if (out_rows[row] < 0) continue;
        const int32_t count =
            cpa_test_topk(row_of(&b, row), b.first[row], b.end[row], b.until[row], b.from[row], K, wanted);
        CU_ASSERT(b.counts[out_rows[row]] == count &&
                  !memcmp(b.indices + out_rows[row] * b.args.indices_stride, wanted, sizeof wanted));
    }
    for (int row = 0; row < ROWS; row++) written += b.indices[row * b.args.indices_stride] != 0x77777777;
    CU_ASSERT_EQUAL(written, ROWS - 2);
    batch_free(&b);
}

/* Rows of 0 to k chosen entries, by one CTA and by several, that have an entry behind those, or none. */
static void tails_come_behind_what_is_chosen(void) {
    enum { ROWS = 20, K = 100 };
    const int64_t widths[] = {60, 300, 20000};
    for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
        batch b = batch_of(ROWS, widths[w], widths[w], K);
        int32_t tails[ROWS], wanted[K + 1 + PAD];
        int64_t wrong = 0;
        for (int row = 0; row < ROWS; row++) tails[row] = row % 3 == 1 ? -1 - row : 1000000 + row;
        b.end[6] = b.first[6];
        b.args.tails = tails;
        run(&b);
        for (int64_t row = 0; row < ROWS; row++) {
            int32_t count =
                cpa_test_topk(row_of(&b, row), b.first[row], b.end[row], b.until[row], b.from[row], K, wanted);
            wanted[K] = -1;
            for (int i = 0; i + 1 < PAD; i++) wanted[K + 1 + i] = 0x77777777;
            if (tails[row] >= 0) wanted[count++] = tails[row];
            wrong += b.counts[row] != count ||
                     memcmp(wanted, b.indices + row * b.args.indices_stride, (K + PAD) * sizeof *wanted) != 0;
        }
        CU_ASSERT_EQUAL(wrong, 0);
        batch_free(&b);
    }
}

static void tails_go_without_scores_and_slots(void) {
    const cpa_topk_args both = {.size = sizeof both, .rows = 1, .width = 1, .k = 1};
    cpa_topk_args args = both;
    float score;
    int32_t one = 0;
    cpa_test_device_open(1, &device, &stream);
    args.logits = &score, args.indices = args.counts = &one, args.tails = &one;
    args.scores = &score;
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), "topk: tails and scores are both set, expected one of them");
    args.scores = NULL, args.tables = &one, args.block_size = 1;
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_STRING_EQUAL(cpa_stream_error(stream), "topk: tails and tables are both set, expected one of them");
    args.tables = NULL, args.indices_stride = 1, args.rows = 2;
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_stream_error(stream), "indices_stride is 1"));
    cpa_test_device_close(device, stream);
}

/* Bounds that are no columns are cut to those that there are. */
static void bounds_are_cut_to_the_row(void) {
    batch b = batch_of(4, 50, 50, 60);
    const int32_t first[] = {-7, 60, 20, INT32_MIN}, end[] = {INT32_MAX, 70, 10, -1};
    run(&b);
    memcpy(b.first, first, sizeof first);
    memcpy(b.end, end, sizeof end);
    for (int64_t i = 0; i < 4 * 50; i++) b.logits[i] = 1;
    run(&b);
    CU_ASSERT_EQUAL(b.counts[0], 50);
    for (int row = 1; row < 4; row++) {
        CU_ASSERT_EQUAL(b.counts[row], 0);
        CU_ASSERT_EQUAL(b.indices[row * b.args.indices_stride], -1);
    }
    batch_free(&b);
}

static const cpa_test tests[] = {
    {"rows are as sorted", rows_are_as_sorted},
    {"long and many rows are as sorted", long_and_many_rows_are_as_sorted},
    {"teams of any size agree with a sort", teams_of_any_size_agree_with_a_sort},
    {"rows of a pattern are as sorted", rows_of_a_pattern_are_as_sorted},
    {"ties at any bit are cut by index", ties_at_any_bit_are_cut_by_index},
    {"forced entries are chosen", forced_entries_are_chosen},
    {"tails come behind what is chosen", tails_come_behind_what_is_chosen},
    {"tails go without scores and slots", tails_go_without_scores_and_slots},
    {"slots are those of the table", slots_are_those_of_the_table},
    {"shards give indices of the sequence", shards_give_indices_of_the_sequence},
    {"results go to their rows", results_go_to_their_rows},
    {"bounds are cut to the row", bounds_are_cut_to_the_row},
};
CPA_DEVICE_TEST_MAIN("topk", tests)
