/* No wait counts on the clock on the wall, which here runs 20 s ahead of the one that timed waits are held against. */
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/mpi_unit.h"

int clock_gettime(clockid_t clock, struct timespec *out) {
    const int status = (int)syscall(SYS_clock_gettime, clock, out);
    if (clock == CLOCK_REALTIME) out->tv_sec += 20;
    return status;
}

static void requests_that_arrive_later_are_not_waited_for_longer(void) {
    cpa_engine_options options = cpa_test_engine_options();
    cpa_engine_stats stats;
    cpa_request request = {.size = sizeof request, .id = 1, .prompt_tokens = 5, .output_tokens = 2, .arrival_s = 0.3};
    CU_ASSERT_TRUE(cpa_test_engine_run(&options, &request, 1, NULL, NULL, &stats));
    CU_ASSERT(stats.duration_s >= 0.3 && stats.duration_s < 10);
}

/* The thread that runs an operation waits in naps for the others, and polls between them. On a busy machine the other
 * one may come late: its item is left to it. */
static void nap(void *ctx, int64_t item, int32_t thread) {
    atomic_int *other_is_there = ctx;
    (void)item;
    if (thread != 0) {
        *other_is_there = 1;
        usleep(100000);
    }
    for (int ms = 0; !*other_is_there && ms < 10000; ms++) usleep(1000);
}

static void count(void *ctx) {
    (*(int *)ctx)++;
}

static void an_operation_polls_while_it_waits_for_its_threads(void) {
    cpa_threads *pool;
    int polls = 0;
    atomic_int other_is_there = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_threads_create(2, NULL, 0, &pool, NULL), CPA_OK);
    cpa_progress_hook counts = {.look = count, .ctx = &polls};
    const cpa_progress progress = {&counts};
    cpa_threads_run(pool, 2, nap, &other_is_there, &progress);
    CPA_ASSERT_ORDER(polls, >, 20);
    cpa_threads_destroy(pool);
}

static const cpa_test tests[] = {
    {"requests that arrive later are not waited for longer", requests_that_arrive_later_are_not_waited_for_longer},
    {"an operation polls while it waits for its threads", an_operation_polls_while_it_waits_for_its_threads},
};

CPA_MPI_DEVICE_TEST_MAIN("wall clock", tests)
