/* JSON for which there is no memory is not called wrong. */
#include "base/json_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fixtures/unit.h"

static int allocations, failing; /* the number of the one that fails, from 1; 0: none */

static void *allocate(size_t bytes) {
    if (++allocations != failing) return malloc(bytes);
    errno = ENOMEM;
    return NULL;
}

static void want_of_memory_is_told_from_wrong_text(void) {
    static const char text[] = "{\"a\": [1, 2.5, \"b\", {\"c\": null}], \"d\": true}",
                      wrong[] = "{\"a\": [1, 2.5, \"b\"";
    json_error_t why;
    json_t *value = NULL;
    json_set_alloc_funcs(allocate, free);
    allocations = failing = 0;
    CU_ASSERT_EQUAL_FATAL(cpa_json_parse(text, strlen(text), 0, &value, &why), CPA_OK);
    json_decref(value);
    value = NULL;
    const int all = allocations;
    CPA_ASSERT_ORDER(all, >, 10);
    for (int i = 1; i <= all; i++) {
        allocations = 0, failing = i;
        CU_ASSERT_EQUAL(cpa_json_parse(text, strlen(text), 0, &value, &why), CPA_NO_MEMORY);
        CU_ASSERT_PTR_NULL(value);
    }
    failing = 0;
    errno = ENOMEM; /* of an earlier call */
    CU_ASSERT_EQUAL(cpa_json_parse(wrong, strlen(wrong), 0, &value, &why), CPA_INVALID);
    json_set_alloc_funcs(malloc, free);
}

static const cpa_test tests[] = {
    {"want of memory is told from wrong text", want_of_memory_is_told_from_wrong_text},
};

CPA_TEST_MAIN("JSON files", tests)
