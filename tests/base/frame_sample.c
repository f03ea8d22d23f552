/* Tests that pass and that fail, for test_frame.sh, which looks at what the frame of test programs says of them. */
#include <limits.h>

#include "tests/fixtures/unit.h"

static void counts_to_three(void) {
    CU_ASSERT_EQUAL(1 + 2, 3);
    CU_ASSERT_EQUAL(0.5f + 0.5f, 1);
    CPA_ASSERT_ORDER(-1, <, 2u);
    CPA_ASSERT_ORDER(2, >=, 2.0);
    CU_ASSERT_STRING_EQUAL("three", "three");
}

static void miscounts(void) {
    const int64_t wrong = 7;
    const double error = 0.25;
    const unsigned long most = ULONG_MAX;
    CU_ASSERT_EQUAL(wrong, 0);
    CPA_ASSERT_ORDER(error, <=, 1e-5);
    CU_ASSERT_STRING_EQUAL("one", "two");
    CU_ASSERT_EQUAL(-1, most);
    CU_ASSERT_EQUAL(__builtin_nan(""), 1);
    CU_ASSERT_EQUAL_FATAL(wrong, 8);
    CU_ASSERT_EQUAL(wrong, 9); /* is not reached */
}

static const cpa_test TESTS[] = {{"counts to three", counts_to_three}, {"miscounts", miscounts}};

CPA_TEST_MAIN("frame", TESTS)
