/* Blocks that copy engines move: the keys or the values of one in one piece. */
#ifndef CPA_OPS_KV_PIECE_H
#define CPA_OPS_KV_PIECE_H

#include "kernels/kv_view.h"

/* Bytes of a block of the keys or the values of a resolved view whose rows lie one behind the other, with the scales
 * behind them; 0: they do not. What a block without such scales has behind its rows may be its neighbour. */
static inline int64_t cpa_kv_piece_bytes(const cpa_kv_view *kv, cpa_kv_part part) {
    const cpa_kv_pool pool = cpa_kv_pool_of(kv, part);
    const int64_t rows = (int64_t)kv->block_size * kv->kv_heads * pool.row_bytes;
    const int64_t last = (kv->block_size - 1) * pool.token_stride + (kv->kv_heads - 1) * pool.head_stride;
    if (kv->layout != CPA_VLLM_X && last + pool.row_bytes != rows) return 0;
    if (pool.scale_bytes == 0) return rows;
    return cpa_kv_block_bytes(kv->dtype, part, pool.tensor_scale, kv->block_size, kv->kv_heads, pool.row_dim);
}

#endif
