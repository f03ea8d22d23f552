/* Rows of latents that latent_norm_rope makes, and the cache that they go to. */
#ifndef CPA_CUDA_NN_LATENT_POOL_CUH
#define CPA_CUDA_NN_LATENT_POOL_CUH

#include <float.h>

#include "kernels/cuda/cache/tiles.cuh"
#include "kernels/cuda/nn/norm_rows.cuh"
#include "kernels/cuda/nn/rotate.cuh"

namespace {

/* The cache that rows go to; strides and offsets in bytes. */
struct latent_pool {
    const int64_t *slot_mapping; /* NULL: there is no cache */
    char *memory;
    cpa_dtype dtype;
    int64_t slots, block_stride, token_stride;
    int32_t block_shift;
    float scale; /* of all rows; 0: rows or tiles have scales of their own */
    const float *head_scales;
    int64_t words_at, bytes_at; /* from a block to the scales of its rows, or of their tiles; 0: none are there */
    int32_t tile, tiles, tail;  /* elements that share a scale, how many such, and those behind them */
    int64_t scales_at, tail_at; /* from the start of a row to its scales of tiles, 0: it has none, and to its tail */
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *nonfinite;
};

struct latent_args {
    norm_args norm;
    cpa_rotate_args key, queries;
    int32_t k_dim;
    void *out; /* NULL: rows go to the cache alone */
    int64_t out_stride;
    latent_pool pool;
};

/* The slot that a row is given; -1: none. */
__device__ int64_t given_slot(const latent_pool &pool, int64_t row) {
    return pool.slot_mapping ? pool.slot_mapping[row] : -1;
}

/* That, or -1 where there is no such slot, of which one thread of a row tells the stream. */
__device__ int64_t checked_slot(const latent_pool &pool, int64_t row, int64_t slot, bool tells) {
    if (slot >= -1 && slot < pool.slots) return slot;
    if (tells && atomicExch(&pool.bad_slot->found, 1) == 0) pool.bad_slot->token = row, pool.bad_slot->slot = slot;
    return -1;
}

/* The codes of a quantised cache, and what is made a code of an element. */
__device__ cpa_dtype codes_of(const latent_pool &pool) {
    return has_tiles(pool.dtype) ? CPA_FP8_E4M3 : pool.dtype;
}
__device__ float coded_element(const latent_pool &pool, float x) {
    return pool.dtype == CPA_FP8_T64 ? to_float(from_float<__nv_bfloat16>(x)) : x;
}

/* The scale word of a tile whose finite elements and 0 span [low, high]. */
__device__ uint32_t tile_word(const latent_pool &pool, float low, float high) {
    if (pool.dtype == CPA_FP8_T64) return power_byte(fmaxf(high, -low)) << 23;
    if (pool.dtype == CPA_FP8_T128) return __float_as_uint(fmaxf(__fdiv_rn(fmaxf(high, -low), 448.0f), FLT_MIN));
    return scale_word(pool.dtype, head_scale(pool.scale, pool.head_scales, 0, 0), low, high);
}

/* Where a row lies in its block, and the block, in bytes. */
struct latent_place {
    char *block, *row;
    int64_t offset; /* rows of the block in front of it */

    __device__ latent_place(const latent_pool &pool, int64_t slot)
        : block(pool.memory + (slot >> pool.block_shift) * pool.block_stride),
          offset(slot & ((1 << pool.block_shift) - 1)) {
        row = block + offset * pool.token_stride;
    }
    /* The scale of a row that has one of its own behind all rows of the block. */
    __device__ uint32_t *word(const latent_pool &pool) const { return (uint32_t *)(block + pool.words_at) + offset; }
    /* The scale of a tile of CPA_FP8_T64, from its word; with that of the first the pad behind the last. */
    __device__ void store_byte(const latent_pool &pool, int32_t tile, uint32_t word) const {
        uint8_t *bytes = (uint8_t *)block + pool.bytes_at + offset * POWER_SCALES;
        bytes[tile] = (uint8_t)(word >> 23);
        if (tile == 0) bytes[pool.tiles] = 0;
    }
};

} // namespace

#endif
