/* What every file of the CUDA back end does around its calls of CUDA: checks, the current device, shared memory. */
#include "base/check.h"
#include "kernels/cuda/device/cuda.h"

cpa_status cpa_cuda_check(cpa_error *err, cudaError_t error, const char *what) {
    if (error == cudaSuccess) return CPA_OK;
    (void)cudaGetLastError(); /* or the next launch would report it again */
    return cpa_fail(err, error == cudaErrorMemoryAllocation ? CPA_NO_MEMORY : CPA_DEVICE, "%s: CUDA: %s", what,
                    cudaGetErrorString(error));
}

cpa_status cpa_cuda_select(const cpa_device *device, cpa_error *err) {
    return cpa_cuda_check(err, cudaSetDevice(((const cpa_cuda_device *)device)->ordinal), "device");
}

cpa_status cpa_cuda_launched(cpa_stream *stream, const char *operation) {
    return cpa_cuda_check(&stream->error, cudaGetLastError(), operation);
}

cpa_status cpa_cuda_unsupported(cpa_stream *stream, const char *what, int64_t number) {
    return cpa_fail(&stream->error, CPA_UNSUPPORTED, "%s: %lld", what, (long long)number);
}

int cpa_cuda_fits(const cpa_stream *stream, const void *kernel, int bytes) {
    struct cudaFuncAttributes attributes;
    if (cpa_cuda_check(NULL, cudaFuncGetAttributes(&attributes, kernel), "device") != CPA_OK) return 0;
    return attributes.sharedSizeBytes + (size_t)bytes <= (size_t)stream->device->caps.shared_bytes;
}

cpa_status cpa_cuda_shared_memory(cpa_stream *stream, const void *kernel, int bytes, uint64_t *prepared) {
    const int ordinal = cpa_cuda_device_of(stream)->ordinal, bits = 64;
    const uint64_t bit = ordinal < bits ? (uint64_t)1 << ordinal : 0;
    if (__atomic_load_n(prepared, __ATOMIC_RELAXED) & bit) return CPA_OK;
    if (!cpa_cuda_fits(stream, kernel, bytes))
        return cpa_cuda_unsupported(stream, "device: more shared memory than its CTAs have", bytes);
    CPA_TRY(cpa_cuda_check(&stream->error,
                           cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                           "device: shared memory"));
    __atomic_fetch_or(prepared, bit, __ATOMIC_RELAXED);
    return CPA_OK;
}
