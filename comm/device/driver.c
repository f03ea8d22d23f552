#include "comm/device/driver.h"

#include <string.h>

/* Stores the entry point of the version of CUDA that introduced it at *function, a pointer to a function. */
static cpa_status find(const char *name, unsigned version, void *function, cpa_error *err) {
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result);
    CPA_TRY(cpa_runtime_check(error, "cudaGetDriverEntryPointByVersion", err));
    if (result != cudaDriverEntryPointSuccess || !found) {
        return cpa_fail(err, CPA_UNSUPPORTED, "the CUDA driver has no %s; it must be of CUDA %u.%u or later", name,
                        version / 1000, version % 1000 / 10);
    }
    memcpy(function, &found, sizeof found);
    return CPA_OK;
}

cpa_status cpa_driver_find(cpa_driver *out, cpa_error *err) {
    cpa_driver driver;
    CPA_TRY(find("cuStreamBatchMemOp", 11070, &driver.batch_mem_op, err));
    CPA_TRY(find("cuPointerGetAttributes", 7000, &driver.pointer_attributes, err));
    CPA_TRY(find("cuGetErrorString", 6000, &driver.error_string, err));
    *out = driver;
    return CPA_OK;
}

cpa_status cpa_runtime_check(cudaError_t error, const char *call, cpa_error *err) {
    if (error == cudaSuccess) return CPA_OK;
    cudaGetLastError(); /* an error that is reported here must not show again at a kernel launch */
    cpa_status status = error == cudaErrorMemoryAllocation ? CPA_NO_MEMORY : CPA_DEVICE;
    return cpa_fail(err, status, "%s: %s", call, cudaGetErrorString(error));
}

cpa_status cpa_driver_check(const cpa_driver *driver, CUresult result, const char *call, cpa_error *err) {
    if (result == CUDA_SUCCESS) return CPA_OK;
    const char *text = NULL;
    if (driver->error_string(result, &text) != CUDA_SUCCESS || !text) text = "unknown error";
    return cpa_fail(err, CPA_DEVICE, "%s: %s", call, text);
}

cpa_status cpa_driver_enqueue(const cpa_driver *driver, cudaStream_t stream, cpa_mem_op *ops, int n, cpa_error *err) {
    CUresult result = driver->batch_mem_op(stream, (unsigned)n, ops, 0);
    return cpa_driver_check(driver, result, "cuStreamBatchMemOp", err);
}
