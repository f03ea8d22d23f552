/* Reductions over the lanes of a warp; every lane gets the result. */
#ifndef CPA_CUDA_WARP_CUH
#define CPA_CUDA_WARP_CUH

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

#endif
