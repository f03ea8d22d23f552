/* Memory that processes of this host share by CUDA's inter-process handles. A handle is that of a whole allocation, and
 * small ones have an allocation in common: memory that is shared fills its own. */
#include <string.h>

#include "base/check.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/shared_memory.h"

static const size_t ALLOCATION = (size_t)2
                                 << 20; /* cudaMalloc's; CUDA C Programming Guide, Interprocess Communication */

static void tell_address(const cpa_device *device, char *out) {
    cpa_backend_cuda.pci_address(((const cpa_cuda_device *)device)->ordinal, out);
}

static cpa_status share(cpa_device *device, cpa_memory_mark *mark, void **out, cpa_error *err) {
    const size_t bytes = ((size_t)mark->bytes + ALLOCATION - 1) / ALLOCATION * ALLOCATION;
    cudaIpcMemHandle_t handle;
    void *memory = NULL;
    _Static_assert(sizeof handle == sizeof mark->system.ipc, "a handle of CUDA fills the mark's bytes for it");
    CPA_TRY(cpa_cuda_select(device, err));
    CPA_TRY(cpa_cuda_check(err, cudaMalloc(&memory, bytes), "shared memory: cudaMalloc"));
    const cpa_status status =
        cpa_cuda_check(err, cudaIpcGetMemHandle(&handle, memory), "shared memory: cudaIpcGetMemHandle");
    if (status != CPA_OK) {
        (void)cudaFree(memory);
        return status;
    }
    memcpy(mark->system.ipc, &handle, sizeof handle);
    tell_address(device, mark->pci_address);
    *out = memory;
    return CPA_OK;
}

static void unshare(cpa_device *device, const cpa_memory_mark *mark, void *memory) {
    (void)mark;
    if (cpa_cuda_select(device, NULL) == CPA_OK) (void)cudaFree(memory);
}

static cpa_status map(cpa_device *device, const cpa_memory_mark *mark, void **out, cpa_error *err) {
    char here[CPA_PCI_ADDRESS_BYTES];
    cudaIpcMemHandle_t handle;
    tell_address(device, here);
    if (strncmp(here, mark->pci_address, sizeof here) != 0)
        return cpa_fail(err, CPA_INVALID, "shared memory: it is on GPU %.24s, the device is %s", mark->pci_address,
                        here);
    CPA_TRY(cpa_cuda_select(device, err));
    memcpy(&handle, mark->system.ipc, sizeof handle);
    return cpa_cuda_check(err, cudaIpcOpenMemHandle(out, handle, cudaIpcMemLazyEnablePeerAccess),
                          "shared memory: cudaIpcOpenMemHandle");
}

static void unmap(cpa_device *device, const cpa_memory_mark *mark, void *memory) {
    (void)mark;
    if (cpa_cuda_select(device, NULL) == CPA_OK) (void)cudaIpcCloseMemHandle(memory);
}

const cpa_shared_memory_table cpa_cuda_memory_sharing = {share, unshare, map, unmap};
