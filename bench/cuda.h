/* What the benchmarks need of a CUDA device beyond the kernel table. */
#ifndef CPA_BENCH_CUDA_H
#define CPA_BENCH_CUDA_H

#include <cpattn/device.h>

#ifdef CPA_HAVE_CUDA
#ifdef __cplusplus
extern "C" {
#endif
/* Enqueues a kernel that only reads `bytes` of device memory. */
cpa_status cpa_bench_cuda_read(void *memory, int64_t bytes, cpa_stream *stream, cpa_error *err);
#ifdef __cplusplus
}
#endif
#else
#include "base/check.h"

static inline cpa_status cpa_bench_cuda_read(void *memory, int64_t bytes, cpa_stream *stream, cpa_error *err) {
    (void)memory, (void)bytes, (void)stream;
    return cpa_fail(err, CPA_UNSUPPORTED, "bench: built without CUDA");
}
#endif

#endif
