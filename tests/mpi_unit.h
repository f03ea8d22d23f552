/* The frame of a CUnit test program that runs under mpirun: every rank runs every test, rank 0 reports, the others
 * print only what failed, and the program exits 1 on every rank if a test failed on any. A test must reach its
 * collective calls on every rank whatever failed before, so it asserts without the _FATAL forms. */
#ifndef CPA_TESTS_MPI_UNIT_H
#define CPA_TESTS_MPI_UNIT_H

#include <mpi.h>
#include <stdio.h>

#include "tests/unit.h"

static inline int cpa_mpi_run_tests(const char *suite_name, const cpa_test *tests, int n_tests) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 0) return cpa_test_main(suite_name, tests, n_tests);

    if (CU_initialize_registry() != CUE_SUCCESS) return 1;
    CU_pSuite suite = CU_add_suite(suite_name, NULL, NULL);
    for (int i = 0; i < n_tests; i++) CU_add_test(suite, tests[i].name, tests[i].run);
    CU_run_all_tests();
    int failed = CU_get_number_of_tests_run() != (unsigned)n_tests;
    for (const CU_FailureRecord *f = CU_get_failure_list(); f; f = f->pNext) {
        printf("rank %d: %s: %s:%u: %s\n", rank, f->pTest->pName, f->strFileName, f->uiLineNumber, f->strCondition);
        failed = 1;
    }
    CU_cleanup_registry();
    return failed;
}

#define CPA_MPI_TEST_MAIN(suite, tests)                                                                                \
    int main(int argc, char **argv) {                                                                                  \
        MPI_Init(&argc, &argv);                                                                                        \
        int failed = cpa_mpi_run_tests(suite, tests, (int)(sizeof(tests) / sizeof((tests)[0])));                       \
        MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);                                     \
        MPI_Finalize();                                                                                                \
        return failed;                                                                                                 \
    }

#endif
