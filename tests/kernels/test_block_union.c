/* block_union: the blocks that the rows of a set name, beside a plain loop over bits. */
#include <stdlib.h>
#include <string.h>

#include "kernels/operators.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/unit.h"

enum { ROWS = 1000, SETS = 5, Q_HEADS = 6, MOST_WORDS = 12, LINES = 16, MOST_BITS = LINES * Q_HEADS * MOST_WORDS };

static uint32_t bits[MOST_BITS];
static int64_t row_word[ROWS];
static int32_t sets[ROWS];

/* Few bits of each word, runs of rows with the same words, rows of no set, and of set 3 one that attends all. */
static void fill(int64_t words, int64_t head_stride, uint32_t seed) {
    for (int i = 0; i < MOST_BITS; i++) {
        seed = seed * 1664525u + 1013904223u;
        bits[i] = 1u << seed / (1u << 27) & ((seed & 3) ? 0 : ~0u);
    }
    for (int row = 0; row < ROWS; row++) {
        const int64_t line = row / 100 + (row % 250 == 7);
        row_word[row] = head_stride ? line * words : line * Q_HEADS * words;
        sets[row] = row / 100 % (SETS + 1) - 1;
        if (row == 415) row_word[row] = -1;
    }
}

static int selects(const cpa_key_blocks *of, int64_t row, int32_t head, int32_t block) {
    if (row_word[row] < 0) return 1;
    return bits[row_word[row] + head * of->head_stride + block / 32] >> block % 32 & 1;
}

/* How many words are wrong; bits behind the width count. */
static int64_t count_wrong(const cpa_block_union_args *a, const uint32_t *got) {
    const int64_t words = cpa_mask_words(a->blocks.width);
    int64_t wrong = 0;
    for (int64_t set = 0; set < a->sets; set++)
        for (int32_t head = 0; head < a->kv_heads; head++)
            for (int64_t w = 0; w < words; w++) {
                uint32_t expected = 0;
                for (int64_t row = 0; row < a->rows; row++)
                    for (int32_t q = 0; sets[row] == set && q < Q_HEADS; q++)
                        for (int32_t b = 0; q / (Q_HEADS / a->kv_heads) == head && b < 32; b++)
                            if (32 * w + b < a->blocks.width && selects(&a->blocks, row, q, (int32_t)(32 * w + b)))
                                expected |= 1u << b;
                wrong += got[(set * a->kv_heads + head) * words + w] != expected;
            }
    return wrong;
}

static void check(int32_t width, int32_t kv_heads, int64_t rows, int shares_heads) {
    const int64_t words = cpa_mask_words(width);
    const int64_t head_stride = shares_heads ? 0 : LINES * words;
    cpa_device *device;
    cpa_stream *stream;
    uint32_t got[SETS * Q_HEADS * MOST_WORDS];
    fill(words, head_stride, (uint32_t)width);
    memset(got, 0xa5, sizeof got);
    cpa_test_device_open(2, &device, &stream);
    const cpa_block_union_args args = {.blocks = {.bits = cpa_test_upload(stream, bits, sizeof bits),
                                                  .row_word = cpa_test_upload(stream, row_word, sizeof row_word),
                                                  .head_stride = head_stride,
                                                  .width = width,
                                                  .block = 128},
                                       .q_heads = Q_HEADS,
                                       .kv_heads = kv_heads,
                                       .rows = rows,
                                       .set = cpa_test_upload(stream, sets, sizeof sets),
                                       .sets = SETS,
                                       .out = cpa_test_upload(stream, got, sizeof got)};
    CU_ASSERT_EQUAL(device->operators->block_union(&args, stream), CPA_OK);
    cpa_test_download(stream, got, args.out, sizeof got);
    CU_ASSERT_EQUAL(count_wrong(&args, got), 0);
    const int64_t written = SETS * kv_heads * words;
    int64_t overrun = 0;
    for (int64_t i = written; i < SETS * Q_HEADS * MOST_WORDS; i++) overrun += got[i] != 0xa5a5a5a5u;
    CU_ASSERT_EQUAL(overrun, 0);
    cpa_test_free(stream, (void *)(uintptr_t)args.blocks.bits);
    cpa_test_free(stream, (void *)(uintptr_t)args.blocks.row_word);
    cpa_test_free(stream, (void *)(uintptr_t)args.set);
    cpa_test_free(stream, args.out);
    cpa_test_device_close(device, stream);
}

static void a_set_has_the_blocks_of_its_rows_and_heads(void) {
    check(370, 2, ROWS, 0);
    check(32, 3, ROWS, 0);
    check(5, 1, ROWS, 0);
    check(370, 6, 333, 1);
}

static void a_set_without_rows_is_empty(void) {
    check(64, 2, 0, 0);
    check(64, 2, 150, 0);
}

static const cpa_test tests[] = {
    {"a set has the blocks of its rows and heads", a_set_has_the_blocks_of_its_rows_and_heads},
    {"a set without rows is empty", a_set_without_rows_is_empty},
};
CPA_DEVICE_TEST_MAIN("block_union", tests)
