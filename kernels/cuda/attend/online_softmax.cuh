/* What the kernels of attend on tensor cores share of the online softmax (Milakov and Gimelshein, arXiv:1805.02867), in
 * powers of two: a probability is exp2(score * scale_log2 - base), where base = max * scale_log2 is rounded. */
#ifndef CPA_CUDA_ONLINE_SOFTMAX_CUH
#define CPA_CUDA_ONLINE_SOFTMAX_CUH

#include <float.h>
#include <math.h>

#include <cpattn/ops.h>

#include "kernels/cuda/attend/mma.cuh"

/* What the maximum of a row begins with: lower scores weigh nothing. Finite, so that no difference of maxima is NaN,
 * and so high that base is right to an exponent. */
__device__ inline float lowest_max(float scale_log2) {
    return fmaxf(__fdividef(CPA_LOWEST_EXPONENT, scale_log2), -FLT_MAX);
}

/* What sums and O relative to an older maximum are worth beside the new one: exactly 1 where it is the same. As the
 * difference of two products, of which one is rounded, it would be off a little, tile after tile. */
__device__ inline float worth_of(float older_max, float max, float scale_log2) {
    return exp2_fast((older_max - max) * scale_log2);
}

/* The exponentials of a row whose scores are not all finite, or -inf, are NaN, and so is their sum: a score of NaN,
 * one of +inf less the maximum, +inf. Only the sum is looked at, at the end: the loops need no check. fmaxf passes
 * NaN over, so the maximum tells nothing. Where base is off by several exponents, or overflows, the sum is to be NaN
 * too. */
__device__ inline float counted_sum(float sum, float max, float scale_log2) {
    return max * scale_log2 >= CPA_HIGHEST_EXPONENT ? NAN : sum;
}

/* 1 / sum: 0 of a row that saw nothing. */
__device__ inline float inverse_of_sum(float sum) {
    return sum == 0 ? 0 : 1 / sum;
}

/* max + log(sum), given it: -inf of a row that saw nothing. */
__device__ inline float lse_of(float sum, float lse) {
    return sum > 0 ? lse : sum == 0 ? -INFINITY : NAN;
}

#endif
