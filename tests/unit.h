/* The frame of a CUnit test program: a table of named tests and a main that runs them and exits 1 if one fails. */
#ifndef CPA_TESTS_UNIT_H
#define CPA_TESTS_UNIT_H

#include <CUnit/Basic.h>

typedef struct cpa_test {
    const char *name;
    void (*run)(void);
} cpa_test;

/* Runs the tests; the exit code of the program. */
static inline int cpa_test_main(const char *suite_name, const cpa_test *tests, int n_tests) {
    if (CU_initialize_registry() != CUE_SUCCESS) return 1;
    CU_pSuite suite = CU_add_suite(suite_name, NULL, NULL);
    for (int i = 0; suite && i < n_tests; i++) {
        if (!CU_add_test(suite, tests[i].name, tests[i].run)) suite = NULL;
    }
    if (!suite) return 1;
    CU_basic_set_mode(CU_BRM_VERBOSE);
    CU_ErrorCode ran = CU_basic_run_tests();
    unsigned failed = CU_get_number_of_failures();
    CU_cleanup_registry();
    return ran == CUE_SUCCESS && failed == 0 ? 0 : 1;
}

#define CPA_TEST_MAIN(suite, tests)                                                                                    \
    int main(void) {                                                                                                   \
        return cpa_test_main(suite, tests, (int)(sizeof(tests) / sizeof((tests)[0])));                                 \
    }

#endif
