/* Arrays that grow. */
#include "base/array.h"

#include <stdlib.h>

#include "tests/fixtures/unit.h"

static void entries_are_kept_as_the_array_grows(void) {
    int32_t *values = NULL;
    int64_t capacity = 0, moves = 0;
    for (int32_t i = 0; i < 10000; i++) {
        const int64_t before = capacity;
        CU_ASSERT_FATAL(cpa_array_reserve(&values, &capacity, i + 1, sizeof *values));
        CU_ASSERT_FATAL(capacity > i);
        moves += capacity != before;
        values[i] = i;
    }
    int wrong = 0;
    for (int32_t i = 0; i < 10000; i++) wrong += values[i] != i;
    CU_ASSERT_EQUAL(wrong, 0);
    CPA_ASSERT_ORDER(moves, <, 20);
    free(values);
}

static void room_for_nothing_is_an_array(void) {
    char *bytes = NULL;
    int64_t capacity = 0;
    CU_ASSERT(cpa_array_reserve(&bytes, &capacity, 0, 1));
    CU_ASSERT_PTR_NOT_NULL(bytes);
    free(bytes);
}

static void what_cannot_be_had_changes_nothing(void) {
    int64_t *values = NULL, capacity = 0;
    CU_ASSERT_FATAL(cpa_array_reserve(&values, &capacity, 3, sizeof *values));
    int64_t *const array = values, room = capacity;
    values[2] = 7;
    CU_ASSERT(!cpa_array_reserve(&values, &capacity, INT64_MAX / 2, sizeof *values));
    CU_ASSERT_PTR_EQUAL(values, array);
    CU_ASSERT_EQUAL(capacity, room);
    CU_ASSERT_EQUAL(values[2], 7);
    free(values);
}

static const cpa_test tests[] = {
    {"entries are kept as the array grows", entries_are_kept_as_the_array_grows},
    {"room for nothing is an array", room_for_nothing_is_an_array},
    {"what cannot be had changes nothing", what_cannot_be_had_changes_nothing},
};

CPA_TEST_MAIN("array", tests)
