/* Which CUDA device each rank of a host takes, by what the ranks see. */
#include "program/devices.h"
#include "tests/fixtures/unit.h"

#define A "0000:3b:00.0"
#define B "0000:86:00.0"

static void ranks_that_see_all_devices_take_one_each(void) {
    const cpa_visible_devices seen[] = {{2, A}, {2, A}}, more[] = {{8, A}, {4, A}, {3, A}};
    for (int32_t r = 0; r < 2; r++) CU_ASSERT_EQUAL(cpa_devices_choose(seen, 2, r), r);
    for (int32_t r = 0; r < 3; r++) CU_ASSERT_EQUAL(cpa_devices_choose(more, 3, r), r);
}

static void ranks_that_see_a_device_of_their_own_take_it(void) {
    const cpa_visible_devices seen[] = {{1, A}, {1, B}};
    for (int32_t r = 0; r < 2; r++) CU_ASSERT_EQUAL(cpa_devices_choose(seen, 2, r), 0);
}

static void ranks_that_would_share_a_device_are_refused(void) {
    const cpa_visible_devices same[] = {{1, A}, {1, A}}, unknown[] = {{1, ""}, {1, ""}}, none[] = {{1, A}, {0, ""}},
                              few[] = {{2, A}, {2, A}, {2, A}};
    CU_ASSERT_EQUAL(cpa_devices_choose(same, 2, 1), -1);
    CU_ASSERT_EQUAL(cpa_devices_choose(unknown, 2, 0), -1);
    CU_ASSERT_EQUAL(cpa_devices_choose(none, 2, 0), -1);
    CU_ASSERT_EQUAL(cpa_devices_choose(few, 3, 2), -1);
}

static const cpa_test tests[] = {
    {"ranks that see all devices take one each", ranks_that_see_all_devices_take_one_each},
    {"ranks that see a device of their own take it", ranks_that_see_a_device_of_their_own_take_it},
    {"ranks that would share a device are refused", ranks_that_would_share_a_device_are_refused},
};
CPA_TEST_MAIN("devices", tests)
