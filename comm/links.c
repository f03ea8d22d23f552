#include "comm/links.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#ifdef CPA_HAVE_CUDA
#include "comm/device/gpu_links.h"
#endif

const char *cpa_link_kind_name(cpa_link_kind kind) {
    switch (kind) {
        case CPA_LINK_UNKNOWN: break;
        case CPA_LINK_SAME_DEVICE: return "one GPU";
        case CPA_LINK_NVLINK: return "NVLink";
        case CPA_LINK_PCIE: return "PCIe";
        case CPA_LINK_PEER_ACCESS: return "peer access";
        case CPA_LINK_HOST_MEMORY: return "host memory";
        case CPA_LINK_SHARED_MEMORY: return "shared memory";
        case CPA_LINK_LOOPBACK: return "loopback";
        case CPA_LINK_SOCKETS: return "sockets";
        case CPA_LINK_RDMA: return "RDMA";
    }
    return "unknown";
}

const char *cpa_links_carrier(const cpa_transport_table *transport, const cpa_comm *comm) {
    return transport == &cpa_transport_host ? comm->ops.name : transport->name;
}

cpa_link_kind cpa_link_kind_of(int one_host, const char *communicator, int has_rdma) {
    const int over_tcp = strcmp(communicator, "tcp") == 0;
    if (one_host) return over_tcp ? CPA_LINK_LOOPBACK : CPA_LINK_SHARED_MEMORY;
    return over_tcp || !has_rdma ? CPA_LINK_SOCKETS : CPA_LINK_RDMA;
}

/* Whether a folder has a file whose name begins like that. */
static int folder_has(const char *folder, const char *prefix) {
    DIR *files = opendir(folder);
    if (!files) return 0;
    int found = 0;
    for (const struct dirent *file = readdir(files); file && !found; file = readdir(files))
        found = strncmp(file->d_name, prefix, strlen(prefix)) == 0;
    closedir(files);
    return found;
}

/* Devices of InfiniBand, RoCE and EFA, of Omni-Path, and of Slingshot, as programs open them. */
static int has_rdma(void) {
    return folder_has("/dev/infiniband", "uverbs") || folder_has("/dev", "hfi1_") || folder_has("/dev", "cxi");
}

/* What a rank tells the others. */
typedef struct link_end {
    int32_t has_rdma;
    char device[CPA_PCI_ADDRESS_BYTES]; /* PCI address of its GPU; empty: none, or not known */
} link_end;

/* The links of this rank, as it sees them. */
static void find_own(const cpa_control *control, cpa_backend memory, const link_end *ends, cpa_link *own) {
    const link_end *mine = &ends[control->rank];
    const char *communicator = memory == CPA_BACKEND_HOST ? control->comm->ops.name : "";
#ifdef CPA_HAVE_CUDA
    char devices[CPA_COMM_MAX_RANKS][CPA_PCI_ADDRESS_BYTES] = {""}; /* of this host: others have the same addresses */
    for (int32_t peer = 0; peer < control->size; peer++)
        if (cpa_control_is_here(control, peer)) memcpy(devices[peer], ends[peer].device, sizeof devices[peer]);
    if (memory == CPA_BACKEND_CUDA)
        cpa_gpu_links(mine->device, (const char(*)[CPA_PCI_ADDRESS_BYTES])devices, control->size, own);
#endif
    for (int32_t peer = 0; peer < control->size; peer++) {
        const int here = cpa_control_is_here(control, peer);
        if (memory == CPA_BACKEND_HOST || !here)
            own[peer].kind = cpa_link_kind_of(here, communicator, mine->has_rdma && ends[peer].has_rdma);
    }
    own[control->rank] = (cpa_link){.kind = CPA_LINK_UNKNOWN};
}

/* What a pair is: what the lower rank has found or, where that is nothing, the other; of links the fewer. */
static void join(cpa_link *links, int32_t size) {
    for (int32_t a = 0; a < size; a++) {
        for (int32_t b = a + 1; b < size; b++) {
            cpa_link *one = &links[a * size + b], *other = &links[b * size + a];
            if (one->kind == CPA_LINK_UNKNOWN) *one = *other;
            if (other->kind == one->kind && other->nvlinks < one->nvlinks) one->nvlinks = other->nvlinks;
            *other = *one;
        }
    }
}

cpa_status cpa_links_find(cpa_control *control, cpa_backend memory, cpa_link *links, cpa_error *err) {
    link_end mine = {.has_rdma = has_rdma()};
#ifdef CPA_HAVE_CUDA
    if (memory == CPA_BACKEND_CUDA) cpa_gpu_address(mine.device);
#endif
    link_end ends[CPA_COMM_MAX_RANKS];
    cpa_link own[CPA_COMM_MAX_RANKS] = {{.kind = CPA_LINK_UNKNOWN}};
    CPA_TRY(cpa_control_find_host(control, err));
    CPA_TRY(cpa_control_all_gather(control, &mine, sizeof mine, ends, err));
    find_own(control, memory, ends, own);
    CPA_TRY(cpa_control_all_gather(control, own, control->size * (int64_t)sizeof *own, links, err));
    join(links, control->size);
    return CPA_OK;
}
