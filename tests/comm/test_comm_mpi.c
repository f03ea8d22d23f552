/* Communicators from MPI: where MPI cannot be used they are refused with a line. */
#include <string.h>

#include <cpattn/mpi.h>

#include "tests/fixtures/unit.h"

static void expect_refusal(MPI_Comm mpi_comm, const char *expected) {
    cpa_comm *comm = NULL;
    cpa_error err = {CPA_OK, ""};
    CU_ASSERT_EQUAL(cpa_comm_from_mpi(mpi_comm, NULL, &comm, &err), CPA_INVALID);
    CU_ASSERT_PTR_NULL(comm);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, expected));
}

/* One process walks through the life of MPI. */
static void mpi_that_cannot_be_used_is_refused(void) {
    int level = MPI_THREAD_FUNNELED;
    expect_refusal(MPI_COMM_WORLD, "not initialised");
    MPI_Init_thread(NULL, NULL, MPI_THREAD_SINGLE, &level);
    if (level < MPI_THREAD_FUNNELED) expect_refusal(MPI_COMM_WORLD, "MPI_THREAD_SINGLE");
    MPI_Finalize();
    expect_refusal(MPI_COMM_WORLD, "finalised");
}

static void no_communicator_of_nccl_is_refused(void) {
    cpa_comm *comm = NULL;
    CU_ASSERT_NOT_EQUAL(cpa_comm_from_nccl(NULL, NULL, &comm, NULL), CPA_OK);
    CU_ASSERT_PTR_NULL(comm);
}

static const cpa_test tests[] = {
    {"MPI that cannot be used is refused", mpi_that_cannot_be_used_is_refused},
    {"no communicator of NCCL is refused", no_communicator_of_nccl_is_refused},
};

int main(int argc, char **argv) {
    return cpa_test_main(argc, argv, "communicators from MPI", tests, 2);
}
