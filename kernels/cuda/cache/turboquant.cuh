/* Rows of the CPA_TQ_ dtypes on the device, as cpattn/shape.h defines them, by a warp: a lane has neighbouring elements.
 * With the bits of kernels/host/cache/turboquant.h, where the file is compiled without fused multiplications. */
#ifndef CPA_CUDA_TURBOQUANT_CUH
#define CPA_CUDA_TURBOQUANT_CUH

#include <math.h>

#include "kernels/codebook.h"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"

/* Elements of a lane, at most. */
constexpr int TQ_WIDTH = CPA_TQ_MOST_DIM / WARP_LANES;

/* Bits of the codes of keys and of values. */
__host__ __device__ inline int tq_key_bits(cpa_dtype dtype) {
    return dtype == CPA_TQ_K8V4 ? 8 : dtype == CPA_TQ_4BIT ? 4 : 3;
}
__host__ __device__ inline int tq_value_bits(cpa_dtype dtype) {
    return dtype == CPA_TQ_3BIT ? 3 : 4;
}

namespace {
__device__ const float TQ_POSITIVE[2][CPA_MOST_LEVELS / 2] = {{CPA_CODEBOOK_3BIT}, {CPA_CODEBOOK_4BIT}};
}
/* A positive centroid, from the least on, and that of a code. */
__device__ inline float tq_positive(int bits, int i) {
    return TQ_POSITIVE[bits == 4][i];
}
__device__ inline float tq_centroid(int bits, int code) {
    const int half = 1 << (bits - 1);
    return code < half ? -tq_positive(bits, half - 1 - code) : tq_positive(bits, code - half);
}

/* The code of an element of a row: 3 or 4 bits. The byte behind the last code is one of the row's as well. */
__device__ inline int tq_code(const char *row, int bits, int column) {
    const int at = column * bits;
    const uint8_t *bytes = (const uint8_t *)row + at / 8;
    return (bytes[0] | bytes[1] << 8) >> at % 8 & ((1 << bits) - 1);
}
/* An fp16 behind the codes of a row of `dim` columns. */
__device__ inline float tq_half(const char *row, int bits, int dim, int index) {
    return __half2float(((const __half *)(row + dim * bits / 8))[index]);
}

/* x = H x without its factor; `width` elements a lane, a power of two. */
__device__ inline void tq_rotate(float (&x)[TQ_WIDTH], int width, int lane) {
#pragma unroll
    for (int step = 1; step < TQ_WIDTH; step *= 2) {
        if (step >= width) break;
#pragma unroll
        for (int e = 0; e < TQ_WIDTH; e++) {
            if (e & step) continue;
            const float a = x[e], b = x[e + step];
            x[e] = a + b;
            x[e + step] = a - b;
        }
    }
#pragma unroll
    for (int step = 1; step < WARP_LANES; step *= 2) {
#pragma unroll
        for (int e = 0; e < TQ_WIDTH; e++) {
            const float other = __shfl_xor_sync(0xffffffff, x[e], step);
            x[e] = lane & step ? other - x[e] : x[e] + other;
        }
    }
}

/* Over the row; elements past the lane's are 0. */
__device__ inline float tq_sum_of_squares(const float (&x)[TQ_WIDTH]) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) sum = sum + x[e] * x[e];
    return warp_sum(sum);
}

/* A key or a value as it was: rotated back, where keys are rotated. */
__device__ inline void tq_read_row(const char *row, cpa_dtype dtype, bool key, int dim, int lane,
                                   float (&x)[TQ_WIDTH]) {
    const int width = dim / WARP_LANES, bits = key ? tq_key_bits(dtype) : tq_value_bits(dtype);
#pragma unroll
    for (int e = 0; e < TQ_WIDTH; e++) {
        const int column = lane * width + e;
        x[e] = 0;
        if (e >= width) continue;
        if (bits == 8) {
            x[e] = read_code(row, CPA_FP8_E4M3, column, __float_as_uint(1.0f));
        } else {
            const int code = tq_code(row, bits, column);
            x[e] = key ? tq_centroid(bits, code) : (float)code;
        }
    }
    if (bits == 8) return;
    if (key) {
        const float factor = __fdiv_rn(tq_half(row, bits, dim, 0), __fsqrt_rn(tq_sum_of_squares(x) * (float)dim));
        tq_rotate(x, width, lane);
#pragma unroll
        for (int e = 0; e < TQ_WIDTH; e++) x[e] = x[e] * factor;
    } else {
        const float scale = tq_half(row, bits, dim, 0), least = tq_half(row, bits, dim, 1);
#pragma unroll
        for (int e = 0; e < TQ_WIDTH; e++) x[e] = scale * x[e] + least;
    }
}

#endif
