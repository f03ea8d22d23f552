/* Ten thousand strings of all scripts, the same as string() in tests/data/make_text.py makes. */
#ifndef CPA_TESTS_STRINGS_H
#define CPA_TESTS_STRINGS_H

#include <stddef.h>

enum { CPA_TEST_STRINGS = 10000, CPA_TEST_STRINGS_GROUP = 100, CPA_TEST_STRING_BYTES = 2048 };

/* What strings are made of; aborts if the file is not as it should be. Free it with cpa_test_strings_close. */
typedef struct cpa_test_strings cpa_test_strings;

cpa_test_strings *cpa_test_strings_open(void);
void cpa_test_strings_close(cpa_test_strings *strings);

/* Makes a string; returns its bytes. */
size_t cpa_test_strings_make(const cpa_test_strings *strings, int index, char out[CPA_TEST_STRING_BYTES]);

#endif
