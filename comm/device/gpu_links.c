#include "comm/device/gpu_links.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/shared_library.h"

/* ---- NVML, whose header is a package of its own: the functions in use, and their constants ---- */

#define NVML_SONAME "libnvidia-ml.so.1"
enum {
    NVML_DONE = 0,
    NVML_P2P_READ = 0,
    NVML_P2P_WRITE = 1,
    NVML_P2P_NVLINK = 2,
    NVML_P2P_CAN = 0,
    NVML_LINK_UP = 1,
    NVML_REMOTE_GPU = 0,
    NVML_REMOTE_SWITCH = 2
};
/* No GPU has as many links; where there is none of that number the call fails. */
enum { MOST_LINKS = 64 };

typedef struct nvml_device *nvml_device;

typedef struct nvml_pci_info {
    char legacy_id[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char id[32];
} nvml_pci_info;

typedef struct nvml {
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_pci_id)(const char *id, nvml_device *out);
    int (*pci_info)(nvml_device device, nvml_pci_info *out);
    int (*p2p_status)(nvml_device a, nvml_device b, int capability, int *out);
    int (*link_state)(nvml_device device, unsigned int link, int *out);
    int (*link_remote_type)(nvml_device device, unsigned int link, int *out);
    int (*link_remote_pci)(nvml_device device, unsigned int link, nvml_pci_info *out);
} nvml;

/* Whether NVML is there and ready; to be shut down then. */
static int open_nvml(nvml *out) {
    const struct {
        const char *name;
        void *function;
    } wanted[] = {{"nvmlInit_v2", &out->init},
                  {"nvmlShutdown", &out->shutdown},
                  {"nvmlDeviceGetHandleByPciBusId_v2", &out->by_pci_id},
                  {"nvmlDeviceGetPciInfo_v3", &out->pci_info},
                  {"nvmlDeviceGetP2PStatus", &out->p2p_status},
                  {"nvmlDeviceGetNvLinkState", &out->link_state},
                  {"nvmlDeviceGetNvLinkRemoteDeviceType", &out->link_remote_type},
                  {"nvmlDeviceGetNvLinkRemotePciInfo_v2", &out->link_remote_pci}};
    void *library;
    if (cpa_library_open("links", NVML_SONAME, &library, NULL) != CPA_OK) return 0;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        if (cpa_library_find("links", library, NVML_SONAME, wanted[i].name, wanted[i].function, NULL) != CPA_OK)
            return 0;
    }
    return out->init() == NVML_DONE;
}

static int is_same_gpu(const nvml_pci_info *a, const nvml_pci_info *b) {
    return a->domain == b->domain && a->bus == b->bus && a->device == b->device;
}

/* Links of a GPU that are up and lead to a switch, or straight to the other one. */
static int32_t count_links(const nvml *n, nvml_device from, nvml_device to) {
    nvml_pci_info remote, wanted = {.bus = 0};
    int32_t direct = 0, switched = 0;
    const int known = n->pci_info(to, &wanted) == NVML_DONE;
    for (unsigned int link = 0; link < MOST_LINKS; link++) {
        int up = 0, type = NVML_REMOTE_GPU;
        if (n->link_state(from, link, &up) != NVML_DONE || up != NVML_LINK_UP) continue;
        if (n->link_remote_type(from, link, &type) != NVML_DONE) continue;
        if (type == NVML_REMOTE_SWITCH) switched++;
        if (type != NVML_REMOTE_GPU || !known) continue;
        if (n->link_remote_pci(from, link, &remote) == NVML_DONE && is_same_gpu(&remote, &wanted)) direct++;
    }
    return direct > 0 ? direct : switched;
}

static cpa_link ask_nvml(const nvml *n, const char *mine, const char *other) {
    nvml_device a, b;
    int by_nvlink = 1, reads = 1, writes = 1; /* anything but NVML_P2P_CAN */
    cpa_link link = {.kind = CPA_LINK_UNKNOWN};
    if (n->by_pci_id(mine, &a) != NVML_DONE || n->by_pci_id(other, &b) != NVML_DONE) return link;
    if (n->p2p_status(a, b, NVML_P2P_NVLINK, &by_nvlink) == NVML_DONE && by_nvlink == NVML_P2P_CAN)
        return (cpa_link){.kind = CPA_LINK_NVLINK, .nvlinks = count_links(n, a, b)};
    if (n->p2p_status(a, b, NVML_P2P_READ, &reads) != NVML_DONE ||
        n->p2p_status(a, b, NVML_P2P_WRITE, &writes) != NVML_DONE)
        return link;
    link.kind = reads == NVML_P2P_CAN && writes == NVML_P2P_CAN ? CPA_LINK_PCIE : CPA_LINK_HOST_MEMORY;
    return link;
}

/* ---- CUDA ---- */

static cpa_link_kind ask_cuda(const char *mine, const char *other) {
    int a, b, reaches = 0;
    cpa_link_kind kind = CPA_LINK_UNKNOWN;
    if (cudaDeviceGetByPCIBusId(&a, mine) == cudaSuccess && cudaDeviceGetByPCIBusId(&b, other) == cudaSuccess &&
        cudaDeviceCanAccessPeer(&reaches, a, b) == cudaSuccess)
        kind = reaches ? CPA_LINK_PEER_ACCESS : CPA_LINK_HOST_MEMORY;
    (void)cudaGetLastError();
    return kind;
}

void cpa_gpu_address(char out[CPA_PCI_ADDRESS_BYTES]) {
    int device;
    memset(out, 0, CPA_PCI_ADDRESS_BYTES);
    if (cudaGetDevice(&device) == cudaSuccess &&
        cudaDeviceGetPCIBusId(out, CPA_PCI_ADDRESS_BYTES, device) == cudaSuccess)
        return;
    (void)cudaGetLastError();
    out[0] = 0;
}

/* What can be told without asking; returns whether something is left to be asked. */
static int compare_addresses(const char *mine, const char (*others)[CPA_PCI_ADDRESS_BYTES], int32_t n,
                             cpa_link *links) {
    int left = 0;
    for (int32_t i = 0; i < n; i++) {
        const int known = mine[0] && others[i][0], same = known && strcasecmp(mine, others[i]) == 0;
        links[i] = (cpa_link){.kind = same ? CPA_LINK_SAME_DEVICE : CPA_LINK_UNKNOWN};
        left |= known && !same;
    }
    return left;
}

void cpa_gpu_links(const char *mine, const char (*others)[CPA_PCI_ADDRESS_BYTES], int32_t n, cpa_link *links) {
    nvml library;
    if (!compare_addresses(mine, others, n, links)) return;
    const int has_nvml = open_nvml(&library);
    for (int32_t i = 0; i < n; i++) {
        if (links[i].kind != CPA_LINK_UNKNOWN || !others[i][0]) continue;
        if (has_nvml) links[i] = ask_nvml(&library, mine, others[i]);
        if (links[i].kind == CPA_LINK_UNKNOWN) links[i].kind = ask_cuda(mine, others[i]);
    }
    if (has_nvml) library.shutdown();
}
