/* What reports say of the links between ranks. */
#include <stdlib.h>
#include <string.h>

#include "program/links.h"
#include "tests/fixtures/unit.h"

enum { RANKS = 4 };

static void join(cpa_link *links, int a, int b, cpa_link link) {
    links[a * RANKS + b] = links[b * RANKS + a] = link;
}

static void a_kind_that_all_pairs_have_is_said_once(void) {
    cpa_link links[RANKS * RANKS] = {{.kind = CPA_LINK_UNKNOWN}};
    char text[256];
    for (int a = 0; a < RANKS; a++)
        for (int b = 0; b < a; b++)
            join(links, a, b, (cpa_link){.kind = CPA_LINK_NVLINK, .nvlinks = 18, .bandwidth = 350.125e9 + 1e9 * b});
    CU_ASSERT_STRING_EQUAL(cpa_links_describe("nccl", links, RANKS, text, sizeof text),
                           "nccl; 6 pairs of ranks joined by NVLink (18 links) at 350.12 to 352.12 GB/s each way");
}

/* Two hosts of two ranks; between them one pair was not measured. */
static void kinds_are_counted_with_their_rates(void) {
    cpa_link links[RANKS * RANKS] = {{.kind = CPA_LINK_UNKNOWN}};
    cpa_link_group groups[CPA_LINK_KINDS];
    char text[256];
    for (int a = 0; a < 2; a++)
        for (int b = 2; b < RANKS; b++)
            join(links, a, b, (cpa_link){.kind = CPA_LINK_SOCKETS, .bandwidth = a + b < 4 ? 0.125e9 : 0});
    join(links, 0, 1, (cpa_link){.kind = CPA_LINK_SHARED_MEMORY, .bandwidth = 2e9});
    join(links, 2, 3, (cpa_link){.kind = CPA_LINK_SHARED_MEMORY, .bandwidth = 3e9});
    CU_ASSERT_EQUAL(cpa_links_group(links, RANKS, groups), 2);
    CU_ASSERT_EQUAL(groups[0].pairs, 2);
    CU_ASSERT_EQUAL(groups[0].least, 2e9);
    CU_ASSERT_EQUAL(groups[0].most, 3e9);
    CU_ASSERT_EQUAL(groups[1].pairs, 4);
    CU_ASSERT_EQUAL(groups[1].least, 0.125e9);
    CU_ASSERT_STRING_EQUAL(cpa_links_describe("mpi", links, RANKS, text, sizeof text),
                           "mpi; 2 pairs of ranks joined by shared memory at 2.00 to 3.00 GB/s each way, 4 by sockets "
                           "at 0.12 GB/s each way");
}

static void what_is_not_known_is_not_said(void) {
    cpa_link links[4] = {{.kind = CPA_LINK_UNKNOWN}};
    char text[256], little[8];
    CU_ASSERT_STRING_EQUAL(cpa_links_describe("peer", links, 2, text, sizeof text),
                           "peer; 1 pair of ranks joined by an unknown link");
    CU_ASSERT_STRING_EQUAL(cpa_links_describe("peer", links, 2, little, sizeof little), "peer; 1");
    links[1].kind = links[2].kind = CPA_LINK_NVLINK;
    CU_ASSERT_STRING_EQUAL(cpa_links_describe("peer", links, 2, text, sizeof text),
                           "peer; 1 pair of ranks joined by NVLink");
    CU_ASSERT_STRING_EQUAL(cpa_links_describe("mpi", links, 1, text, sizeof text), "mpi");
}

static void variables_of_the_transport_are_told(void) {
    const char *value;
    unsetenv("NCCL_P2P_DISABLE");
    unsetenv("NCCL_NET");
    unsetenv("OMPI_MCA_btl");
    CU_ASSERT_PTR_NULL(cpa_links_variable("nccl", 0, &value));
    setenv("NCCL_P2P_DISABLE", "1", 1);
    setenv("NCCL_NET", "Socket", 1);
    setenv("OMPI_MCA_btl", "tcp,self", 1);
    CU_ASSERT_STRING_EQUAL(cpa_links_variable("nccl", 0, &value), "NCCL_P2P_DISABLE");
    CU_ASSERT_STRING_EQUAL(value, "1");
    CU_ASSERT_STRING_EQUAL(cpa_links_variable("nccl", 1, &value), "NCCL_NET");
    CU_ASSERT_STRING_EQUAL(value, "Socket");
    CU_ASSERT_PTR_NULL(cpa_links_variable("nccl", 2, &value));
    CU_ASSERT_PTR_NULL(cpa_links_variable("peer", 0, &value));
}

static const cpa_test tests[] = {
    {"a kind that all pairs have is said once", a_kind_that_all_pairs_have_is_said_once},
    {"kinds are counted with their rates", kinds_are_counted_with_their_rates},
    {"what is not known is not said", what_is_not_known_is_not_said},
    {"variables of the transport are told", variables_of_the_transport_are_told},
};
CPA_TEST_MAIN("words of links", tests)
