/* wgmma of O += P V with both operands in shared memory, in bf16: P as 64 rows of keys, V as its rows lie, whose 128
 * columns are those of the result. See wgmma.cuh for what a thread holds. */
#ifndef CPA_CUDA_WGMMA_SHARED_CUH
#define CPA_CUDA_WGMMA_SHARED_CUH

#include "kernels/cuda/attend/wgmma.cuh"

__device__ inline void wgmma_of_shared(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CPA_WGMMA_D64 "}, %64, %65, p, 1, 1, 0, 1; }"
                 : CPA_WGMMA_32(0), CPA_WGMMA_32(32)
                 : "l"(a), "l"(b));
}

#endif
