/* Steps of a context that are planned while earlier ones run: nothing of those is overwritten. */
#include "kernels/device.h"
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

static const cpa_test TESTS[] = {{"steps are planned while others run", steps_are_planned_while_others_run}};

CPA_MPI_DEVICE_TEST_MAIN("a context that is planned ahead", TESTS)
