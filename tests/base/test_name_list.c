/* Lists of names in one text. */
#include "base/name_list.h"

#include <string.h>

#include "tests/fixtures/unit.h"

static void names_are_there_once_in_the_order_in_which_they_came(void) {
    char list[64] = "";
    cpa_name_list_add(list, sizeof list, "");
    CU_ASSERT_STRING_EQUAL(list, "");
    cpa_name_list_add(list, sizeof list, "decode");
    cpa_name_list_add(list, sizeof list, "decode_blocks");
    cpa_name_list_add(list, sizeof list, "dec");
    cpa_name_list_add(list, sizeof list, "decode, simple, decode_blocks");
    CU_ASSERT_STRING_EQUAL(list, "decode, decode_blocks, dec, simple");
}

static void a_name_without_room_is_left_out_whole(void) {
    char list[13] = "one";
    memset(list + 4, 'x', sizeof list - 4);
    cpa_name_list_add(list, 12, "eightish, three, four, 2");
    CU_ASSERT_STRING_EQUAL(list, "one, three");
    CU_ASSERT_EQUAL(list[12], 'x');
    cpa_name_list_add(list, 12, "");
    CU_ASSERT_STRING_EQUAL(list, "one, three");
}

static const cpa_test tests[] = {
    {"names are there once, in the order in which they came", names_are_there_once_in_the_order_in_which_they_came},
    {"a name without room is left out whole", a_name_without_room_is_left_out_whole},
};

CPA_TEST_MAIN("name list", tests)
