/* Steps of a context that are planned while earlier ones run: nothing of those is overwritten. */
#include "kernels/device.h"
#include "src/context/context.h"
#include "src/context/context_plan.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { STEPS = 7 };
static const cpa_mask CAUSAL = {.causal = 1};

/* Keeps the stream busy for longer than the host takes to enqueue the steps, where it runs behind the host. `memory`
 * has 2 * bytes. */
static void occupy(cpa_stream *stream, char *memory, int64_t bytes) {
    for (int i = 0; i < 100; i++)
        CU_ASSERT_EQUAL(stream->device->table->copy(memory + bytes, memory, bytes, stream), CPA_OK);
}

/* Steps of one sequence each, so that each reads blocks of its own, by both algorithms. */
static void steps_are_planned_while_others_run(void) {
    const cpa_test_shape shape = {
        .q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 16, .dtype = CPA_BF16};
    const int64_t lengths[STEPS] = {300, 90, 257, 33, 200, 128, 65};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache cache;
    cpa_test_chunk chunks[STEPS];
    cpa_test_layer layers[STEPS];
    const int64_t bytes = cpa_test_promises_bits() ? 1 << 10 : (int64_t)1 << 30;
    void *memory = NULL;
    cpa_test_device_open(0, &device, &stream);
    CU_ASSERT_EQUAL(cpa_device_alloc(device, 2 * bytes, &memory, NULL), CPA_OK);
    cpa_test_cache_init(&cache, shape, 71, lengths, NULL, STEPS);
    cpa_context *context = cpa_test_context(device, &shape, 0);
    for (int i = 0; i < STEPS; i++) {
        int64_t count = i < 4 ? 1 : 30;
        chunks[i] = (cpa_test_chunk){i, lengths[i] - count, count, i % 2 ? CPA_PASS_KV : CPA_PASS_Q};
    }
    for (int round = 0; round < 2; round++) { /* in the first one, memory grows */
        for (int i = 0; i < STEPS; i++) cpa_test_layer_upload(&cache, CAUSAL, &chunks[i], 1, 1, stream, &layers[i]);
        occupy(stream, memory, bytes);
        for (int i = 0; i < STEPS; i++) {
            CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, &chunks[i], 1), CPA_OK);
            CU_ASSERT_EQUAL(cpa_context_attend(context, &layers[i].args, stream), CPA_OK);
        }
        for (int i = 0; i < STEPS; i++) {
            cpa_test_layer_download(&layers[i], stream);
            CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, CAUSAL, &chunks[i], 1, &layers[i].result), 0);
            cpa_test_result_destroy(&layers[i].result);
        }
    }
    cpa_device_free(device, memory);
    cpa_context_destroy(context);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

/* The row gets the blocks that a chunk reads on this rank. */
static void give_blocks(cpa_block_tables *tables, int32_t set, int64_t row, const cpa_test_cache *cache,
                        const cpa_test_chunk *chunk) {
    const cpa_token_set own = cpa_tokens_on(cache->map, cache->placements[chunk->sequence], cache->rank);
    const int64_t keys = cpa_tokens_before(cache->map, own, chunk->start + chunk->count);
    const int64_t blocks = (keys + cache->shape.block_size - 1) / cache->shape.block_size;
    CU_ASSERT_EQUAL(
        cpa_block_tables_give((cpa_table_set){tables, set}, row, cache->tables[chunk->sequence], blocks, NULL), CPA_OK);
}

/* Layers of two caches, whose sequences lie in opposite orders, alternate in one step: decode and prefill by both algorithms, long
 * enough for pass-Q to send states in parts. */
static void layers_read_their_blocks_by_tables_of_their_own(void) {
    enum { CHUNKS = 4, SETS = 2, LAYERS = 4 };
    const cpa_test_shape shape = {
        .q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 16, .dtype = CPA_BF16};
    const int64_t lengths[SETS][CHUNKS] = {{300, 1290, 257, 133}, {133, 257, 1290, 300}};
    const cpa_test_chunk first[CHUNKS] = {
        {0, 299, 1, CPA_PASS_Q}, {1, 200, 1090, CPA_PASS_Q}, {2, 0, 257, CPA_PASS_KV}, {3, 130, 3, CPA_PASS_KV}};
    const cpa_mask masks[SETS] = {CAUSAL, {.causal = 1, .window = 40, .sinks = 3}};
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache caches[SETS];
    cpa_test_chunk chunks[SETS][CHUNKS];
    cpa_context_chunk planned[CHUNKS];
    cpa_block_tables *tables;
    const int64_t rows[CHUNKS] = {2, 0, 3, 1};
    cpa_test_device_open(0, &device, &stream);
    CU_ASSERT_EQUAL_FATAL(cpa_block_tables_create(device, SETS, &tables, NULL), CPA_OK);
    for (int set = 0; set < SETS; set++) {
        cpa_test_cache_init(&caches[set], shape, 72 + (uint64_t)set, lengths[set], NULL, CHUNKS);
        for (int i = 0; i < CHUNKS; i++) {
            chunks[set][i] = first[i];
            if (set == 1) chunks[set][i].sequence = CHUNKS - 1 - i;
            give_blocks(tables, set, rows[i], &caches[set], &chunks[set][i]);
        }
    }
    for (int i = 0; i < CHUNKS; i++)
        planned[i] = (cpa_context_chunk){.start = first[i].start,
                                         .count = first[i].count,
                                         .placement = caches[0].placements[i],
                                         .algorithm = first[i].algorithm};
    cpa_context *context = cpa_test_context(device, &shape, 0);
    CU_ASSERT_EQUAL_FATAL(cpa_context_plan_ahead(context, planned, CHUNKS, tables, rows, 0), CPA_OK);
    cpa_context_begin(context);
    CU_ASSERT_EQUAL(cpa_context_upload_plan(context, stream), CPA_OK);
    for (int i = 0; i < LAYERS; i++) {
        const int set = i % SETS;
        cpa_test_layer layer;
        cpa_test_layer_upload(&caches[set], masks[set], chunks[set], CHUNKS, 1, stream, &layer);
        cpa_context_use_tables(context, set);
        CU_ASSERT_EQUAL(cpa_context_attend(context, &layer.args, stream), CPA_OK);
        CU_ASSERT_EQUAL(cpa_context_sync(context, stream), CPA_OK);
        cpa_test_layer_download(&layer, stream);
        CU_ASSERT_EQUAL(cpa_test_count_wrong(&caches[set], masks[set], chunks[set], CHUNKS, &layer.result), 0);
        cpa_test_result_destroy(&layer.result);
    }
    cpa_context_destroy(context);
    cpa_block_tables_destroy(tables);
    for (int set = 0; set < SETS; set++) cpa_test_cache_destroy(&caches[set]);
    cpa_test_device_close(device, stream);
}

/* Rows of block tables that sequences leave to others, shorten and lengthen, from step to step. */
typedef struct changing {
    const cpa_test_cache *cache;
    cpa_block_tables *tables;
    int64_t sequences[4], tokens[4]; /* of each row */
} changing;
enum { CHANGING_ROWS = 4, CHANGING_STEPS = 24, WIDE_ROW = 9, WIDE_ENTRIES = 3000 };

static int64_t blocks_here(const changing *c, int64_t sequence, int64_t tokens) {
    const cpa_test_cache *cache = c->cache;
    const cpa_token_set own = cpa_tokens_on(cache->map, cache->placements[sequence], cache->rank);
    return (cpa_tokens_before(cache->map, own, tokens) + cache->shape.block_size - 1) / cache->shape.block_size;
}

/* The row has the first tokens of a sequence from now on; those that it had of another are gone. */
static void change_row(changing *c, int64_t row, int64_t sequence, int64_t tokens) {
    const cpa_table_set at = {c->tables, 0};
    const int32_t *blocks = c->cache->tables[sequence];
    const int64_t count = blocks_here(c, sequence, tokens);
    if (sequence != c->sequences[row]) cpa_block_tables_cut(at, row, 0);
    const int64_t held = cpa_block_tables_count(at, row);
    if (count < held) cpa_block_tables_cut(at, row, count);
    if (count > held) CU_ASSERT_EQUAL(cpa_block_tables_append(at, row, blocks + held, count - held, -1, NULL), CPA_OK);
    c->sequences[row] = sequence;
    c->tokens[row] = tokens;
}

/* Some rows go on by a token or a few blocks, some fall back, some change hands; and now and then all of them move, as a
 * row of nobody's grows. */
static void change_rows(changing *c, int step, cpa_test_chunk *chunks) {
    int32_t none[WIDE_ENTRIES] = {0};
    if (step % 8 == 3)
        CU_ASSERT_EQUAL(cpa_block_tables_append((cpa_table_set){c->tables, 0}, WIDE_ROW, none, WIDE_ENTRIES, -1, NULL),
                        CPA_OK);
    for (int64_t row = 0; row < CHANGING_ROWS; row++) {
        const int64_t length = c->cache->sequences[c->sequences[row]].length, way = cpa_test_random_below(8);
        int64_t sequence = c->sequences[row], tokens = c->tokens[row] + 1;
        if (way <= 1) sequence = cpa_test_random_below(c->cache->n_sequences);
        if (way <= 1) tokens = c->cache->sequences[sequence].length - cpa_test_random_below(90);
        if (way == 2) tokens = 1 + cpa_test_random_below(length);
        if (way == 3) tokens = c->tokens[row] + 40;
        if (way > 2 && tokens > length) tokens = 1 + length / 2;
        change_row(c, row, sequence, tokens);
        chunks[row] = (cpa_test_chunk){sequence, tokens - 1, 1, step % 3 == 2 ? CPA_PASS_KV : CPA_PASS_Q};
    }
}

/* Alone a rank has all rows, so that every other step can be planned as for a graph. */
static void plan_rows(cpa_context *context, changing *c, int step, const cpa_test_chunk *chunks, cpa_stream *stream) {
    const int64_t padded_rows = step % 2 && cpa_test_ranks() == 1 ? CHANGING_ROWS : 0;
    const int64_t rows[CHANGING_ROWS] = {0, 1, 2, 3};
    cpa_context_chunk planned[CHANGING_ROWS];
    for (int i = 0; i < CHANGING_ROWS; i++)
        planned[i] = (cpa_context_chunk){.start = chunks[i].start,
                                         .count = 1,
                                         .placement = c->cache->placements[chunks[i].sequence],
                                         .algorithm = chunks[i].algorithm};
    CU_ASSERT_EQUAL_FATAL(cpa_context_plan_ahead(context, planned, CHANGING_ROWS, c->tables, rows, padded_rows),
                          CPA_OK);
    CU_ASSERT_EQUAL(cpa_context_upload_plan(context, stream), CPA_OK);
}

/* The tables of a step change, and are uploaded, while the one before runs; sequences share a prefix, one of them less
 * of it than the others. */
static void tables_change_while_the_step_before_runs(void) {
    enum { SEQUENCES = 6 };
    const cpa_test_shape shape = {
        .q_heads = 4, .kv_heads = 2, .k_dim = 64, .v_dim = 64, .block_size = 16, .interleave = 16, .dtype = CPA_BF16};
    const int64_t lengths[SEQUENCES] = {2700, 90, 2257, 2900, 2400, 2128};
    const int64_t bytes = cpa_test_promises_bits() ? 1 << 10 : (int64_t)1 << 28;
    cpa_device *device;
    cpa_stream *stream;
    cpa_test_cache cache;
    cpa_test_chunk chunks[2][CHANGING_ROWS];
    cpa_test_layer layers[2];
    void *memory = NULL;
    cpa_test_device_open(0, &device, &stream);
    CU_ASSERT_EQUAL(cpa_device_alloc(device, 2 * bytes, &memory, NULL), CPA_OK);
    cpa_test_cache_init(&cache, shape, 75, lengths, NULL, SEQUENCES);
    for (int64_t i = 2; i < SEQUENCES; i++) cpa_test_cache_share(&cache, i, 0, i == 4 ? 1024 : 2048);
    changing c = {.cache = &cache, .sequences = {0, 2, 3, 5}, .tokens = {2600, 2200, 2800, 2100}};
    CU_ASSERT_EQUAL_FATAL(cpa_block_tables_create(device, 1, &c.tables, NULL), CPA_OK);
    cpa_test_random_seed(76);
    cpa_context *context = cpa_test_context(device, &shape, 0);
    for (int step = 0; step <= CHANGING_STEPS; step++) {
        cpa_test_chunk *next = chunks[step % 2], *ran = chunks[(step + 1) % 2];
        cpa_test_layer *layer = &layers[(step + 1) % 2];
        if (step < CHANGING_STEPS) {
            change_rows(&c, step, next);
            plan_rows(context, &c, step, next, stream);
        }
        CU_ASSERT_EQUAL(cpa_context_sync(context, stream), CPA_OK);
        if (step > 0) {
            cpa_test_layer_download(layer, stream);
            CU_ASSERT_EQUAL(cpa_test_count_wrong(&cache, CAUSAL, ran, CHANGING_ROWS, &layer->result), 0);
            cpa_test_result_destroy(&layer->result);
        }
        if (step == CHANGING_STEPS) break;
        layer = &layers[step % 2];
        cpa_test_layer_upload(&cache, CAUSAL, next, CHANGING_ROWS, 1, stream, layer);
        occupy(stream, memory, bytes);
        cpa_context_begin(context);
        CU_ASSERT_EQUAL(cpa_context_attend(context, &layer->args, stream), CPA_OK);
    }
    cpa_device_free(device, memory);
    cpa_context_destroy(context);
    cpa_block_tables_destroy(c.tables);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
}

static const cpa_test TESTS[] = {
    {"steps are planned while others run", steps_are_planned_while_others_run},
    {"layers read their blocks by tables of their own", layers_read_their_blocks_by_tables_of_their_own},
    {"tables change while the step before runs", tables_change_while_the_step_before_runs},
};

CPA_MPI_DEVICE_TEST_MAIN("a context that is planned ahead", TESTS)
