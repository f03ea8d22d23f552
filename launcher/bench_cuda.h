/* What the benchmarks need of a CUDA device beyond the kernel table. In a build without CUDA there is no such device,
 * and every function refuses. */
#ifndef CPA_LAUNCHER_BENCH_CUDA_H
#define CPA_LAUNCHER_BENCH_CUDA_H

#include <cpattn/device.h>

/* The choices of --kernels, in the order of its words. */
typedef enum cpa_bench_path { CPA_BENCH_PATH_BEST = 0, CPA_BENCH_PATH_SIMPLE, CPA_BENCH_PATH_PORTABLE } cpa_bench_path;

#ifdef CPA_HAVE_CUDA
#ifdef __cplusplus
extern "C" {
#endif
/* Enqueues a kernel that only reads `bytes` of device memory. */
cpa_status cpa_bench_cuda_read(void *memory, int64_t bytes, cpa_stream *stream, cpa_error *err);
/* Which kernels attend uses from now on; fails if the device does not run them. */
cpa_status cpa_bench_cuda_use(cpa_device *device, cpa_bench_path path, cpa_error *err);
#ifdef __cplusplus
}
#endif
#else
#include "base/check.h"

static inline cpa_status cpa_bench_cuda_read(void *memory, int64_t bytes, cpa_stream *stream, cpa_error *err) {
    (void)memory, (void)bytes, (void)stream;
    return cpa_fail(err, CPA_UNSUPPORTED, "bench: built without CUDA");
}
static inline cpa_status cpa_bench_cuda_use(cpa_device *device, cpa_bench_path path, cpa_error *err) {
    (void)device, (void)path;
    return cpa_fail(err, CPA_UNSUPPORTED, "bench: built without CUDA");
}
#endif

#endif
