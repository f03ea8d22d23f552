/* The back end that a shared test program runs on, and test memory on it.
 *
 * CPATTN_TEST_DEVICE names the back end: host (the default), cuda, or cuda:simple, cuda:portable, cuda:hopper, which
 * hold attend to those kernels, or cuda:small, the portable ones on a device of little shared memory. Rank r of a job
 * takes device r, modulo the number of devices. What tests compute on they upload, and what they look at they download,
 * on every back end alike. Functions abort on a failure that no test is about. */
#ifndef CPA_TESTS_DEVICE_FIXTURE_H
#define CPA_TESTS_DEVICE_FIXTURE_H

#include <cpattn/ops.h>

/* The exit code by which a test program says that it was skipped. */
enum { CPA_TEST_SKIPPED = 77 };

/* 1, and a line that says why, if this process has no such device; 2, with a line, if CPATTN_TEST_DEVICE is wrong. */
int cpa_test_device_missing(void);
/* The same for a program that tests CUDA alone: the host is no such device either. */
int cpa_test_cuda_missing(void);

/* Options that open the device; for tests that leave the opening to the library. */
cpa_device_options cpa_test_device_options(int32_t threads);
void cpa_test_device_open(int32_t threads, cpa_device **device, cpa_stream **stream);
void cpa_test_device_close(cpa_device *device, cpa_stream *stream);

/* Whether a result has the same bits whatever the batch, the segments and the algorithm, as the host back end promises.
 * Where it does not, tests hold each result to the tolerance of the reference instead. */
int cpa_test_promises_bits(void);

/* A copy of host memory on the stream's device; free it with cpa_test_free. */
void *cpa_test_upload(cpa_stream *stream, const void *host, int64_t bytes);
/* Waits for the stream, then copies back. */
void cpa_test_download(cpa_stream *stream, void *host, const void *device, int64_t bytes);
void cpa_test_free(cpa_stream *stream, void *device);

/* The main of a shared test program; needs tests/unit.h, or tests/mpi_unit.h for the second. */
#define CPA_DEVICE_TEST_MAIN(suite, tests)                                                                             \
    int main(void) {                                                                                                   \
        int missing = cpa_test_device_missing();                                                                       \
        if (missing) return missing == 1 ? CPA_TEST_SKIPPED : 2;                                                       \
        return cpa_test_main(suite, tests, (int)(sizeof(tests) / sizeof((tests)[0])));                                 \
    }
#define CPA_MPI_DEVICE_TEST_MAIN(suite, tests)                                                                         \
    CPA_MPI_TEST_MAIN_UNLESS(cpa_test_device_missing(), suite, tests, (int)(sizeof(tests) / sizeof((tests)[0])))
/* The second with another question in place of cpa_test_device_missing, and for the first n_tests of the tests. */
#define CPA_MPI_TEST_MAIN_UNLESS(is_missing, suite, tests, n_tests)                                                    \
    int main(int argc, char **argv) {                                                                                  \
        MPI_Init(&argc, &argv);                                                                                        \
        int missing = is_missing, failed = 0;                                                                          \
        if (!missing) failed = cpa_mpi_run_tests(suite, tests, n_tests);                                               \
        MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);                                     \
        MPI_Finalize();                                                                                                \
        return missing == 1 ? CPA_TEST_SKIPPED : missing ? missing : failed;                                           \
    }

#endif
