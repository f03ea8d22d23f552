/* Which cores the ranks of a host take, over synthetic machines. */
#include <hwloc.h>
#include <stdio.h>
#include <string.h>

#include "program/cores.h"
#include "tests/fixtures/unit.h"

enum { MAX_RANKS = 8 };

/* Two packages of eight cores with two threads each: CPUs 0-15 and 16-31. */
static const char *const TWO_PACKAGES = "package:2 numa:1 core:8 pu:2";

/* Asserts what each of n ranks takes on a machine; near[r] and want[r] are lists of CPUs, as "0-3". */
static void expect_shares(const char *machine, const char *const *near_lists, int n, const char *const *want,
                          int want_near) {
    hwloc_topology_t topology;
    hwloc_bitmap_t near[MAX_RANKS], cores = hwloc_bitmap_alloc();
    hwloc_topology_init(&topology);
    CU_ASSERT_EQUAL_FATAL(hwloc_topology_set_synthetic(topology, machine), 0);
    hwloc_topology_load(topology);
    for (int r = 0; r < n; r++) {
        near[r] = hwloc_bitmap_alloc();
        hwloc_bitmap_list_sscanf(near[r], near_lists[r]);
    }
    for (int r = 0; r < n; r++) {
        char got[128];
        int near_device = -1;
        int32_t count = cpa_cores_share(topology, near, n, r, cores, &near_device);
        hwloc_bitmap_list_snprintf(got, sizeof got, cores);
        CU_ASSERT_STRING_EQUAL(got, want[r]);
        if (strcmp(got, want[r]) != 0) printf("\n    rank %d: %s, expected %s\n", r, got, want[r]);
        CU_ASSERT_EQUAL(count, hwloc_get_nbobjs_inside_cpuset_by_type(topology, cores, HWLOC_OBJ_CORE));
        CU_ASSERT_EQUAL(near_device, want_near);
    }
    for (int r = 0; r < n; r++) hwloc_bitmap_free(near[r]);
    hwloc_bitmap_free(cores);
    hwloc_topology_destroy(topology);
}

static void ranks_take_cores_near_their_device(void) {
    static const char *const near[] = {"16-31", "0-15"};
    expect_shares(TWO_PACKAGES, near, 2, near, 1);
}

static void ranks_near_the_same_cores_divide_them(void) {
    static const char *const near[] = {"0-15", "16-31", "0-15", "0-15"};
    static const char *const want[] = {"0-3", "16-31", "4-7", "8-11"}; /* eight cores among three: two each */
    expect_shares(TWO_PACKAGES, near, 4, want, 1);
}

static void one_rank_on_one_node_leaves_the_other_free(void) {
    static const char *const near[] = {"16-31"};
    expect_shares(TWO_PACKAGES, near, 1, near, 1);
}

static void without_knowledge_of_one_device_all_cores_are_divided_evenly(void) {
    static const char *const near[] = {"16-31", ""};
    static const char *const want[] = {"0-15", "16-31"};
    expect_shares(TWO_PACKAGES, near, 2, want, 0);
    static const char *const nothing[] = {"", "", ""};
    static const char *const thirds[] = {"0-9", "10-19", "20-29"};
    expect_shares(TWO_PACKAGES, nothing, 3, thirds, 0);
}

static void sets_that_overlap_or_are_too_small_do_not_count(void) {
    static const char *const overlap[] = {"0-15", "8-31"};
    static const char *const halves[] = {"0-15", "16-31"};
    expect_shares(TWO_PACKAGES, overlap, 2, halves, 0);
    static const char *const small[] = {"0-1", "0-1", "2-31"};
    static const char *const thirds[] = {"0-9", "10-19", "20-29"};
    expect_shares(TWO_PACKAGES, small, 3, thirds, 0);
}

static void fewer_cores_than_ranks_give_none(void) {
    static const char *const near[] = {"", "", ""};
    static const char *const none[] = {"", "", ""};
    expect_shares("core:2 pu:1", near, 3, none, 0);
}

static void an_unknown_address_is_near_nothing(void) {
    hwloc_topology_t topology;
    hwloc_bitmap_t near = hwloc_bitmap_alloc();
    hwloc_topology_init(&topology);
    hwloc_topology_set_synthetic(topology, TWO_PACKAGES);
    hwloc_topology_load(topology);
    static const char *const addresses[] = {"", "ffff:ff:1f.7"};
    for (int i = 0; i < 2; i++) {
        hwloc_bitmap_fill(near);
        cpa_cores_near(topology, addresses[i], near);
        CU_ASSERT(hwloc_bitmap_iszero(near));
    }
    hwloc_bitmap_free(near);
    hwloc_topology_destroy(topology);
}

static const cpa_test tests[] = {
    {"ranks take cores near their device", ranks_take_cores_near_their_device},
    {"ranks near the same cores divide them", ranks_near_the_same_cores_divide_them},
    {"one rank on one node leaves the other free", one_rank_on_one_node_leaves_the_other_free},
    {"without knowledge of one device all cores are divided evenly",
     without_knowledge_of_one_device_all_cores_are_divided_evenly},
    {"sets that overlap or are too small do not count", sets_that_overlap_or_are_too_small_do_not_count},
    {"fewer cores than ranks give none", fewer_cores_than_ranks_give_none},
    {"an unknown address is near nothing", an_unknown_address_is_near_nothing},
};
CPA_TEST_MAIN("cores", tests)
