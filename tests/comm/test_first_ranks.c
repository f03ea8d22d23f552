/* Communicators of the first ranks of another: what is sent on both at once stays apart, and more control channels are
 * opened and closed on them than they have tags for at once. */
#include "comm/comm.h"
#include "tests/fixtures/mpi_unit.h"

enum { MOST_TAGS = 2048 };

/* What ranks know of each other by one communicator, of the others on the other. */
static void expect_own_ranks(cpa_comm *comm, int32_t n, int64_t salt) {
    int64_t all[CPA_COMM_MAX_RANKS] = {0};
    const int64_t mine = salt + cpa_comm_rank(comm);
    cpa_error err;
    CU_ASSERT_EQUAL(cpa_comm_size(comm), n);
    CU_ASSERT_EQUAL(cpa_comm_all_gather(comm, &mine, sizeof mine, all, &err), CPA_OK);
    for (int32_t rank = 0; rank < n; rank++) CU_ASSERT_EQUAL(all[rank], salt + rank);
}

static void messages_of_both_stay_apart(void) {
    cpa_comm *whole = cpa_test_comm();
    const int32_t size = cpa_comm_size(whole), rank = cpa_comm_rank(whole);
    for (int32_t n = 1; n <= size; n++) {
        cpa_comm *first = NULL;
        cpa_error err;
        int64_t early = 100 + n, late = 200 + n, got = 0;
        CU_ASSERT_EQUAL(cpa_comm_first_ranks(whole, n, &first, &err), CPA_OK);
        CU_ASSERT_EQUAL(first != NULL, rank < n);
        /* A message of the whole is under way, between two of these ranks, while they talk among themselves. */
        if (n > 1 && rank == 0) CU_ASSERT_EQUAL(cpa_comm_send(whole, 1, &early, sizeof early, &err), CPA_OK);
        if (n > 1 && rank == 0) CU_ASSERT_EQUAL(cpa_comm_send(first, 1, &late, sizeof late, &err), CPA_OK);
        if (first) expect_own_ranks(first, n, 1000 * n);
        if (n > 1 && rank == 1) {
            CU_ASSERT_EQUAL(cpa_comm_receive(first, 0, &got, sizeof got, &err), CPA_OK);
            CU_ASSERT_EQUAL(got, late);
            CU_ASSERT_EQUAL(cpa_comm_receive(whole, 0, &got, sizeof got, &err), CPA_OK);
            CU_ASSERT_EQUAL(got, early);
        }
        expect_own_ranks(whole, size, 7 * n);
        cpa_comm_destroy(first);
    }
}

static void tags_come_round_among_their_own(void) {
    cpa_comm *whole = cpa_test_comm(), *first = NULL;
    cpa_error err;
    CU_ASSERT_EQUAL(cpa_comm_first_ranks(whole, cpa_comm_size(whole), &first, &err), CPA_OK);
    int32_t highest = 0;
    for (int32_t opened = 0; first && opened < 2 * MOST_TAGS / CPA_CONTROL_TAGS; opened++) {
        cpa_control control;
        CU_ASSERT_EQUAL(cpa_control_open(first, &control, &err), CPA_OK);
        if (control.tag > highest) highest = control.tag;
        cpa_control_close(&control);
    }
    CPA_ASSERT_ORDER(highest, <, MOST_TAGS);
    CPA_ASSERT_ORDER(highest, >, MOST_TAGS / 2);
    cpa_comm_destroy(first);
}

static const cpa_test tests[] = {
    {"messages of both stay apart", messages_of_both_stay_apart},
    {"tags come round among their own", tags_come_round_among_their_own},
};
CPA_MPI_TEST_MAIN("first ranks", tests)
