/* topk_merge: what shards have chosen becomes what is chosen of all entries, in whatever way they are dealt out. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/topk.h>

#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/topk_fixture.h"
#include "tests/fixtures/unit.h"

static cpa_device *device;
static cpa_stream *stream;

/* Rows of scores, dealt out over n shards: row r begins at shard r % n, or lies on that alone where r % 5 is 4. */
typedef struct deal {
    int32_t rows, width, n, interleave, k, forced_first, forced_last;
    int32_t *lengths; /* entries of each row */
    float *scores;    /* [rows, width] */
    float *listed;    /* [n, rows, 2, k]: scores of candidates, then their indices */
    int32_t *out, *counts;
} deal;

static void *allocate(int64_t n, size_t bytes) {
    void *memory = calloc((size_t)n + 1, bytes);
    if (!memory) abort();
    return memory;
}

static deal deal_of(deal of) {
    of.lengths = allocate(of.rows, sizeof *of.lengths);
    of.scores = allocate((int64_t)of.rows * of.width, sizeof *of.scores);
    of.listed = allocate((int64_t)of.n * of.rows * 2 * of.k, sizeof *of.listed);
    of.out = allocate((int64_t)of.rows * of.k, sizeof *of.out);
    of.counts = allocate(of.rows, sizeof *of.counts);
    for (int32_t row = 0; row < of.rows; row++) {
        of.lengths[row] = row == 3 ? 0 : row == 4 ? of.width : 1 + (of.width - 1) * row / of.rows;
        for (int32_t i = 0; i < of.width; i++)
            of.scores[row * of.width + i] =
                cpa_test_score((cpa_topk_kind)(row % CPA_TOPK_KINDS), (uint64_t)row, i, of.width);
    }
    return of;
}

static int is_owned(const deal *d, int32_t row, int32_t index, int32_t rank) {
    if (row % 5 == 4) return rank == row % d->n;
    return (index / d->interleave + row) % d->n == rank;
}

/* The entries of a row that lie on a rank, as columns. */
static int32_t gather(const deal *d, int32_t row, int32_t rank, float *columns) {
    int32_t count = 0;
    for (int32_t i = 0; i < d->lengths[row]; i++)
        if (is_owned(d, row, i, rank)) columns[count++] = d->scores[row * d->width + i];
    return count;
}

/* The candidates of a rank, as topk gives them, at d->listed on the device. */
static void choose(const deal *d, int32_t rank, float *listed) {
    const int64_t words = (int64_t)d->rows * d->width;
    float *columns = allocate(words, sizeof *columns);
    int32_t *end = allocate(d->rows, sizeof *end), *shards = allocate(d->rows, sizeof *shards);
    for (int32_t row = 0; row < d->rows; row++) {
        end[row] = gather(d, row, rank, columns + (int64_t)row * d->width);
        shards[row] = row % 5 == 4 ? -1 : ((rank - row) % d->n + d->n) % d->n;
    }
    void *const used[] = {cpa_test_upload(stream, columns, words * 4), cpa_test_upload(stream, end, d->rows * 4),
                          cpa_test_upload(stream, shards, d->rows * 4),
                          cpa_test_upload(stream, d->lengths, d->rows * 4)};
    float *own = listed + (int64_t)rank * d->rows * 2 * d->k;
    const cpa_topk_args args = {
        .size = sizeof args,
        .rows = d->rows,
        .width = d->width,
        .logits = used[0],
        .end = used[1],
        .k = d->k,
        .indices = (int32_t *)(void *)(own + d->k),
        .indices_stride = 2 * d->k,
        .scores = own,
        .scores_stride = 2 * d->k,
        .forced_first = d->forced_first,
        .forced_last = d->forced_last,
        .shards = used[2],
        .lengths = used[3],
        .map = {d->n, d->interleave},
    };
    CU_ASSERT_EQUAL(cpa_topk(&args, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    for (int i = 0; i < 4; i++) cpa_test_free(stream, used[i]);
    free(columns), free(end), free(shards);
}

static void run(deal *d) {
    const int64_t listed_bytes = (int64_t)d->n * d->rows * 2 * d->k * 4, out_bytes = (int64_t)d->rows * d->k * 4;
    cpa_test_device_open(2, &device, &stream);
    float *listed = cpa_test_upload(stream, d->listed, listed_bytes);
    int32_t *out = cpa_test_upload(stream, d->out, out_bytes),
            *counts = cpa_test_upload(stream, d->counts, d->rows * 4);
    int32_t *lengths = cpa_test_upload(stream, d->lengths, d->rows * 4);
    int32_t *backwards = allocate(d->rows, sizeof *backwards);
    for (int32_t row = 0; row < d->rows; row++) backwards[row] = d->rows - 1 - row;
    int32_t *out_rows = cpa_test_upload(stream, backwards, d->rows * 4);
    free(backwards);
    for (int32_t rank = 0; rank < d->n; rank++) choose(d, rank, listed);
    const cpa_topk_merge_args args = {
        .size = sizeof args,
        .rows = d->rows,
        .n = d->n,
        .width = d->k,
        .scores = listed,
        .indices = (const int32_t *)(const void *)(listed + d->k),
        .list_stride = (int64_t)d->rows * 2 * d->k,
        .row_stride = 2 * d->k,
        .k = d->k,
        .out = out,
        .counts = counts,
        .forced_first = d->forced_first,
        .forced_last = d->forced_last,
        .lengths = lengths,
        .out_rows = out_rows,
    };
    CU_ASSERT_EQUAL(cpa_topk_merge(&args, stream), CPA_OK);
    cpa_test_download(stream, d->out, out, out_bytes);
    cpa_test_download(stream, d->counts, counts, d->rows * 4);
    void *const used[] = {listed, out, counts, lengths, out_rows};
    for (int i = 0; i < 5; i++) cpa_test_free(stream, used[i]);
    cpa_test_device_close(device, stream);
}

static int count_wrong(const deal *d) {
    int32_t *wanted = allocate(d->k, sizeof *wanted);
    int wrong = 0;
    for (int32_t row = 0; row < d->rows; row++) {
        const int32_t count = cpa_test_topk(d->scores + (int64_t)row * d->width, 0, d->lengths[row], d->forced_first,
                                            d->lengths[row] - d->forced_last, d->k, wanted);
        const int64_t to = d->rows - 1 - row;
        const int right = d->counts[to] == count && !memcmp(wanted, d->out + to * d->k, (size_t)d->k * 4);
        if (!right) printf("  row %d, n %d, interleave %d, k %d\n", row, d->n, d->interleave, d->k);
        wrong += !right;
    }
    free(wanted);
    return wrong;
}

static void merge(deal of) {
    deal d = deal_of(of);
    run(&d);
    CU_ASSERT_EQUAL(count_wrong(&d), 0);
    free(d.lengths), free(d.scores), free(d.listed), free(d.out), free(d.counts);
}

static void shards_choose_as_one(void) {
    const int32_t ks[] = {1, 8, 100, 1024};
    for (int32_t n = 1; n <= 4; n++)
        for (int32_t interleave = 1; interleave <= 64; interleave = interleave < 4 ? interleave + 1 : interleave * 4)
            for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
                merge((deal){.rows = 24, .width = 1501, .n = n, .interleave = interleave, .k = ks[i]});
}

static void many_and_long_lists_merge(void) {
    merge((deal){.rows = 16, .width = 1200, .n = 64, .interleave = 16, .k = 70});
    merge((deal){.rows = 10, .width = 21000, .n = 3, .interleave = 64, .k = 4096});
}

static void forced_entries_stay(void) {
    merge((deal){.rows = 24, .width = 700, .n = 3, .interleave = 4, .k = 64, .forced_first = 5, .forced_last = 50});
    merge((deal){.rows = 24, .width = 700, .n = 4, .interleave = 1, .k = 8, .forced_first = 8});
    merge((deal){.rows = 24, .width = 700, .n = 2, .interleave = 64, .k = 300, .forced_last = 300});
}

static const cpa_test tests[] = {
    {"shards choose as one", shards_choose_as_one},
    {"many and long lists merge", many_and_long_lists_merge},
    {"forced entries stay", forced_entries_stay},
};
CPA_DEVICE_TEST_MAIN("topk_merge", tests)
