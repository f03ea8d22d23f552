/* Rows of one pool and their places in another, as kv_copy and kv_move take them. */
#ifndef CPA_CUDA_ROW_PAIRS_CUH
#define CPA_CUDA_ROW_PAIRS_CUH

#include "kernels/cuda/device/cuda.h"

namespace {

/* Keys, values, or the scales of either, of both pools, in bytes. Rows of row_bytes lie contiguous. */
struct tensor {
    const char *src;
    char *dst;
    int64_t src_block, src_token, src_head;
    int64_t dst_block, dst_token, dst_head;
    int64_t row_bytes;
};

tensor rows_of(const cpa_kv_pool &src, const cpa_kv_pool &dst) {
    return {src.memory,       dst.memory,       src.block_stride, src.token_stride, src.head_stride,
            dst.block_stride, dst.token_stride, dst.head_stride,  src.row_bytes};
}

/* The scales behind the rows: rows of one word in the order [kv_heads, block_size]. */
tensor scales_of(const cpa_kv_pool &src, const cpa_kv_pool &dst, int32_t block_size) {
    const int64_t bytes = src.scale_bytes, head = block_size * bytes;
    return {src.memory + src.scales_at,
            dst.memory + dst.scales_at,
            src.block_stride,
            bytes,
            head,
            dst.block_stride,
            bytes,
            head,
            bytes};
}

/* The widest access that every row, token and block of both pools is aligned to. */
int64_t alignment_of(const tensor (&tensors)[2]) {
    uintptr_t bits = 16;
    for (const tensor &t : tensors)
        bits |= (uintptr_t)t.src | (uintptr_t)t.dst | (uintptr_t)(t.src_block | t.src_token | t.src_head) |
                (uintptr_t)(t.dst_block | t.dst_token | t.dst_head) | (uintptr_t)t.row_bytes;
    return (int64_t)(bits & (0 - bits));
}

} // namespace

#endif
