/* Rows of CPA_FP8_T128 on the device, as cpattn/shape.h defines them: codes, the scales of their tiles, a tail of bf16.
 */
#ifndef CPA_CUDA_TILES_CUH
#define CPA_CUDA_TILES_CUH

#include "kernels/cuda/cache/quant.cuh"

/* As the table of dtypes has them. */
constexpr int TILE = 128, TILE_TAIL = 64;

/* Bytes from the start of a row of `dim` elements to its scales, and to its tail. */
__device__ inline int32_t tile_scales_at(int32_t dim) {
    return dim - TILE_TAIL;
}
__device__ inline int32_t tile_tail_at(int32_t dim) {
    const int32_t codes = dim - TILE_TAIL;
    return codes + codes / TILE * (int32_t)sizeof(float);
}

/* What a code and its scale give; and what an element of a row stands for, which is that rounded to bf16. */
template <bool ROUNDS = true>
__device__ inline float read_tiled(const char *row, int32_t dim, int32_t column) {
    const int32_t codes = dim - TILE_TAIL;
    if (column >= codes) return read_element(row + tile_tail_at(dim), CPA_BF16, column - codes);
    const float scale = ((const float *)(row + tile_scales_at(dim)))[column / TILE];
    const float product = read_code(row, CPA_FP8_E4M3, column, __float_as_uint(scale));
    return ROUNDS ? to_float(from_float<__nv_bfloat16>(product)) : product;
}

#endif
