#include "comm/peer/memory.h"

#include <inttypes.h>

static cpa_status describe(const cpa_driver *driver, const void *memory, cpa_peer_address *out, cpa_error *err) {
    CUdeviceptr base = 0;
    size_t size = 0;
    unsigned long long number = 0;
    int shareable = 0;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                        CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
    void *values[] = {&base, &size, &number, &shareable};
    CUresult result = driver->pointer_attributes(4, attributes, values, (CUdeviceptr)(uintptr_t)memory);
    CPA_TRY(cpa_driver_check(driver, result, "cuPointerGetAttributes", err));
    if (!base || !shareable) {
        return cpa_fail(err, CPA_UNSUPPORTED, "receive buffer %p is no memory of this GPU from cudaMalloc", memory);
    }
    *out = (cpa_peer_address){
        .allocation = number, .base = base, .size = size, .offset = (int64_t)((uintptr_t)memory - base)};
    return CPA_OK;
}

cpa_status cpa_peer_export(cpa_peer_exports *exports, const cpa_driver *driver, const void *memory, int64_t bytes,
                           cpa_peer_address *out, cpa_error *err) {
    cpa_peer_address address;
    CPA_TRY(describe(driver, memory, &address, err));
    address.bytes = bytes;
    int64_t n_known = exports->n < CPA_PEER_KNOWN ? exports->n : CPA_PEER_KNOWN, i = 0;
    while (i < n_known && exports->known[i].allocation != address.allocation) i++;
    if (i < n_known) {
        address.handle = exports->known[i].handle;
    } else {
        cudaError_t error = cudaIpcGetMemHandle(&address.handle, (void *)(uintptr_t)address.base);
        CPA_TRY(cpa_runtime_check(error, "cudaIpcGetMemHandle", err));
        exports->known[exports->n++ % CPA_PEER_KNOWN] = address;
    }
    *out = address;
    return CPA_OK;
}

void *cpa_peer_find(cpa_peer_imports *imports, const cpa_peer_address *address) {
    for (int i = 0; i < CPA_PEER_KNOWN; i++) {
        if (!imports->known[i].mapped || imports->known[i].allocation != address->allocation) continue;
        imports->known[i].used = ++imports->calls;
        return imports->known[i].mapped + address->offset;
    }
    return NULL;
}

static void unmap(cpa_peer_imports *imports, int i) {
    if (imports->known[i].mapped) cudaIpcCloseMemHandle(imports->known[i].mapped);
    imports->known[i].mapped = NULL;
    imports->known[i].used = 0;
}

cpa_status cpa_peer_map(cpa_peer_imports *imports, const cpa_peer_address *address, void **out, cpa_error *err) {
    int oldest = 0;
    for (int i = 0; i < CPA_PEER_KNOWN; i++) {
        uint64_t base = imports->known[i].base, size = imports->known[i].size;
        if (address->base < base + size && base < address->base + address->size) unmap(imports, i);
        if (imports->known[i].used < imports->known[oldest].used) oldest = i;
    }
    unmap(imports, oldest);
    void *mapped = NULL;
    cudaError_t error = cudaIpcOpenMemHandle(&mapped, address->handle, cudaIpcMemLazyEnablePeerAccess);
    CPA_TRY(cpa_runtime_check(error, "cudaIpcOpenMemHandle", err));
    imports->known[oldest].allocation = address->allocation;
    imports->known[oldest].base = address->base;
    imports->known[oldest].size = address->size;
    imports->known[oldest].mapped = mapped;
    imports->known[oldest].used = ++imports->calls;
    *out = (char *)mapped + address->offset;
    return CPA_OK;
}

void cpa_peer_unmap_all(cpa_peer_imports *imports) {
    for (int i = 0; i < CPA_PEER_KNOWN; i++) unmap(imports, i);
}
