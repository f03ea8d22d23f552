/* What joins each two ranks: all of them on this host, over MPI or TCP, or with devices. */
#include <stdlib.h>
#include <string.h>

#include "comm/links.h"
#include "comm/transports.h"
#include "kernels/device.h"
#include "tests/fixtures/device_fixture.h"
#include "tests/fixtures/mpi_unit.h"

static void kinds_follow_from_hosts_messages_and_devices(void) {
    const struct {
        int one_host;
        const char *communicator;
        int has_rdma;
        cpa_link_kind kind;
    } rows[] = {
        {1, "mpi", 0, CPA_LINK_SHARED_MEMORY}, {1, "mpi", 1, CPA_LINK_SHARED_MEMORY},
        {1, "tcp", 0, CPA_LINK_LOOPBACK},      {0, "mpi", 0, CPA_LINK_SOCKETS},
        {0, "mpi", 1, CPA_LINK_RDMA},          {0, "tcp", 1, CPA_LINK_SOCKETS},
        {0, "", 0, CPA_LINK_SOCKETS},          {0, "", 1, CPA_LINK_RDMA},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        CU_ASSERT_EQUAL(cpa_link_kind_of(rows[i].one_host, rows[i].communicator, rows[i].has_rdma), rows[i].kind);
}

static void kinds_have_names_of_their_own(void) {
    for (int kind = 0; kind <= CPA_LINK_RDMA; kind++) {
        for (int other = 0; other < kind; other++)
            CU_ASSERT_STRING_NOT_EQUAL(cpa_link_kind_name((cpa_link_kind)kind),
                                       cpa_link_kind_name((cpa_link_kind)other));
    }
}

/* The links of two devices of this host, of which the PCI addresses are known. */
static void expect_device_link(const cpa_link *link, const char *a, const char *b) {
    if (strcmp(a, b) == 0) CU_ASSERT_EQUAL(link->kind, CPA_LINK_SAME_DEVICE);
    if (strcmp(a, b) != 0) CU_ASSERT(link->kind >= CPA_LINK_NVLINK && link->kind <= CPA_LINK_HOST_MEMORY);
    CU_ASSERT(link->nvlinks == 0 || link->kind == CPA_LINK_NVLINK);
}

static void every_pair_of_this_host_is_known_alike_to_all(void) {
    static cpa_link links[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS], of_first[CPA_COMM_MAX_RANKS * CPA_COMM_MAX_RANKS];
    static char pci[CPA_COMM_MAX_RANKS][CPA_PCI_ADDRESS_BYTES];
    const char *over = getenv("CPATTN_TEST_COMM");
    const cpa_device_options options = cpa_test_device_options(1);
    const cpa_link_kind on_host = over && strcmp(over, "tcp") == 0 ? CPA_LINK_LOOPBACK : CPA_LINK_SHARED_MEMORY;
    char mine[CPA_PCI_ADDRESS_BYTES] = "";
    cpa_device *device;
    cpa_stream *stream;
    cpa_control control;
    cpa_error err = {CPA_OK, ""};
    cpa_test_device_open(1, &device, &stream);
    cpa_device_pci_address(options.backend, options.ordinal, mine);
    CU_ASSERT_EQUAL(cpa_control_open(cpa_test_comm(), &control, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_links_find(&control, options.backend, links, &err), CPA_OK);
    CU_ASSERT_EQUAL(cpa_control_all_gather(&control, mine, sizeof mine, pci, &err), CPA_OK);
    const int32_t size = control.size;
    for (int32_t a = 0; a < size; a++) {
        CU_ASSERT_EQUAL(links[a * size + a].kind, CPA_LINK_UNKNOWN);
        for (int32_t b = 0; b < size; b++) {
            const cpa_link *link = &links[a * size + b];
            CU_ASSERT_EQUAL(memcmp(link, &links[b * size + a], sizeof *link), 0);
            CU_ASSERT_EQUAL(link->bandwidth, 0);
            if (a == b) continue;
            if (options.backend == CPA_BACKEND_HOST)
                CU_ASSERT_EQUAL(link->kind, on_host);
            else
                expect_device_link(link, pci[a], pci[b]);
        }
    }
    memcpy(of_first, links, sizeof links);
    CU_ASSERT_EQUAL(cpa_control_bcast(&control, of_first, sizeof of_first, 0, &err), CPA_OK);
    CU_ASSERT_EQUAL(memcmp(links, of_first, sizeof links), 0);
    cpa_control_close(&control);
    cpa_test_device_close(device, stream);
}

static void messages_are_named_after_their_communicator(void) {
    const char *over = getenv("CPATTN_TEST_COMM");
    CU_ASSERT_STRING_EQUAL(cpa_links_carrier(&cpa_transport_host, cpa_test_comm()), over ? over : "mpi");
    for (int i = 0; i < CPA_TRANSPORTS; i++) {
        const cpa_transport_row *row = &cpa_transport_rows[i];
        if (row->memory == CPA_BACKEND_CUDA && row->table)
            CU_ASSERT_STRING_EQUAL(cpa_links_carrier(row->table, cpa_test_comm()), row->name);
    }
}

static const cpa_test tests[] = {
    {"kinds follow from hosts, messages and devices", kinds_follow_from_hosts_messages_and_devices},
    {"kinds have names of their own", kinds_have_names_of_their_own},
    {"every pair of this host is known alike to all", every_pair_of_this_host_is_known_alike_to_all},
    {"messages are named after their communicator", messages_are_named_after_their_communicator},
};
CPA_MPI_DEVICE_TEST_MAIN("links", tests)
