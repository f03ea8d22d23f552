/* NCCL is loaded at run time: what a user reads where that fails. Needs no device. */
#include <string.h>

#include "comm/nccl/library.h"
#include "tests/fixtures/unit.h"

static void test_a_missing_library_is_named_with_what_to_do(void) {
    cpa_nccl nccl;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(cpa_nccl_load("libnccl-absent.so.2", &nccl, &err), CPA_COMM);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "libnccl-absent.so.2"));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "LD_LIBRARY_PATH"));
    CU_ASSERT_PTR_NULL(strchr(err.message, '\n'));
}

static void test_a_library_that_is_too_old_is_named(void) {
    cpa_nccl nccl;
    cpa_error err = {.message = ""};
    CU_ASSERT_EQUAL(cpa_nccl_load("libm.so.6", &nccl, &err), CPA_COMM);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "libm.so.6 has no function nccl"));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.message, "NCCL 2.18 or later"));
}

static const cpa_test TESTS[] = {
    {"a missing library is named with what to do", test_a_missing_library_is_named_with_what_to_do},
    {"a library that is too old is named", test_a_library_that_is_too_old_is_named},
};
CPA_TEST_MAIN("nccl library", TESTS)
