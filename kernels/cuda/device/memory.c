/* Memory of a CUDA device, and page-locked memory beside it.
 *
 * cudaFree and cudaFreeHost wait for the device. Whoever plans a step while another runs must not: that step may wait
 * for a peer that never answers, and it is this thread that gives up on it. What outgrows its memory there retires it,
 * and it is freed between steps, or where memory is short. */
#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cuda/device/cuda.h"

typedef struct cpa_cuda_retired {
    struct cpa_cuda_retired *next;
    void *memory;
    int on_host;
} cpa_cuda_retired;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the lists of all devices */

/* Waits for the device as cudaFree does; the device is current. */
static void free_memory(cpa_device *device, void *memory, int on_host) {
    const cpa_allocator *caller = &device->memory;
    if (on_host) {
        (void)cudaFreeHost(memory);
    } else if (!caller->free) {
        (void)cudaFree(memory);
    } else if (memory) {
        (void)cudaDeviceSynchronize();
        caller->free(caller->ctx, memory);
    }
}

/* Takes the list from the device. */
static cpa_cuda_retired *take(cpa_cuda_device *device) {
    pthread_mutex_lock(&lock);
    cpa_cuda_retired *list = device->retired;
    device->retired = NULL;
    pthread_mutex_unlock(&lock);
    return list;
}

void cpa_cuda_release(cpa_device *base) {
    cpa_cuda_retired *list = take((cpa_cuda_device *)base), *next;
    if (list) (void)cpa_cuda_select(base, NULL);
    for (; list; list = next) {
        next = list->next;
        free_memory(base, list->memory, list->on_host);
        free(list);
    }
}

static void retire(cpa_device *base, void *memory, int on_host) {
    cpa_cuda_device *device = (cpa_cuda_device *)base;
    if (!memory) return;
    cpa_cuda_retired *retired = malloc(sizeof *retired);
    if (!retired) {
        (void)cpa_cuda_select(base, NULL);
        free_memory(base, memory, on_host);
        return;
    }
    pthread_mutex_lock(&lock);
    *retired = (cpa_cuda_retired){device->retired, memory, on_host};
    device->retired = retired;
    pthread_mutex_unlock(&lock);
}

void cpa_cuda_retire(cpa_device *device, void *memory) {
    retire(device, memory, 0);
}

void cpa_cuda_retire_host(cpa_device *device, void *memory) {
    retire(device, memory, 1);
}

/* cudaMalloc, or the caller's allocator. */
static cudaError_t take_memory(const cpa_device *device, int64_t bytes, void **out) {
    const cpa_allocator *caller = &device->memory;
    if (!caller->alloc) return cudaMalloc(out, (size_t)bytes);
    void *memory = caller->alloc(caller->ctx, bytes);
    if (!memory) return cudaErrorMemoryAllocation;
    *out = memory;
    return cudaSuccess;
}

cudaError_t cpa_cuda_malloc(cpa_device *device, int64_t bytes, void **out) {
    const int64_t size = bytes > 0 ? bytes : 1;
    cudaError_t error = take_memory(device, size, out);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        cpa_cuda_release(device);
        error = take_memory(device, size, out);
    }
    return error;
}

cpa_status cpa_cuda_alloc(cpa_device *device, int64_t bytes, void **out, cpa_error *err) {
    void *memory = NULL;
    size_t free_bytes = 0, total_bytes = 0;
    CPA_TRY(cpa_cuda_select(device, err));
    cudaError_t error = cpa_cuda_malloc(device, bytes, &memory);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&free_bytes, &total_bytes);
        return cpa_fail(err, CPA_NO_MEMORY, "device: no memory for %lld bytes; %zu of %zu are free", (long long)bytes,
                        free_bytes, total_bytes);
    }
    CPA_TRY(cpa_cuda_check(err, error, "device alloc"));
    *out = memory;
    return CPA_OK;
}

void cpa_cuda_free(cpa_device *device, void *memory) {
    if (cpa_cuda_select(device, NULL) == CPA_OK) free_memory(device, memory, 0);
}

cpa_status cpa_cuda_alloc_host(cpa_device *device, int64_t bytes, void **out, cpa_error *err) {
    void *memory = NULL;
    CPA_TRY(cpa_cuda_select(device, err));
    CPA_TRY(cpa_cuda_check(err, cudaHostAlloc(&memory, bytes > 0 ? (size_t)bytes : 1, 0), "host alloc"));
    *out = memory;
    return CPA_OK;
}

void cpa_cuda_free_host(cpa_device *device, void *memory) {
    if (memory && cpa_cuda_select(device, NULL) == CPA_OK) (void)cudaFreeHost(memory);
}
