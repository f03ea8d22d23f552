/* Attention that leaves out tiles of keys (cpa_engine_options.skip_tiles): on any number of ranks and by either
 * algorithm each checked row is within the bound of what may be missing, and tiles are counted. */
#include <math.h>
#include <string.h>

#include "tests/fixtures/comm_fixture.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

enum { REQUESTS = 2 };

static cpa_engine_options options_of(cpa_request *requests) {
    static const int64_t prompts[REQUESTS] = {2300, 900};
    cpa_engine_options options = cpa_test_engine_options();
    for (int64_t i = 0; i < REQUESTS; i++)
        requests[i] = (cpa_request){
            .size = sizeof requests[i], .id = (uint64_t)(3 * i), .prompt_tokens = prompts[i], .output_tokens = 5};
    options.num_blocks = 400;
    options.max_num_batched_tokens = 1024;
    options.verify = 0.05;
    options.local_context = 0;
    return options;
}

static cpa_engine_stats run(const cpa_engine_options *options, const cpa_request *requests) {
    cpa_engine_stats stats;
    CU_ASSERT_TRUE(cpa_test_engine_run(options, requests, REQUESTS, NULL, NULL, &stats));
    CPA_ASSERT_ORDER(stats.verify_rows, >, 100);
    CU_ASSERT_EQUAL(stats.verify_violations, 0);
    return stats;
}

/* Small heads, which devices leave no tiles out for. */
static void tiles_are_left_out_and_counted(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    const cpa_algorithm algorithms[] = {CPA_PASS_KV, CPA_PASS_Q};
    options.skip_tiles = 0.5f;
    for (int i = 0; i < 2; i++) {
        options.algorithm = algorithms[i];
        const cpa_engine_stats stats = run(&options, requests);
        if (!cpa_test_promises_bits()) continue;
        CPA_ASSERT_ORDER(stats.tiles_skipped, >, 0);
        CPA_ASSERT_ORDER(stats.tiles_skipped, <, stats.tiles_seen);
    }
}

static void without_a_distance_results_are_what_they_were(void) {
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    const cpa_engine_stats without = run(&options, requests);
    CU_ASSERT_EQUAL(without.tiles_seen, 0);
    options.skip_tiles = 1e6f; /* no score lies so far below */
    const cpa_engine_stats none = run(&options, requests);
    CU_ASSERT_EQUAL(none.tiles_skipped, 0);
    if (cpa_test_promises_bits()) CU_ASSERT_EQUAL(none.output_digest, without.output_digest);
}

static void distances_that_are_none_are_refused(void) {
    static const float bad[] = {-1, NAN, INFINITY};
    cpa_request requests[REQUESTS];
    cpa_engine_options options = options_of(requests);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cpa_error err = {0};
        cpa_engine *engine = NULL;
        options.skip_tiles = bad[i];
        CU_ASSERT_EQUAL(cpa_engine_create(cpa_test_comm(), &options, &engine, &err), CPA_INVALID);
        CU_ASSERT(strstr(err.message, "skip_tiles: ") != NULL);
    }
}

static const cpa_test TESTS[] = {
    {"tiles are left out and counted", tiles_are_left_out_and_counted},
    {"without a distance results are what they were", without_a_distance_results_are_what_they_were},
    {"distances that are none are refused", distances_that_are_none_are_refused},
};

CPA_MPI_DEVICE_TEST_MAIN("engine that leaves out tiles", TESTS)
