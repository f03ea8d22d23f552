/* Who is named when ranks no longer move together. */
#include <stdio.h>
#include <unistd.h>

#include <cpattn/mpi.h>

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
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 10 * LISTEN_S); /* who has heard all listens no longer */
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
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, >=, LISTEN_S);
    }
    /* Messages that nobody took do no harm to the channel. */
    double one = 1;
    CU_ASSERT_EQUAL(cpa_control_sum(&control, &one, 1, NULL), CPA_OK);
    CU_ASSERT_EQUAL(one, control.size);
    cpa_control_close(&control);
}

/* Who waits in calls 3 to 6 hears of the refusal of one of them, and nobody else does. */
static void refusals_are_heard_by_those_who_wait_in_the_refused_calls(void) {
    enum { CHANNEL = 7, REFUSED = 5 };
    static const struct {
        cpa_calls calls;
        cpa_status expected;
    } cases[] = {
        {{CHANNEL, 3, 6}, CPA_INVALID}, {{CHANNEL, REFUSED, REFUSED}, CPA_INVALID},
        {{CHANNEL, 0, 4}, CPA_OK},      {{CHANNEL, 6, 9}, CPA_OK},
        {{CHANNEL + 1, 3, 6}, CPA_OK},  {{-1, 3, 6}, CPA_OK},
    };
    cpa_comm *comm = cpa_test_comm();
    cpa_error err = {CPA_OK, ""};
    const int32_t last = cpa_comm_size(comm) - 1;
    CU_ASSERT_EQUAL(cpa_comm_barrier(comm, NULL), CPA_OK);
    if (cpa_comm_rank(comm) == last) {
        const cpa_error why = {CPA_INVALID, "q is NULL"};
        cpa_comm_refuse(comm, CHANNEL, REFUSED, 0, &why);
    } else {
        const double begin = cpa_clock_now();
        cpa_comm_begin_wait(comm, cases[0].calls);
        while (cpa_comm_check(comm, -1, &err) == CPA_OK && cpa_clock_now() - begin < 30) usleep(1000);
        CPA_ASSERT_ORDER(cpa_clock_now() - begin, <, 20);
        char expected[32];
        snprintf(expected, sizeof expected, "rank %d: q is NULL", last);
        CU_ASSERT_STRING_EQUAL(err.message, expected);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            cpa_comm_begin_wait(comm, cases[i].calls);
            CU_ASSERT_EQUAL(cpa_comm_check(comm, -1, &err), cases[i].expected);
        }
        cpa_comm_end_wait(comm);
        CU_ASSERT_EQUAL(cpa_comm_check(comm, -1, &err), CPA_OK);
    }
    CU_ASSERT_EQUAL(cpa_comm_barrier(comm, NULL), CPA_OK);
}

/* Also one that has refused a call before. Two that give up at once are known to none of them. */
static void a_rank_that_gives_up_is_known_to_those_that_have_not(void) {
    cpa_comm *comm = NULL;
    CU_ASSERT_EQUAL_FATAL(cpa_comm_from_mpi(MPI_COMM_WORLD, NULL, &comm, NULL), CPA_OK);
    const int32_t last = cpa_comm_size(comm) - 1;
    CU_ASSERT_EQUAL(cpa_comm_who_gave_up(comm, NULL), -1);
    MPI_Barrier(MPI_COMM_WORLD);
    if (cpa_comm_rank(comm) == last) {
        const cpa_error why = {CPA_NO_MEMORY, "no memory for a layer"};
        cpa_comm_refuse(comm, 7, 1, 1, &why);
        CU_ASSERT_EQUAL(cpa_comm_who_gave_up(comm, NULL), -1);
        cpa_comm_abort(comm, CPA_NO_MEMORY, "no memory for a step");
    }
    const double begin = cpa_clock_now();
    while (cpa_comm_who_gave_up(comm, NULL) < 0 && cpa_comm_rank(comm) != last && cpa_clock_now() - begin < 30)
        usleep(1000);
    CU_ASSERT_EQUAL(cpa_comm_who_gave_up(comm, NULL), cpa_comm_rank(comm) == last ? -1 : last);
    cpa_comm_abort(comm, CPA_NO_MEMORY, "what another rank is known to have said is not said again");
    cpa_error why = {CPA_OK, ""};
    char expected[64] = "";
    if (cpa_comm_rank(comm) != last) snprintf(expected, sizeof expected, "rank %d: no memory for a step", last);
    CU_ASSERT_EQUAL(cpa_comm_who_gave_up(comm, &why), cpa_comm_rank(comm) == last ? -1 : last);
    CU_ASSERT_STRING_EQUAL(why.message, expected);
    MPI_Barrier(MPI_COMM_WORLD);
    cpa_comm_destroy(comm);
}

static const cpa_test tests[] = {
    {"refusals are heard by those who wait in the refused calls",
     refusals_are_heard_by_those_who_wait_in_the_refused_calls},
    {"a rank that gives up is known to those that have not", a_rank_that_gives_up_is_known_to_those_that_have_not},
    {"ranks that answer are not named", ranks_that_answer_are_not_named},
    {"a rank that is silent is named by all others", a_rank_that_is_silent_is_named_by_all_others},
};

CPA_MPI_TEST_MAIN("missing ranks", tests)
