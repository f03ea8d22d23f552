/* Where rows of a cache, or of a tensor, lie that kernels take from one form to another, a warp a row: latent_rows.cu and
 * turboquant_rows.cu. */
#ifndef CPA_CUDA_CACHE_ROWS_CUH
#define CPA_CUDA_CACHE_ROWS_CUH

#include "kernels/cuda/cache/tiles.cuh"
#include "kernels/cuda/device/cuda.h"

namespace {

/* The keys or the values of a cache, or a tensor as one block of them; strides in bytes. */
struct rows_of {
    char *memory;
    int64_t block_stride, token_stride, head_stride;
    int64_t words_at; /* from the start of a block to the scales of its rows; 0: none */
    cpa_dtype dtype;
    float scale;
    const float *head_scales;
    int32_t head_scale_step, block_shift;

    __device__ char *row(int64_t block, int64_t offset, int32_t head) const {
        return memory + block * block_stride + offset * token_stride + head * head_stride;
    }
    __device__ uint32_t *word(int64_t block, int64_t offset, int32_t head) const {
        return (uint32_t *)(memory + block * block_stride + words_at) + ((int64_t)head << block_shift) + offset;
    }
    /* Scales of a row of CPA_FP8_T64, of one head. */
    __device__ uint8_t *bytes(int64_t block, int64_t offset) const {
        return (uint8_t *)memory + block * block_stride + words_at + offset * POWER_SCALES;
    }
    __device__ float scale_of(int32_t head) const { return head_scale(scale, head_scales, head_scale_step, head); }
};

struct row_place {
    int64_t block, offset;
    int32_t head;
};

inline rows_of cache_of(const cpa_kv_view &kv, cpa_kv_part part) {
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, part);
    return {pool.memory,       pool.block_stride, pool.token_stride,
            pool.head_stride,  cpa_kv_words_at(&kv, part), kv.dtype,
            pool.tensor_scale, pool.head_scales,  pool.head_scale_step,
            cpa_cuda_log2(kv.block_size)};
}

/* Rows of a tensor, so many bytes apart. */
inline rows_of tensor_of(const void *memory, cpa_dtype dtype, int64_t row_bytes, int64_t head_bytes) {
    return {(char *)memory, 0, row_bytes, head_bytes, 0, dtype, 0, NULL, 0, 0};
}

} // namespace

#endif
