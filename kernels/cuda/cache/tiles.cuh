/* Rows of CPA_FP8_T128 and CPA_FP8_T64 on the device, as cpattn/shape.h defines them: codes, the scales of their tiles,
 * which those of T64 have behind all rows of the block, and a tail of bf16. With the bits of
 * kernels/host/cache/quantise.h. */
#ifndef CPA_CUDA_TILES_CUH
#define CPA_CUDA_TILES_CUH

#include <math.h>

#include "kernels/cuda/cache/quant.cuh"

/* As the table of dtypes has them. */
constexpr int TILE = 128, TILE_TAIL = 64;
constexpr int POWER_TILE = 64, POWER_SCALES = 8; /* of T64; bytes of the scales of a row */

__host__ __device__ inline bool has_tiles(cpa_dtype dtype) {
    return dtype == CPA_FP8_T128 || dtype == CPA_FP8_T64;
}

/* Bytes from the start of a row of `dim` elements to its scales, of T128, and to its tail. */
__device__ inline int32_t tile_scales_at(int32_t dim) {
    return dim - TILE_TAIL;
}
__device__ inline int32_t tile_tail_at(cpa_dtype dtype, int32_t dim) {
    const int32_t codes = dim - TILE_TAIL;
    return codes + (dtype == CPA_FP8_T128 ? codes / TILE * (int32_t)sizeof(float) : 0);
}

/* The power of two of a byte, and the byte of the scale of elements whose largest magnitude is that. */
__device__ inline float power_of(uint32_t byte) {
    return byte == 255 ? NAN : __uint_as_float(byte ? byte << 23 : 0x00400000u);
}
__device__ inline uint32_t power_byte(float largest) {
    const uint32_t bits = __float_as_uint(__fdiv_rn(fmaxf(largest, 1e-4f), 448.0f));
    return (bits >> 23) + ((bits & 0x7fffff) != 0);
}

/* What an element of a row stands for: what its code and its scale give, rounded to bf16. `bytes` are the scales of a
 * row of T64. */
__device__ inline float read_tiled(const char *row, const uint8_t *bytes, cpa_dtype dtype, int32_t dim, int32_t column) {
    const int32_t codes = dim - TILE_TAIL;
    if (column >= codes) return read_element(row + tile_tail_at(dtype, dim), CPA_BF16, column - codes);
    const float scale = dtype == CPA_FP8_T64 ? power_of(bytes[column / POWER_TILE])
                                             : ((const float *)(row + tile_scales_at(dim)))[column / TILE];
    return to_float(from_float<__nv_bfloat16>(read_code(row, CPA_FP8_E4M3, column, __float_as_uint(scale))));
}

#endif
