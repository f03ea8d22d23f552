/* wgmma of compute capability 9.0 of 64 keys by the heads of rows, both in shared memory with the width as rows: codes of
 * e4m3, 32 at a time, or bf16. See attend/wgmma.cuh. */
#ifndef CPA_CUDA_INDEX_WGMMA_CUH
#define CPA_CUDA_INDEX_WGMMA_CUH

#include <cuda_fp8.h>

#include "kernels/cuda/attend/wgmma.cuh"

/* clang-format off */
#define CPA_WGMMA_CODES(N, D, A_AT, B_AT, P_AT, ...) \
    __device__ static inline void multiply(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
        asm volatile( \
        "{ .reg .pred p; setp.ne.b32 p, " P_AT ", 0; " \
        "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " \
        "{" D "}, " A_AT ", " B_AT ", p, 1, 1; }" \
        : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate)); \
    }
/* clang-format on */

/* multiply(d, a, b, accumulate): without `accumulate`, D = A B. A step is 32 bytes of each row. */
template <typename Element>
struct index_wgmma : wgmma<Element> {};
template <>
struct index_wgmma<__nv_fp8_e4m3> {
    CPA_WGMMA_CODES(64, CPA_WGMMA_D32, "%32", "%33", "%34", CPA_WGMMA_32(0))
    CPA_WGMMA_CODES(128, CPA_WGMMA_D64, "%64", "%65", "%66", CPA_WGMMA_32(0), CPA_WGMMA_32(32))
};

#endif
