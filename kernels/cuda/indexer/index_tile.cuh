/* The rows of a CTA of index_logits, where their keys lie, and how their columns are stored. */
#ifndef CPA_CUDA_INDEX_TILE_CUH
#define CPA_CUDA_INDEX_TILE_CUH

#include <math.h>

#include "kernels/cuda/indexer/index_logits.h"

namespace {

/* A CTA of a reserved plan may have no rows, and then no keys. */
struct index_tile {
    const cpa_attend_item *item;
    int32_t first, rows; /* rows of the item; rows below 1: none */
    int32_t keys;        /* that some row sees: the first ones */
};

__device__ inline index_tile find_index_tile(const cpa_cuda_index_work &w, int32_t index) {
    int32_t low = w.first_item, high = w.end_item;
    index += w.first_tile;
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (w.starts[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    index_tile tile;
    tile.item = w.items.items + low;
    tile.first = (index - w.starts[low]) * w.rows;
    tile.rows = (int32_t)min((int64_t)w.rows, tile.item->q_count - tile.first);
    tile.keys = tile.rows < 1 ? 0 : (int32_t)cpa_index_keys_seen(&w.items, tile.item, tile.first + tile.rows - 1);
    return tile;
}

/* A block that a table entry names, which on the device may be anything; that of a key, and its row and scale there. */
__device__ inline int64_t index_block(const cpa_cuda_index_work &w, int32_t entry) {
    return min(max((int64_t)entry, (int64_t)0), w.keys.num_blocks - 1);
}
__device__ inline int64_t index_block(const cpa_cuda_index_work &w, const cpa_attend_item *item, int32_t key) {
    return index_block(w, __ldg(w.tables + item->table + (key >> w.block_shift)));
}
__device__ inline const char *index_row(const cpa_cuda_index_work &w, int64_t block, int32_t key) {
    return w.keys.rows + block * w.keys.block_stride + (key & ((1 << w.block_shift) - 1)) * w.keys.token_stride;
}
__device__ inline const float *index_scale(const cpa_cuda_index_work &w, int64_t block, int32_t key) {
    return w.keys.scales + block * w.keys.scale_stride + (key & ((1 << w.block_shift) - 1));
}
__device__ inline float read_index_scale(const cpa_cuda_index_work &w, int64_t block, int32_t key) {
    return w.keys.scales ? *index_scale(w, block, key) * w.keys.scale : w.keys.scale;
}

/* The columns of a row from the scores of `count` keys in shared memory, a multiple of the unit, from key `first` on;
 * the row sees the first `seen` keys of its item. */
__device__ inline void store_columns(const cpa_cuda_index_work &w, int64_t row, int32_t first, int32_t seen,
                                     const float *scores, int32_t count) {
    float *const out = w.logits + row * w.row_stride;
    for (int32_t i = threadIdx.x << w.unit_shift; i < count; i += blockDim.x << w.unit_shift) {
        const int64_t column = (first + i) >> w.unit_shift;
        if (column >= w.width) return;
        float most = first + i < seen ? scores[i] : -INFINITY;
        for (int32_t e = 1; e < 1 << w.unit_shift && first + i + e < seen; e++) most = fmaxf(most, scores[i + e]);
        out[column] = most;
    }
}

/* Chunks of so many keys that the columns have. */
inline int64_t index_chunks(const cpa_cuda_index_work &w, int64_t chunk) {
    return ((w.width << w.unit_shift) + chunk - 1) / chunk;
}

} // namespace

#endif
