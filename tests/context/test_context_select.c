/* The keys that an indexer chooses over the ranks, beside a sort of the scores of whole sequences. Queries, keys and
 * weights are small integers, so that scores are exact on every back end and many are equal; memory without a key is
 * NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cpattn/context.h>

#include "base/check.h"
#include "base/convert.h"
#include "base/hash.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "tests/fixtures/kv_fixture.h"
#include "tests/fixtures/mpi_unit.h"
#include "tests/fixtures/topk_fixture.h"

enum { HEADS = 3, DIM = 32, MOST_SEQUENCES = 6, MOST_CHUNKS = 8, SPARE = 3, ATTENDED = 8 };

/* New tokens of a sequence; its earlier ones are cached. */
typedef struct chunk {
    int sequence;
    int64_t start, count;
} chunk;

typedef struct job {
    cpa_owner_map map; /* interleave */
    int32_t rank, block_size;
    cpa_index_form form;
    cpa_row_placement rows;
    int n_sequences, n_chunks;
    int64_t lengths[MOST_SEQUENCES];
    cpa_placement placements[MOST_SEQUENCES];
    chunk chunks[MOST_CHUNKS];
    int64_t padded_rows; /* rows of each rank in a step that is planned as for a graph; 0: it is planned as others */
    int32_t *tables[MOST_SEQUENCES];
    cpa_device *device;
    cpa_stream *stream;
    cpa_context *context;
    cpa_index_cache cache;
    void *q;
    float *weights;
} job;

/* ---- inputs ---- */

static int32_t draw(uint64_t what, uint64_t sequence, int64_t t, int64_t i) {
    return (int32_t)(cpa_mix64((what * 1000003 + sequence) * CPA_GOLDEN + (uint64_t)t * 4099 + (uint64_t)i) >> 33);
}

/* Keys far apart have few elements that are not 0; one in 37 has larger ones. */
static int key_of(int sequence, int64_t t, int d) {
    const int32_t x = draw(1, (uint64_t)sequence, t, d);
    return t % 37 == 5 ? x % 5 : x % 3 ? 0 : x % 5 - 2;
}
static int query_of(int sequence, int64_t t, int h, int d) {
    return draw(2, (uint64_t)sequence, t, h * DIM + d) % 5 - 2;
}
static int weight_of(int sequence, int64_t t, int h) {
    return draw(3, (uint64_t)sequence, t, h) % 4 - 1;
}

static uint8_t code_of(int x) {
    uint8_t code = 0;
    while (cpa_from_e4m3(code) != (float)abs(x)) code++;
    return x < 0 ? code | 0x80 : code;
}

/* Element `i` of memory in the indexer's dtype. */
static void put(cpa_dtype dtype, void *memory, int64_t i, int x) {
    if (dtype == CPA_BF16)
        ((uint16_t *)memory)[i] = cpa_to_bf16((float)x);
    else
        ((uint8_t *)memory)[i] = code_of(x);
}

/* This rank's shard, as the index cache has it: with codes each key has the scale 2^(t % 3). */
static void make_cache(job *j) {
    const cpa_dtype dtype = j->form.dtype;
    const int64_t block_bytes = cpa_kv_block_bytes(dtype, CPA_KEYS, 0, j->block_size, 1, DIM);
    int64_t blocks = 1;
    for (int s = 0; s < j->n_sequences; s++) {
        const cpa_token_set own = cpa_tokens_on(j->map, j->placements[s], j->rank);
        const int64_t tokens = cpa_tokens_before(j->map, own, j->lengths[s]);
        j->tables[s] = cpa_test_block_table(tokens, j->block_size, blocks, SPARE);
        blocks += (tokens + j->block_size - 1) / j->block_size;
    }
    const int32_t per_key = j->form.tokens_per_key ? j->form.tokens_per_key : 1;
    const cpa_owner_map keys = {j->map.cp_size, j->map.interleave / per_key};
    char *memory = cpa_test_poisoned(blocks, block_bytes);
    for (int s = 0; s < j->n_sequences; s++) {
        const cpa_token_set own = cpa_tokens_on(j->map, j->placements[s], j->rank);
        for (int64_t i = 0; i < cpa_tokens_before(keys, own, j->lengths[s] / per_key); i++) {
            const int64_t t = cpa_token_position(keys, own, i), row = i % j->block_size;
            char *block = memory + j->tables[s][i / j->block_size] * block_bytes;
            for (int d = 0; d < DIM; d++) put(dtype, block, row * DIM + d, key_of(s, t, d));
            const float scale = ldexpf(1, (int)(t % 3));
            if (dtype == CPA_FP8_E4M3) memcpy(block + j->block_size * DIM + row * 4, &scale, 4);
        }
    }
    j->cache.kv = (cpa_kv_view){.k = cpa_test_upload(j->stream, memory, blocks * block_bytes),
                                .dtype = dtype,
                                .block_size = j->block_size,
                                .num_blocks = blocks,
                                .kv_heads = 1,
                                .k_dim = DIM,
                                .v_dim = DIM,
                                .v_in_k = 1};
    free(memory);
}

/* Whether this rank gives the query of a token. */
static int gives(const job *j, int sequence, int64_t t) {
    return j->rows == CPA_ROWS_REPLICATED || cpa_owner_rank(j->map, j->placements[sequence], t) == j->rank;
}

static void make_queries(job *j) {
    const int64_t element = cpa_dtype_bytes(j->form.dtype);
    int64_t rows = 0, row = 0;
    for (int c = 0; c < j->n_chunks; c++) rows += j->chunks[c].count;
    rows = rows > j->padded_rows ? rows : j->padded_rows;
    char *q = cpa_test_poisoned(rows + 1, HEADS * DIM * element);
    float *weights = cpa_test_poisoned(rows + 1, HEADS * (int64_t)sizeof *weights);
    for (int c = 0; c < j->n_chunks; c++) {
        const chunk *of = &j->chunks[c];
        for (int64_t t = of->start; t < of->start + of->count; t++) {
            if (!gives(j, of->sequence, t)) continue;
            for (int h = 0; h < HEADS; h++) {
                weights[row * HEADS + h] = (float)weight_of(of->sequence, t, h);
                for (int d = 0; d < DIM; d++)
                    put(j->form.dtype, q, (row * HEADS + h) * DIM + d, query_of(of->sequence, t, h, d));
            }
            row++;
        }
    }
    j->q = cpa_test_upload(j->stream, q, (rows + 1) * HEADS * DIM * element);
    j->weights = j->form.has_weights ? cpa_test_upload(j->stream, weights, (rows + 1) * HEADS * 4) : NULL;
    free(q);
    free(weights);
}

static void open_job(job *j) {
    const cpa_context_options options = {
        .size = sizeof options,
        .shape = {.q_heads = 1, .kv_heads = 1, .k_dim = ATTENDED, .v_dim = ATTENDED},
        .block_size = j->block_size,
        .interleave = j->map.interleave,
        .max_rows = 4096,
        .rows = j->rows,
        .index = j->form,
    };
    cpa_error err = {0};
    j->map.cp_size = cpa_comm_size(cpa_test_comm());
    j->rank = cpa_test_rank();
    for (int s = 0; s < j->n_sequences; s++) j->placements[s].rank %= j->map.cp_size;
    cpa_test_device_open(2, &j->device, &j->stream);
    CU_ASSERT_EQUAL(cpa_context_create(cpa_test_comm(), j->device, &options, &j->context, &err), CPA_OK);
    if (!j->context) printf("%s\n", err.message), abort();
    make_cache(j);
    make_queries(j);
}

static void close_job(job *j) {
    cpa_context_destroy(j->context);
    cpa_test_free(j->stream, j->cache.kv.k);
    cpa_test_free(j->stream, j->q);
    if (j->weights) cpa_test_free(j->stream, j->weights);
    for (int s = 0; s < j->n_sequences; s++) free(j->tables[s]);
    cpa_test_device_close(j->device, j->stream);
}

static cpa_status plan(job *j) {
    cpa_context_chunk planned[MOST_CHUNKS] = {0};
    for (int c = 0; c < j->n_chunks; c++)
        planned[c] = (cpa_context_chunk){.start = j->chunks[c].start,
                                         .count = j->chunks[c].count,
                                         .placement = j->placements[j->chunks[c].sequence],
                                         .algorithm = c % 2 && !j->padded_rows ? CPA_PASS_KV : CPA_PASS_Q,
                                         .block_table = j->tables[j->chunks[c].sequence]};
    if (!j->padded_rows) return cpa_context_plan(j->context, planned, j->n_chunks);
    CPA_TRY(cpa_context_plan_ahead(j->context, planned, j->n_chunks, NULL, NULL, j->padded_rows));
    cpa_context_begin(j->context);
    return cpa_context_upload_plan(j->context, j->stream);
}

/* ---- what is right ---- */

static float score_of(const job *j, int sequence, int64_t t, int64_t key) {
    float sum = 0;
    for (int h = 0; h < HEADS; h++) {
        int product = 0;
        for (int d = 0; d < DIM; d++) product += query_of(sequence, t, h, d) * key_of(sequence, key, d);
        if (product > 0) sum += (float)(product * (j->form.has_weights ? weight_of(sequence, t, h) : 1));
    }
    return j->form.dtype == CPA_FP8_E4M3 ? ldexpf(sum, (int)(key % 3)) : sum;
}

/* The list of a row, from the scores of its whole sequence. */
static int32_t expect(const job *j, int sequence, int64_t t, int32_t *list) {
    const int32_t unit = j->form.unit ? j->form.unit : 1, per_key = j->form.tokens_per_key ? j->form.tokens_per_key : 1;
    const int64_t keys = (t + 1) / per_key, entries = (keys + unit - 1) / unit;
    float *scores = malloc((size_t)(entries + 1) * sizeof *scores);
    for (int64_t e = 0; e < entries; e++) {
        scores[e] = -INFINITY;
        for (int64_t key = e * unit; key < keys && key < (e + 1) * unit; key++)
            scores[e] = fmaxf(scores[e], score_of(j, sequence, t, key));
    }
    const int32_t count = cpa_test_topk(scores, 0, (int32_t)entries, j->form.forced_first,
                                        (int32_t)entries - j->form.forced_last, j->form.k, list);
    free(scores);
    if (!j->form.open_tail) return count;
    list[j->form.k] = -1;
    if ((t + 1) % per_key == 0) return count;
    list[count] = (int32_t)keys;
    return count + 1;
}

/* Whether ranks choose for all sequences of a padded step together. */
static int chooses_together(const job *j) {
    int sharded = 0;
    for (int c = 0; c < j->n_chunks; c++) sharded |= j->placements[j->chunks[c].sequence].kind == CPA_SHARDED;
    return j->padded_rows > 0 && j->map.cp_size > 1 && (sharded || j->rows == CPA_ROWS_REPLICATED);
}

static int is_right(const job *j, const chunk *of, int64_t t, int32_t count, const int32_t *list) {
    const cpa_placement at = j->placements[of->sequence];
    const int32_t width = j->form.k + j->form.open_tail;
    int32_t *wanted = malloc((size_t)width * sizeof *wanted);
    const int elsewhere = j->map.cp_size > 1 && at.kind == CPA_ON_RANK && at.rank != j->rank && !chooses_together(j);
    const int32_t n = expect(j, of->sequence, t, wanted);
    const int right = elsewhere ? count == 0 : count == n && !memcmp(list, wanted, (size_t)width * 4);
    if (!right) printf("  rank %d: sequence %d, token %d: %d of %d\n", j->rank, of->sequence, (int)t, count, n);
    free(wanted);
    return right;
}

static int count_wrong(const job *j, const cpa_key_indices *lists) {
    const int32_t k = j->form.k + j->form.open_tail; /* entries of a list */
    int64_t rows = 0, row = 0;
    int wrong = 0;
    for (int c = 0; c < j->n_chunks; c++) rows += j->chunks[c].count;
    int32_t *indices = malloc((size_t)(rows * k) * 4), *counts = malloc((size_t)rows * 4);
    cpa_test_download(j->stream, indices, lists->indices, rows * k * 4);
    cpa_test_download(j->stream, counts, lists->counts, rows * 4);
    for (int c = 0; c < j->n_chunks; c++)
        for (int64_t i = 0; i < j->chunks[c].count; i++, row++)
            wrong += !is_right(j, &j->chunks[c], j->chunks[c].start + i, counts[row], indices + row * k);
    free(indices);
    free(counts);
    return wrong;
}

/* Lists behind those of the step, of rows that fill it up. */
static int count_not_empty(const job *j, const cpa_key_indices *lists) {
    const int64_t all = j->padded_rows * (j->rows == CPA_ROWS_REPLICATED ? 1 : j->map.cp_size);
    int64_t rows = 0;
    int filled = 0;
    for (int c = 0; c < j->n_chunks; c++) rows += j->chunks[c].count;
    int32_t *counts = malloc((size_t)all * sizeof *counts);
    cpa_test_download(j->stream, counts, lists->counts, all * 4);
    for (; rows < all; rows++) filled += counts[rows] != 0;
    free(counts);
    return filled;
}

/* What this rank is to send: its own shared queries, and candidates of all shared rows. */
static int64_t expected_bytes(const job *j) {
    const int64_t head = DIM * cpa_dtype_bytes(j->form.dtype) + (j->form.has_weights ? 4 : 0);
    int64_t own = 0, all = 0;
    for (int c = 0; c < j->n_chunks; c++) {
        const chunk *of = &j->chunks[c];
        if (j->placements[of->sequence].kind == CPA_ON_RANK) continue;
        all += of->count;
        for (int64_t t = of->start; t < of->start + of->count; t++)
            own += cpa_owner_rank(j->map, j->placements[of->sequence], t) == j->rank;
    }
    if (chooses_together(j)) {
        own = j->padded_rows;
        all = own * (j->rows == CPA_ROWS_REPLICATED ? 1 : j->map.cp_size);
    }
    if (j->rows == CPA_ROWS_REPLICATED) own = 0;
    return (j->map.cp_size - 1) * (own * ((HEADS * head + 15) / 16 * 16) + all * j->form.k * 8);
}

static cpa_status choose(job *j, cpa_key_indices *lists) {
    const cpa_context_select_args args = {.size = sizeof args, .q = j->q, .weights = j->weights, .cache = j->cache};
    return cpa_context_select(j->context, &args, lists, j->stream);
}

/* Two layers of a step, and the same step planned again. */
static void run(job j) {
    cpa_context_stats stats;
    open_job(&j);
    for (int step = 0; step < 2; step++) {
        CU_ASSERT_EQUAL(plan(&j), CPA_OK);
        for (int layer = 0; layer < 2; layer++) {
            cpa_key_indices lists = {.unit = 0};
            const cpa_status status = choose(&j, &lists);
            CU_ASSERT_EQUAL(status, CPA_OK);
            if (status != CPA_OK) printf("%s\n", cpa_context_error(j.context));
            CU_ASSERT_EQUAL(cpa_context_sync(j.context, j.stream), CPA_OK);
            if (status == CPA_OK) CU_ASSERT_EQUAL(count_wrong(&j, &lists), 0);
        }
    }
    CU_ASSERT_EQUAL(cpa_context_get_stats(j.context, &stats, sizeof stats), CPA_OK);
    CU_ASSERT_EQUAL(stats.index_bytes_sent, 4 * expected_bytes(&j));
    CU_ASSERT_EQUAL(stats.bytes_sent, stats.index_bytes_sent);
    close_job(&j);
}

/* ---- tests ---- */

/* Short sequences whose shards are empty on some ranks, one that lies on one rank, and row starts other than 0. */
static job mixed(int32_t block_size, int32_t interleave, int32_t k) {
    return (job){
        .map = {1, interleave},
        .block_size = block_size,
        .form = {.heads = HEADS, .dim = DIM, .dtype = CPA_BF16, .has_weights = 1, .k = k},
        .n_sequences = 5,
        .lengths = {61, 3, 40, 29, 1},
        .placements = {{CPA_SHARDED, 0}, {CPA_SHARDED, 2}, {CPA_ON_RANK, 1}, {CPA_SHARDED, 1}, {CPA_SHARDED, 3}},
        .n_chunks = 6,
        .chunks = {{0, 60, 1}, {1, 0, 3}, {2, 30, 10}, {3, 7, 9}, {3, 16, 13}, {4, 0, 1}},
    };
}

static void any_interleave_and_block_choose_alike(void) {
    const int32_t blocks[] = {1, 2, 4, 16};
    for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++)
        for (int32_t times = 1; times <= 4; times++) run(mixed(blocks[b], times * blocks[b], 8));
    run(mixed(16, 4, 8)); /* several runs in a block */
}

static void codes_and_keys_without_weights_choose_too(void) {
    job codes = mixed(4, 8, 5), plain = mixed(4, 4, 5);
    codes.form.dtype = CPA_FP8_E4M3;
    plain.form.has_weights = 0;
    run(codes);
    run(plain);
}

static void replicated_rows_send_no_queries(void) {
    job j = mixed(4, 8, 8);
    j.rows = CPA_ROWS_REPLICATED;
    run(j);
}

static void entries_of_several_tokens_are_chosen(void) {
    job units = mixed(4, 8, 6), ratio = mixed(4, 8, 6), both = mixed(8, 16, 4), plain = mixed(16, 4, 6);
    units.form.unit = 4;
    units.form.forced_last = 1;
    ratio.form.tokens_per_key = 4;
    both.form.unit = 2, both.form.tokens_per_key = 4;
    run(units);
    run(ratio);
    run(both);
    ratio.form.open_tail = 1; /* tokens behind the last whole key */
    run(ratio);
    ratio.form.k = 200; /* more than there are keys */
    run(ratio);
    plain.form.unit = 4, plain.form.has_weights = 0, plain.form.forced_last = 1; /* a run of tokens is a micro-block */
    run(plain);
}

static void forced_entries_are_among_them(void) {
    job j = mixed(4, 4, 12);
    j.form.forced_first = 4, j.form.forced_last = 5;
    run(j);
}

/* Prefill in pieces of few rows: the same lists, the same bytes. */
static job prefill(int64_t scores_bytes, int32_t k) {
    return (job){
        .map = {1, 16},
        .block_size = 16,
        .form = {.heads = HEADS, .dim = DIM, .dtype = CPA_BF16, .has_weights = 1, .k = k, .scores_bytes = scores_bytes},
        .n_sequences = 2,
        .lengths = {400, 250},
        .placements = {{CPA_SHARDED, 1}, {CPA_ON_RANK, 0}},
        .n_chunks = 2,
        .chunks = {{0, 150, 250}, {1, 30, 220}},
    };
}

static void pieces_of_any_size_choose_alike(void) {
    run(prefill(0, 64));
    run(prefill(20000, 64));
    run(prefill(1, 200));
}

/* Steps of other lengths and rows, planned one after the other as for one graph: a token a sequence, several as of
 * drafts, which some ranks have none of, and rows of no sequence. Then sequences that lie on ranks alone. */
static const chunk PADDED_STEPS[][MOST_CHUNKS] = {
    {{0, 60, 1}, {1, 2, 1}, {2, 39, 1}, {3, 28, 1}, {4, 0, 1}},
    {{0, 3, 1}, {3, 0, 1}},
    {{0, 50, 4}, {1, 0, 3}, {2, 20, 2}, {3, 7, 1}},
    {{3, 25, 4}},
    {{2, 12, 1}},
    {{2, 30, 3}},
    {{0, 57, 4}, {2, 0, 4}, {3, 11, 4}, {1, 1, 1}},
};

static void choose_padded(job j, int64_t padded_rows) {
    cpa_context_stats stats;
    int64_t bytes = 0;
    j.padded_rows = padded_rows;
    j.n_chunks = 0;
    open_job(&j);
    for (size_t step = 0; step < 2 * sizeof PADDED_STEPS / sizeof *PADDED_STEPS; step++) {
        const chunk *chunks = PADDED_STEPS[step % (sizeof PADDED_STEPS / sizeof *PADDED_STEPS)];
        cpa_key_indices lists = {.unit = 0};
        for (j.n_chunks = 0; j.n_chunks < MOST_CHUNKS && chunks[j.n_chunks].count > 0; j.n_chunks++)
            j.chunks[j.n_chunks] = chunks[j.n_chunks];
        cpa_test_free(j.stream, j.q);
        if (j.weights) cpa_test_free(j.stream, j.weights);
        make_queries(&j);
        CU_ASSERT_EQUAL_FATAL(plan(&j), CPA_OK);
        CU_ASSERT_EQUAL_FATAL(choose(&j, &lists), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_sync(j.context, j.stream), CPA_OK);
        CU_ASSERT_EQUAL(count_wrong(&j, &lists), 0);
        CU_ASSERT_EQUAL(count_not_empty(&j, &lists), 0);
        bytes += expected_bytes(&j);
    }
    CU_ASSERT_EQUAL(cpa_context_get_stats(j.context, &stats, sizeof stats), CPA_OK);
    CU_ASSERT_EQUAL(stats.index_bytes_sent, bytes);
    close_job(&j);
}

static void padded_steps_choose_alike(void) {
    job one = mixed(4, 4, 8), codes = mixed(4, 8, 5), units = mixed(4, 8, 6), replicated = mixed(16, 4, 8),
        open = mixed(4, 8, 3);
    codes.form.dtype = CPA_FP8_E4M3;
    units.form.unit = 4;
    units.form.forced_last = 1;
    units.form.scores_bytes = 20000; /* in pieces */
    replicated.rows = CPA_ROWS_REPLICATED;
    open.form.tokens_per_key = 4, open.form.open_tail = 1;
    choose_padded(open, 16);
    choose_padded(one, 16);
    choose_padded(codes, 16);
    choose_padded(units, 24);
    choose_padded(replicated, 16);
}

/* A key of an entry that one rank has alone is seen by all; nothing is chosen twice. */
static void every_key_is_chosen_once_where_all_are(void) {
    job j = mixed(2, 2, 64); /* more than there are keys */
    open_job(&j);
    CU_ASSERT_EQUAL(plan(&j), CPA_OK);
    cpa_key_indices lists = {.unit = 0};
    CU_ASSERT_EQUAL(choose(&j, &lists), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(j.context, j.stream), CPA_OK);
    int32_t list[64], count = 0;
    cpa_test_download(j.stream, list, lists.indices, sizeof list);
    cpa_test_download(j.stream, &count, lists.counts, sizeof count);
    CU_ASSERT_EQUAL(count, 61);
    for (int32_t i = 0; i < count; i++) CU_ASSERT_EQUAL(list[i], i);
    CU_ASSERT(lists.width == 64 && lists.row_stride == 64 && lists.unit == 1);
    close_job(&j);
}

/* The lists go to attend as they are, and it attends no other key: those of one value. */
static void attend_takes_the_lists(void) {
    job j = mixed(4, 8, 8);
    cpa_key_indices lists;
    open_job(&j);
    const cpa_key_selection selection = {.indices = &lists};
    const int64_t bytes = j.cache.kv.num_blocks * j.block_size * ATTENDED * 4;
    float *ones = malloc((size_t)bytes), out[64 * ATTENDED], q[64 * ATTENDED] = {0};
    for (int64_t i = 0; i < bytes / 4; i++) ones[i] = 1;
    void *const keys = cpa_test_upload(j.stream, ones, bytes), *const on_device =
                                                                   cpa_test_upload(j.stream, out, sizeof out);
    void *const queries = cpa_test_upload(j.stream, q, sizeof q);
    const cpa_context_args args = {.size = sizeof args,
                                   .q = queries,
                                   .kv = {.k = keys,
                                          .v = keys,
                                          .block_size = j.block_size,
                                          .num_blocks = j.cache.kv.num_blocks,
                                          .kv_heads = 1,
                                          .k_dim = ATTENDED,
                                          .v_dim = ATTENDED},
                                   .mask = {.causal = 1},
                                   .out = on_device,
                                   .selection = &selection};
    for (int step = 0; step < 3; step++) { /* each plan compares what the layers of the one before were told */
        CU_ASSERT_EQUAL(plan(&j), CPA_OK);
        CU_ASSERT_EQUAL(choose(&j, &lists), CPA_OK);
        const cpa_status status = cpa_context_attend(j.context, &args, j.stream);
        CU_ASSERT_EQUAL(status, CPA_OK);
        if (status != CPA_OK) printf("%s\n", cpa_context_error(j.context));
        CU_ASSERT_EQUAL(cpa_context_sync(j.context, j.stream), CPA_OK);
    }
    cpa_test_download(j.stream, out, on_device, sizeof out);
    int64_t rows = 0;
    for (int c = 0; c < j.n_chunks; c++)
        for (int64_t i = 0; i < j.chunks[c].count; i++) rows += gives(&j, j.chunks[c].sequence, j.chunks[c].start + i);
    for (int64_t i = 0; i < rows * ATTENDED; i++) CU_ASSERT(fabsf(out[i] - 1) < 1e-5f);
    void *const used[] = {keys, on_device, queries};
    for (int i = 0; i < 3; i++) cpa_test_free(j.stream, used[i]);
    free(ones);
    close_job(&j);
}

/* What every rank gives wrongly is refused on all, with a line; what is right goes on with the next plan. */
static void bad_calls_are_refused(void) {
    job j = mixed(4, 8, 8);
    cpa_key_indices lists;
    open_job(&j);
    CU_ASSERT_EQUAL(choose(&j, &lists), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(j.context), "no step is planned"));
    job without = j, narrow = j;
    without.weights = NULL;
    narrow.cache.kv.k_dim = narrow.cache.kv.v_dim = DIM / 2;
    CU_ASSERT_EQUAL(plan(&j), CPA_OK);
    CU_ASSERT_EQUAL(choose(&without, &lists), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(j.context), "weights"));
    CU_ASSERT_EQUAL(plan(&j), CPA_OK);
    CU_ASSERT_EQUAL(choose(&narrow, &lists), CPA_INVALID);
    CU_ASSERT_PTR_NOT_NULL(strstr(cpa_context_error(j.context), "keys of 16"));
    CU_ASSERT_EQUAL(plan(&j), CPA_OK);
    CU_ASSERT_EQUAL(choose(&j, &lists), CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_sync(j.context, j.stream), CPA_OK);
    CU_ASSERT_EQUAL(count_wrong(&j, &lists), 0);
    close_job(&j);
}

static const cpa_test TESTS[] = {
    {"any interleave and block choose alike", any_interleave_and_block_choose_alike},
    {"codes and keys without weights choose too", codes_and_keys_without_weights_choose_too},
    {"replicated rows send no queries", replicated_rows_send_no_queries},
    {"entries of several tokens are chosen", entries_of_several_tokens_are_chosen},
    {"forced entries are among them", forced_entries_are_among_them},
    {"pieces of any size choose alike", pieces_of_any_size_choose_alike},
    {"padded steps choose alike", padded_steps_choose_alike},
    {"every key is chosen once where all are", every_key_is_chosen_once_where_all_are},
    {"attend takes the lists", attend_takes_the_lists},
    {"bad calls are refused", bad_calls_are_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("keys that an indexer chooses", TESTS)
