/* Who is named when ranks no longer move together. */
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "tests/fixtures/mpi_unit.h"

enum { LISTEN_S = 2 };

static void ranks_that_answer_are_not_named(void) {
    cpa_control control;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    for (int call = 0; call < 3; call++) {
        if (control.rank == control.size - 1) usleep(100000); /* late, but in time */
        double begin = cpa_clock_now();
        CU_ASSERT_EQUAL(cpa_control_missing_ranks(&control, 10 * LISTEN_S), 0);
        CU_ASSERT(cpa_clock_now() - begin < 10 * LISTEN_S); /* who has heard all listens no longer */
        MPI_Barrier(MPI_COMM_WORLD);
    }
    cpa_control_close(&control);
}

static void a_rank_that_is_silent_is_named_by_all_others(void) {
    cpa_control control;
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, NULL), CPA_OK);
    int silent = control.size > 2 ? 1 : control.size - 1;
    if (control.rank != silent) {
        double begin = cpa_clock_now();
        CU_ASSERT_EQUAL(cpa_control_missing_ranks(&control, LISTEN_S), (uint64_t)1 << silent);
        CU_ASSERT(cpa_clock_now() - begin >= LISTEN_S);
    }
    /* Messages that nobody took do no harm to the channel. */
    double one = 1;
    CU_ASSERT_EQUAL(cpa_control_sum(&control, &one, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(one, control.size);
    cpa_control_close(&control);
}

static const cpa_test tests[] = {
    {"ranks that answer are not named", ranks_that_answer_are_not_named},
    {"a rank that is silent is named by all others", a_rank_that_is_silent_is_named_by_all_others},
};

CPA_MPI_TEST_MAIN("missing ranks", tests)
