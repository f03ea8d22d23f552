/* Deliberate bugs in the library's twin change results beyond the tolerance: the inputs of the tests are such that no
 * shard can get lost unnoticed. */
#include <stdlib.h>

#include "tests/faults/fault.h"
#include "tests/fixtures/context_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static const cpa_test_shape SHAPE = {
    .q_heads = 4, .kv_heads = 2, .k_dim = 32, .v_dim = 32, .block_size = 16, .interleave = 16, .mask = {.causal = 1}};

/* Wrong rows on all ranks in a step of one long chunk and one decode token, by one algorithm. */
static int64_t wrong_rows(cpa_fault fault, cpa_algorithm algorithm) {
    cpa_device *device = NULL;
    cpa_stream *stream = NULL;
    cpa_test_device_open(1, &device, &stream);
    const int64_t lengths[2] = {300, 170};
    const cpa_test_chunk chunks[2] = {{0, 150, 150, algorithm}, {1, 169, 1, algorithm}};
    cpa_test_cache cache;
    cpa_test_result result;
    cpa_test_cache_init(&cache, SHAPE, 9, lengths, NULL, 2);
    cpa_context *context = cpa_test_context(device, &SHAPE, 0);
    cpa_fault_armed = fault;
    CU_ASSERT_EQUAL(cpa_test_plan(context, &cache, chunks, 2), CPA_OK);
    CU_ASSERT_EQUAL(cpa_test_attend(context, &cache, SHAPE.mask, chunks, 2, stream, &result), CPA_OK);
    cpa_fault_armed = CPA_FAULT_NONE;
    int64_t wrong = cpa_test_count_wrong(&cache, SHAPE.mask, chunks, 2, &result);
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
    cpa_test_result_destroy(&result);
    cpa_context_destroy(context);
    cpa_test_cache_destroy(&cache);
    cpa_test_device_close(device, stream);
    return wrong;
}

/* The share of the rows, in percent, that a fault must spoil. */
static void check_fault(cpa_fault fault, int64_t percent) {
    int64_t rows = (150 + 1) * SHAPE.q_heads;
    for (cpa_algorithm algorithm = CPA_PASS_KV; algorithm <= CPA_PASS_Q; algorithm++) {
        int64_t wrong = wrong_rows(fault, algorithm);
        CPA_ASSERT_ORDER(wrong * 100, >=, percent * rows);
        if (wrong * 100 < percent * rows)
            printf("fault %d by %s: %lld of %lld rows\n", (int)fault, cpa_algorithm_name(algorithm), (long long)wrong,
                   (long long)rows);
    }
}

static void test_without_a_fault_every_row_is_right(void) {
    CU_ASSERT_EQUAL(wrong_rows(CPA_FAULT_NONE, CPA_PASS_KV), 0);
    CU_ASSERT_EQUAL(wrong_rows(CPA_FAULT_NONE, CPA_PASS_Q), 0);
}

static void test_a_dropped_shard_shows(void) {
    check_fault(CPA_FAULT_DROPPED_SHARD, 90);
}

static void test_an_lse_in_base_2_shows(void) {
    check_fault(CPA_FAULT_BASE2_LSE, 90);
}

static const cpa_test TESTS[] = {
    {"without a fault every row is right", test_without_a_fault_every_row_is_right},
    {"a dropped shard shows", test_a_dropped_shard_shows},
    {"an LSE in base 2 shows", test_an_lse_in_base_2_shows},
};
CPA_MPI_DEVICE_TEST_MAIN("context attention with faults", TESTS)
