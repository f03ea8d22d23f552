/* The calls of the CUDA driver that the runtime lacks, found at run time so that programs start without a driver, and
 * how the device transports report a failing call. */
#ifndef CPA_COMM_DRIVER_H
#define CPA_COMM_DRIVER_H

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#include "base/check.h"

typedef struct cpa_driver {
    PFN_cuStreamBatchMemOp_v11070 batch_mem_op;
    PFN_cuPointerGetAttributes_v7000 pointer_attributes;
    PFN_cuGetErrorString_v6000 error_string;
} cpa_driver;

cpa_status cpa_driver_find(cpa_driver *out, cpa_error *err);

/* CPA_OK, or CPA_NO_MEMORY or CPA_DEVICE with the name of the call and what CUDA says. */
cpa_status cpa_runtime_check(cudaError_t error, const char *call, cpa_error *err);
cpa_status cpa_driver_check(const cpa_driver *driver, CUresult result, const char *call, cpa_error *err);

/* Operations of a stream on a word of memory. A write becomes visible after everything before it on its stream. */
typedef CUstreamBatchMemOpParams cpa_mem_op;

static inline cpa_mem_op cpa_mem_op_write(const uint32_t *word, uint32_t value) {
    return (cpa_mem_op){.writeValue = {.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32,
                                       .address = (CUdeviceptr)(uintptr_t)word,
                                       .value = value,
                                       .flags = CU_STREAM_WRITE_VALUE_DEFAULT}};
}

static inline cpa_mem_op cpa_mem_op_wait(const uint32_t *word, uint32_t value) {
    return (cpa_mem_op){.waitValue = {.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32,
                                      .address = (CUdeviceptr)(uintptr_t)word,
                                      .value = value,
                                      .flags = CU_STREAM_WAIT_VALUE_EQ}};
}

cpa_status cpa_driver_enqueue(const cpa_driver *driver, cudaStream_t stream, cpa_mem_op *ops, int n, cpa_error *err);

#endif
