/* The norm of one row by the CTA that needs it, with the bits of rmsnorm: the same units in the same threads, and the
 * same sums. */
#ifndef CPA_CUDA_NN_ROW_NORM_CUH
#define CPA_CUDA_NN_ROW_NORM_CUH

#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/rows.cuh"

/* Over all threads of the CTA, at most MOST_THREADS, for each of them. */
template <int MOST_THREADS>
__device__ inline float cta_sum(float x) {
    __shared__ float warps[MOST_THREADS / WARP_LANES];
    const int lane = threadIdx.x % WARP_LANES;
    x = warp_sum(x);
    if (lane == 0) warps[threadIdx.x / WARP_LANES] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP_LANES ? warps[lane] : 0.0f);
}

/* The units of a row that a thread keeps, and the threads of rmsnorm by them. */
constexpr int NORM_KEPT = 2;
__host__ __device__ inline int32_t norm_threads(int32_t units) {
    const int32_t wanted = (units + NORM_KEPT - 1) / NORM_KEPT;
    return (wanted + WARP_LANES - 1) / WARP_LANES * WARP_LANES;
}

/* Of rows of at most MOST 16-bit elements, a multiple of 8 that are read 16 bytes at a time; in a CTA of THREADS. */
template <typename T, int THREADS, int MOST>
struct row_norm {
    static constexpr int UNIT = VECTOR<T>;
    static_assert(MOST <= THREADS * NORM_KEPT * UNIT, "threads for all units");
    using unit = unit_of<T, UNIT>;
    unit weights[NORM_KEPT];
    int32_t units, threads;

    /* Reads the weights, so that they are there when the row is. */
    __device__ row_norm(const void *weight, int32_t width) : units(width / UNIT), threads(norm_threads(units)) {
        for_units([&](int i, int at) { weights[i] = ((const unit *)weight)[at]; });
    }
    template <typename Visit>
    __device__ void for_units(const Visit &visit) const {
#pragma unroll
        for (int i = 0; i < NORM_KEPT; i++) {
            const int at = (int)threadIdx.x + i * threads;
            if ((int)threadIdx.x < threads && at < units) visit(i, at);
        }
    }
    /* Called by all threads, which all see `out`, in shared memory, behind it. */
    __device__ void apply(const T *x, float eps, T *out) const {
        unit from[NORM_KEPT];
        float value[NORM_KEPT][UNIT], sum = 0;
        for_units([&](int i, int at) { from[i] = ((const unit *)x)[at]; });
        for_units([&](int i, int) {
            float squares = 0;
            widen<T, UNIT>(value[i], from[i]);
#pragma unroll
            for (int e = 0; e < UNIT; e++) squares = fmaf(value[i][e], value[i][e], squares);
            sum += squares;
        });
        const float scale = 1 / sqrtf(cta_sum<THREADS>(sum) / (float)(units * UNIT) + eps);
        for_units([&](int i, int at) {
            float w[UNIT];
            widen<T, UNIT>(w, weights[i]);
#pragma unroll
            for (int e = 0; e < UNIT; e++) w[e] = value[i][e] * scale * w[e];
            ((unit *)out)[at] = narrow<T, UNIT>(w);
        });
        __syncthreads();
    }
};

#endif
