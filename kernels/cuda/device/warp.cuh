/* Reductions over the lanes of a warp, or the threads of a CTA; all get the result. */
#ifndef CPA_CUDA_WARP_CUH
#define CPA_CUDA_WARP_CUH

#include <stdint.h>

constexpr int WARP_LANES = 32;

__device__ inline float warp_max(float x) {
    for (int step = WARP_LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

template <typename T>
__device__ T warp_sum(T x) {
    for (int step = WARP_LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
}

/* The sum over all threads of a CTA, for all of them. */
__device__ inline int64_t block_sum(int64_t x) {
    __shared__ unsigned long long total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    const unsigned long long sum = warp_sum((unsigned long long)x);
    if (threadIdx.x % WARP_LANES == 0) atomicAdd(&total, sum);
    __syncthreads();
    const int64_t result = (int64_t)total;
    __syncthreads();
    return result;
}

#endif
