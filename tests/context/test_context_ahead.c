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
    const int32_t *tables[SETS][CHUNKS];
    cpa_test_device_open(0, &device, &stream);
    for (int set = 0; set < SETS; set++) {
        cpa_test_cache_init(&caches[set], shape, 72 + (uint64_t)set, lengths[set], NULL, CHUNKS);
        for (int i = 0; i < CHUNKS; i++) {
            chunks[set][i] = first[i];
            if (set == 1) chunks[set][i].sequence = CHUNKS - 1 - i;
            tables[set][i] = caches[set].tables[chunks[set][i].sequence];
        }
    }
    for (int i = 0; i < CHUNKS; i++)
        planned[i] = (cpa_context_chunk){.start = first[i].start,
                                         .count = first[i].count,
                                         .placement = caches[0].placements[i],
                                         .algorithm = first[i].algorithm};
    cpa_context *context = cpa_test_context(device, &shape, 0);
    CU_ASSERT_EQUAL_FATAL(cpa_context_plan_ahead(context, planned, CHUNKS, &tables[0][0], SETS, 0), CPA_OK);
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
    for (int set = 0; set < SETS; set++) cpa_test_cache_destroy(&caches[set]);
    cpa_test_device_close(device, stream);
}

static const cpa_test TESTS[] = {
    {"steps are planned while others run", steps_are_planned_while_others_run},
    {"layers read their blocks by tables of their own", layers_read_their_blocks_by_tables_of_their_own},
};

CPA_MPI_DEVICE_TEST_MAIN("a context that is planned ahead", TESTS)
