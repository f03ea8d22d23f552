/* Attention of micro-blocks of tokens, as models with grouped heads select them (Qwen3.8-Flash-Next): an indexer of
 * 4 heads over keys in bf16, without weights; the score of a micro-block is the largest of its tokens' scores; the
 * best of them, and always the last, which the row lies in, are attended by all heads. The operators one behind the
 * other, beside float64 over whole sequences: what is chosen is the same, and rows are right. Scores of the indexer
 * are small integers, so that many are equal. Memory without a key is NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/cpattn.h>

#include "base/convert.h"
#include "base/hash.h"
#include "src/check/cases/judge.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/topk_fixture.h"
#include "tests/fixtures/unit.h"

enum { Q_HEADS = 24, KV_HEADS = 2, WIDTH = 256, INDEX_HEADS = 4, INDEX_DIM = 128, SEQUENCES = 3, MOST_K = 64 };
/* Tokens, of which the last ones are rows: decode, rows with drafts, and a chunk. */
static const int64_t LENGTHS[SEQUENCES] = {701, 333, 90}, ROWS[SEQUENCES] = {1, 3, 40};
enum { ALL_ROWS = 44 };

static cpa_device *device;
static cpa_stream *stream;

/* How keys are chosen: k micro-blocks of so many tokens, over blocks of so many in both caches. */
typedef struct way {
    int32_t unit, k, block_size;
} way;

typedef struct problem {
    way w;
    cpa_case_sequence sequences[SEQUENCES];
    int32_t *tables[SEQUENCES], *all_tables; /* of each, and one behind the other */
    int64_t first_entry[SEQUENCES], n_entries, num_blocks;
    cpa_kv_view index, kv; /* on the device */
    void *index_q, *q, *logits, *lists, *counts, *out;
    int64_t columns;
} problem;

/* ---- the indexer's numbers ---- */

static int number(int what, int64_t sequence, int64_t t, int i) {
    const uint64_t seed = (uint64_t)(what * 7919 + sequence * 104729 + t * 131);
    const int x = (int)(cpa_mix64(seed * CPA_GOLDEN + (uint64_t)i) >> 40);
    return t % 41 == 7 ? x % 5 - 2 : x % 4 ? 0 : x % 3 - 1;
}

static float score_of(int64_t sequence, int64_t row, int64_t key) {
    int sum = 0;
    for (int h = 0; h < INDEX_HEADS; h++) {
        int product = 0;
        for (int d = 0; d < INDEX_DIM; d++)
            product += number(1, sequence, row, h * INDEX_DIM + d) * number(0, sequence, key, d);
        sum += product > 0 ? product : 0;
    }
    return (float)sum;
}

/* The list of the row at a position. */
static int32_t expect_list(const problem *p, int64_t sequence, int64_t position, int32_t *list) {
    static float scores[1024];
    const int32_t unit = p->w.unit, n = (int32_t)(position / unit + 1);
    for (int32_t e = 0; e < n; e++) {
        scores[e] = -INFINITY;
        for (int64_t key = e * (int64_t)unit; key < (e + 1) * (int64_t)unit && key <= position; key++)
            scores[e] = fmaxf(scores[e], score_of(sequence, position, key));
    }
    return cpa_test_topk(scores, 0, n, 0, n - 1, p->w.k, list);
}

/* ---- what the device is given ---- */

static void make_tables(problem *p) {
    p->all_tables = malloc(sizeof *p->all_tables * 4096);
    for (int s = 0; s < SEQUENCES; s++) {
        const int64_t blocks = (LENGTHS[s] + p->w.block_size - 1) / p->w.block_size;
        p->tables[s] = cpa_test_block_table(LENGTHS[s], p->w.block_size, p->num_blocks + 1, 2);
        memcpy(p->all_tables + p->n_entries, p->tables[s], (size_t)(blocks + 2) * sizeof(int32_t));
        p->first_entry[s] = p->n_entries;
        p->n_entries += blocks + 2;
        p->num_blocks += blocks + 1;
    }
    p->num_blocks++;
}

static void send_index_keys(problem *p) {
    const int64_t elements = p->num_blocks * p->w.block_size * INDEX_DIM;
    uint16_t *keys = cpa_test_poisoned(elements, sizeof *keys);
    for (int s = 0; s < SEQUENCES; s++)
        for (int64_t t = 0; t < LENGTHS[s]; t++) {
            const int64_t slot = (int64_t)p->tables[s][t / p->w.block_size] * p->w.block_size + t % p->w.block_size;
            for (int d = 0; d < INDEX_DIM; d++) keys[slot * INDEX_DIM + d] = cpa_to_bf16((float)number(0, s, t, d));
        }
    p->index = (cpa_kv_view){.k = cpa_test_upload(stream, keys, elements * 2),
                             .dtype = CPA_BF16,
                             .block_size = p->w.block_size,
                             .num_blocks = p->num_blocks,
                             .kv_heads = 1,
                             .k_dim = INDEX_DIM,
                             .v_dim = INDEX_DIM,
                             .v_in_k = 1};
    free(keys);
}

static void send_keys(problem *p) {
    cpa_kv_fixture fixture;
    cpa_error err;
    cpa_kv_fixture_init(&fixture, CPA_BF16, p->num_blocks, p->w.block_size, KV_HEADS, WIDTH, WIDTH, 0);
    for (int s = 0; s < SEQUENCES; s++) {
        p->sequences[s] = (cpa_case_sequence){
            .length = LENGTHS[s], .q_heads = Q_HEADS, .kv_heads = KV_HEADS, .k_dim = WIDTH, .v_dim = WIDTH};
        CU_ASSERT_EQUAL_FATAL(cpa_case_sequence_make(&p->sequences[s], 31 + (uint64_t)s, 0, CPA_BF16, &err), CPA_OK);
        cpa_test_store_shard(&fixture, &p->sequences[s], (cpa_owner_map){1, 1}, (cpa_token_set){CPA_TOKENS_ALL, 0},
                             LENGTHS[s], p->tables[s]);
    }
    p->kv = cpa_kv_fixture_upload(&fixture, stream);
    cpa_kv_fixture_destroy(&fixture);
}

static void send_queries(problem *p) {
    enum { Q = Q_HEADS * WIDTH, INDEX_Q = INDEX_HEADS * INDEX_DIM };
    uint16_t *q = malloc(ALL_ROWS * Q * 2), *index_q = malloc(ALL_ROWS * INDEX_Q * 2);
    int64_t row = 0;
    for (int s = 0; s < SEQUENCES; s++)
        for (int64_t i = 0; i < ROWS[s]; i++, row++) {
            const int64_t t = LENGTHS[s] - ROWS[s] + i;
            cpa_narrow(q + row * Q, p->sequences[s].q + t * Q, CPA_BF16, Q);
            for (int d = 0; d < INDEX_Q; d++) index_q[row * INDEX_Q + d] = cpa_to_bf16((float)number(1, s, t, d));
        }
    p->q = cpa_test_upload(stream, q, ALL_ROWS * Q * 2);
    p->index_q = cpa_test_upload(stream, index_q, ALL_ROWS * INDEX_Q * 2);
    free(index_q);
    free(q);
}

static void *room(int64_t bytes) {
    char *poison = cpa_test_poisoned((bytes + 3) / 4, 4);
    void *memory = cpa_test_upload(stream, poison, bytes);
    free(poison);
    return memory;
}

static void open_problem(problem *p, way w) {
    *p = (problem){.w = w, .columns = (LENGTHS[0] + w.unit - 1) / w.unit};
    make_tables(p);
    send_index_keys(p);
    send_keys(p);
    send_queries(p);
    p->logits = room(ALL_ROWS * p->columns * 4);
    p->lists = room(ALL_ROWS * w.k * 4);
    p->counts = room(ALL_ROWS * 4);
    p->out = room(ALL_ROWS * Q_HEADS * WIDTH * 2);
}

static void close_problem(problem *p) {
    void *const memory[] = {p->index.k, p->index_q, p->q, p->logits, p->lists, p->counts, p->out};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cpa_test_free(stream, memory[i]);
    cpa_kv_view_free(&p->kv, stream);
    for (int s = 0; s < SEQUENCES; s++) {
        cpa_case_sequence_release(&p->sequences[s]);
        free(p->tables[s]);
    }
    free(p->all_tables);
}

/* ---- the operators ---- */

static cpa_attend_batch batch_of(const problem *p, cpa_attend_item items[SEQUENCES]) {
    int64_t row = 0;
    for (int s = 0; s < SEQUENCES; row += ROWS[s++])
        items[s] = (cpa_attend_item){.q_row = row,
                                     .q_count = ROWS[s],
                                     .q_first = LENGTHS[s] - ROWS[s],
                                     .k_count = LENGTHS[s],
                                     .table = p->first_entry[s]};
    return (cpa_attend_batch){.size = sizeof(cpa_attend_batch),
                              .map = {1, 1},
                              .shape = {.q_heads = Q_HEADS,
                                        .kv_heads = KV_HEADS,
                                        .k_dim = WIDTH,
                                        .v_dim = WIDTH,
                                        .dtype = CPA_BF16,
                                        .kv_dtype = CPA_BF16},
                              .block_size = p->w.block_size,
                              .items = items,
                              .n_items = SEQUENCES,
                              .block_tables = p->all_tables,
                              .n_table_entries = p->n_entries};
}

static void choose(const problem *p, const cpa_attend_batch *batch) {
    int32_t ends[ALL_ROWS];
    cpa_index_plan *plan;
    cpa_error err;
    int64_t row = 0;
    for (int s = 0; s < SEQUENCES; s++)
        for (int64_t i = 0; i < ROWS[s]; i++) ends[row++] = (int32_t)((LENGTHS[s] - ROWS[s] + i) / p->w.unit + 1);
    void *const device_ends = cpa_test_upload(stream, ends, sizeof ends);
    const cpa_index_logits_args logits = {.size = sizeof logits,
                                          .heads = INDEX_HEADS,
                                          .q = p->index_q,
                                          .cache = {.kv = p->index},
                                          .logits = p->logits,
                                          .width = p->columns,
                                          .unit = p->w.unit};
    const cpa_topk_args topk = {.size = sizeof topk,
                                .rows = ALL_ROWS,
                                .width = p->columns,
                                .logits = p->logits,
                                .end = device_ends,
                                .k = p->w.k,
                                .indices = p->lists,
                                .counts = p->counts,
                                .forced_last = 1};
    CU_ASSERT_EQUAL_FATAL(cpa_index_plan_create(device, &plan, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_plan_set(plan, batch, 1, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_index_logits(plan, &logits, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_topk(&topk, stream), CPA_OK);
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_index_plan_destroy(plan);
    cpa_test_free(stream, device_ends);
}

static void attend(const problem *p, const cpa_attend_batch *batch) {
    cpa_attend_plan *plan;
    cpa_error err;
    const cpa_key_indices lists = {
        .indices = p->lists, .counts = p->counts, .row_stride = p->w.k, .width = p->w.k, .unit = p->w.unit};
    const cpa_key_selection selection = {.indices = &lists};
    const cpa_attend_args args = {.size = sizeof args,
                                  .q = p->q,
                                  .q_dtype = CPA_BF16,
                                  .kv = p->kv,
                                  .mask = {.causal = 1},
                                  .out = p->out,
                                  .selection = &selection};
    CU_ASSERT_EQUAL_FATAL(cpa_attend_plan_create(device, &plan, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_attend_plan_set(plan, batch, &err), CPA_OK);
    if (cpa_attend(plan, &args, stream) != CPA_OK) CU_FAIL(cpa_stream_error(stream));
    CU_ASSERT_EQUAL(cpa_stream_sync(stream), CPA_OK);
    cpa_attend_plan_destroy(plan);
}

/* ---- what is right ---- */

typedef struct chosen {
    const int32_t *list;
    int32_t count, unit;
} chosen;

static int is_chosen(const void *ctx, int64_t key) {
    const chosen *of = ctx;
    for (int32_t i = 0; i < of->count; i++)
        if (of->list[i] == key / of->unit) return 1;
    return 0;
}

/* Wrong heads of a row. */
static int64_t wrong_heads(const problem *p, int64_t sequence, int64_t position, const chosen *of,
                           const uint16_t *out) {
    int64_t wrong = 0;
    for (int32_t head = 0; head < Q_HEADS; head++) {
        cpa_case_row row = cpa_case_row_of(&p->sequences[sequence], position, head, CPA_BF16);
        cpa_case_expected expected;
        row.mask = (cpa_mask){.causal = 1};
        row.given = is_chosen;
        row.given_ctx = of;
        cpa_case_expect(&row, &expected);
        const cpa_case_result result = {.out = out + head * WIDTH, .out_dtype = CPA_BF16};
        wrong += !cpa_case_is_right(&expected, &result, NULL);
    }
    return wrong;
}

static void check(const problem *p) {
    int32_t *lists = malloc((size_t)(ALL_ROWS * p->w.k) * 4), counts[ALL_ROWS], want[MOST_K];
    uint16_t *out = malloc(ALL_ROWS * Q_HEADS * WIDTH * 2);
    int64_t row = 0, wrong_lists = 0, wrong = 0;
    cpa_test_download(stream, lists, p->lists, ALL_ROWS * p->w.k * 4);
    cpa_test_download(stream, counts, p->counts, ALL_ROWS * 4);
    cpa_test_download(stream, out, p->out, ALL_ROWS * Q_HEADS * WIDTH * 2);
    for (int s = 0; s < SEQUENCES; s++)
        for (int64_t i = 0; i < ROWS[s]; i++, row++) {
            const int64_t position = LENGTHS[s] - ROWS[s] + i;
            const chosen of = {want, expect_list(p, s, position, want), p->w.unit};
            wrong_lists += counts[row] != of.count || memcmp(lists + row * p->w.k, want, (size_t)of.count * 4) != 0;
            CU_ASSERT_EQUAL(want[of.count - 1], position / p->w.unit);
            wrong += wrong_heads(p, s, position, &of, out + row * Q_HEADS * WIDTH);
        }
    CU_ASSERT_EQUAL(wrong_lists, 0);
    CU_ASSERT_EQUAL(wrong, 0);
    free(out);
    free(lists);
}

static void run(way w) {
    problem p;
    cpa_attend_item items[SEQUENCES];
    open_problem(&p, w);
    const cpa_attend_batch batch = batch_of(&p, items);
    choose(&p, &batch);
    attend(&p, &batch);
    check(&p);
    close_problem(&p);
}

static void the_best_micro_blocks_and_the_own_one_are_attended(void) {
    static const way ways[] = {{4, 32, 16}, {4, 64, 64}, {8, 5, 16}, {1, 64, 16}, {16, 1, 16}, {2, 17, 32}};
    cpa_test_device_open(2, &device, &stream);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) run(ways[i]);
    cpa_test_device_close(device, stream);
}

static const cpa_test tests[] = {
    {"the best micro-blocks and the own one are attended", the_best_micro_blocks_and_the_own_one_are_attended},
};
CPA_DEVICE_TEST_MAIN("micro-blocks", tests)
