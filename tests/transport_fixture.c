#include "transport_fixture.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#ifdef CPA_HAVE_CUDA
#include "comm/device_transport.h"
#endif

static const char *transport_name(void) {
    const char *name = getenv("CPATTN_TEST_TRANSPORT");
    return name && name[0] ? name : "peer";
}

int cpa_test_transport_missing(void) {
    int missing = cpa_test_device_missing(), rank, ranks;
    if (missing || cpa_test_device_options(0).backend == CPA_BACKEND_HOST) return missing;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int devices = cpa_device_count(CPA_BACKEND_CUDA), nccl = strcmp(transport_name(), "nccl") == 0;
    if (!nccl && strcmp(transport_name(), "peer") != 0) {
        if (rank == 0) fprintf(stderr, "CPATTN_TEST_TRANSPORT: found '%s', expected peer or nccl\n", transport_name());
        return 2;
    }
    if (!nccl || devices >= ranks) return 0;
    if (rank == 0)
        printf("skipped: found %d CUDA devices for %d ranks, of which nccl wants one each\n", devices, ranks);
    return 1;
}

const cpa_transport_table *cpa_test_transport(void) {
#ifdef CPA_HAVE_CUDA
    if (cpa_test_device_options(0).backend == CPA_BACKEND_CUDA)
        return strcmp(transport_name(), "nccl") == 0 ? &cpa_transport_nccl : &cpa_transport_peer;
#endif
    return &cpa_transport_mpi;
}

cpa_transport_kind cpa_test_transport_kind(void) {
    if (!getenv("CPATTN_TEST_TRANSPORT")) return CPA_TRANSPORT_AUTO;
    return strcmp(transport_name(), "nccl") == 0 ? CPA_TRANSPORT_NCCL : CPA_TRANSPORT_PEER;
}

uint64_t cpa_test_mixed(uint64_t x) {
    return cpa_mix64(x + CPA_GOLDEN);
}

uint8_t cpa_test_pattern(int from, int to, uint64_t exchange, int64_t i) {
    uint64_t word = (uint64_t)from << 40 ^ (uint64_t)to << 20 ^ exchange ^ (uint64_t)(i / 8);
    return (uint8_t)cpa_test_mixed(word) ^ (uint8_t)i;
}
