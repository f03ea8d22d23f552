/* Many copies at once: a batch of the copy engines where CUDA has such (13.0), and of page-locked memory or memory of
 * devices; else one after the other. */
#include "kernels/copy_list.h"

#include "base/check.h"
#include "kernels/cuda/device/cuda.h"

static cpa_status copy_each(const cpa_copy_list *list, cpa_stream *stream) {
    for (int64_t i = 0; i < list->n; i++)
        CPA_TRY(cpa_cuda_check(
            &stream->error,
            cudaMemcpyAsync(list->dsts[i], list->srcs[i], list->bytes[i], cudaMemcpyDefault, cpa_cuda_handle(stream)),
            "copy list"));
    return CPA_OK;
}

#if CUDART_VERSION >= 13000
/* Whether CUDA knows the memory, and so may read it behind the call. */
static int is_known(const void *memory) {
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess)
        return attributes.type != cudaMemoryTypeUnregistered;
    (void)cudaGetLastError();
    return 0;
}

static cpa_status copy_batch(const cpa_copy_list *list, cpa_stream *stream) {
    struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream,
                                              .flags = cudaMemcpyFlagPreferOverlapWithCompute};
    size_t first = 0;
    return cpa_cuda_check(&stream->error,
                          cudaMemcpyBatchAsync((void *const *)list->dsts, (const void *const *)list->srcs, list->bytes,
                                               (size_t)list->n, &attributes, &first, 1, cpa_cuda_handle(stream)),
                          "copy list");
}
#endif

static cpa_status copy(const cpa_copy_list *list, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
#if CUDART_VERSION >= 13000
    if (list->n > 1 && is_known(list->srcs[0])) return copy_batch(list, stream);
#endif
    return copy_each(list, stream);
}

static cpa_status clear(void *memory, int64_t bytes, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_check(&stream->error, cudaMemsetAsync(memory, 0, (size_t)bytes, cpa_cuda_handle(stream)),
                          "cudaMemsetAsync");
}

const cpa_copy_list_table cpa_cuda_copy_list = {copy, clear};
