/* Prefill tiles: what a piece of one costs, by which a plan orders them; and how an update of a reserved plan makes
 * pieces of the tiles of its items, each by itself (attend_plan_tiles.cu). Compiled for the host for its test too. */
#ifndef CPA_CUDA_ATTEND_TILES_H
#define CPA_CUDA_ATTEND_TILES_H

#include "kernels/cuda/attend/attend.h"

/* Keys of the piece that a causal query sees at most, or all where rows see all: how long it will take. */
CPA_HOST_DEVICE static inline int64_t cpa_cuda_visible_keys(cpa_owner_map map, const cpa_cuda_piece *piece,
                                                            int32_t group, int full) {
    const int64_t last = cpa_token_position(map, piece->q_set, piece->q_first + (piece->row_end - 1) / group);
    int64_t end = cpa_tokens_before(map, piece->k_set, last + 1) - piece->k_first;
    if (end > piece->k_end || full) end = piece->k_end;
    return end > piece->k_begin ? end - piece->k_begin : 0;
}

/* The bucket of a piece when all are sorted, the longest first; `most`: the largest cost of all, at least 1. */
enum { CPA_CUDA_COST_BUCKETS = 1024 };
CPA_HOST_DEVICE static inline int32_t cpa_cuda_cost_bucket(int64_t cost, int64_t most) {
    return (int32_t)((most - cost) * (CPA_CUDA_COST_BUCKETS - 1) / most);
}

/* Whether an item's rows are prefill tiles. */
CPA_HOST_DEVICE static inline int cpa_cuda_is_tiled(const cpa_cuda_update_args *a, const cpa_cuda_item *item) {
    return item->item.q_count * a->group > a->decode_rows && item->item.k_count > 0;
}

/* An item of tiles, as it is listed; where its own begin among pieces, partial rows and splits is told by
 * cpa_cuda_tile_counts of those before it. */
CPA_HOST_DEVICE static inline cpa_cuda_tiled_item cpa_cuda_tiled_item_of(const cpa_cuda_update_args *a, int32_t index) {
    const cpa_attend_item *item = &a->items[index].item;
    cpa_cuda_tiled_item tiled = {0};
    tiled.item = index;
    tiled.rows = (int32_t)item->q_count * a->group;
    tiled.tiles = (int32_t)cpa_cuda_ceil_div(tiled.rows, a->tiles.rows);
    tiled.keys = (int32_t)cpa_cuda_ceil_div(item->k_count, CPA_CUDA_PREFILL_KEYS);
    return tiled;
}

/* Pieces of each tile of an item; `split` as everywhere here in CPA_CUDA_PREFILL_KEYS. */
CPA_HOST_DEVICE static inline int32_t cpa_cuda_cuts_of(const cpa_cuda_tiled_item *tiled, int64_t split) {
    return (int32_t)cpa_cuda_ceil_div(tiled->keys, split);
}

/* What an item has of pieces, partial rows and splits. */
CPA_HOST_DEVICE static inline cpa_cuda_tile_count cpa_cuda_tile_count_of(const cpa_cuda_tiled_item *tiled,
                                                                         int64_t split) {
    const int32_t cuts = cpa_cuda_cuts_of(tiled, split);
    const cpa_cuda_tile_count whole = {tiled->tiles, 0, 0},
                              cut = {tiled->tiles * cuts, tiled->rows * cuts, tiled->tiles};
    return cuts > 1 ? cut : whole;
}

/* The piece of a tile of an item, and the state that all of its rows get together. Rows of the tiles before it are full.
 */
CPA_HOST_DEVICE static inline cpa_cuda_piece cpa_cuda_tile_piece(const cpa_cuda_update_args *a,
                                                                 const cpa_cuda_tiled_item *tiled, int64_t split,
                                                                 int32_t of_item) {
    const cpa_cuda_item *from = &a->items[tiled->item];
    const int32_t cuts = cpa_cuda_cuts_of(tiled, split), tile = of_item / cuts, cut = of_item % cuts;
    const int32_t begin = tile * a->tiles.rows, left = tiled->rows - begin, keys = (int32_t)from->item.k_count;
    const int32_t rows = left < a->tiles.rows ? left : a->tiles.rows;
    const int64_t length = split * CPA_CUDA_PREFILL_KEYS;
    cpa_cuda_piece piece = {0};
    piece.q_row = from->item.q_row;
    piece.state_shift = from->state_shift;
    piece.q_first = from->item.q_first;
    piece.k_first = from->item.k_first;
    piece.table = from->item.table;
    piece.row_begin = begin;
    piece.row_end = begin + rows;
    piece.k_begin = (int32_t)(cut * length);
    piece.k_end = cut + 1 < cuts ? (int32_t)((cut + 1) * length) : keys;
    piece.q_set = from->item.q_set;
    piece.k_set = from->item.k_set;
    piece.partial = cuts > 1 ? a->tiles.first_partial + tiled->before.partial_rows + begin * cuts + cut * rows : -1;
    piece.next = -1;
    return piece;
}

/* The split of the tile whose first piece that is, of an item whose tiles are cut. */
CPA_HOST_DEVICE static inline cpa_cuda_split cpa_cuda_tile_split(const cpa_cuda_piece *first, int32_t cuts) {
    cpa_cuda_split split;
    split.q_row = first->q_row;
    split.state_shift = first->state_shift;
    split.row_begin = first->row_begin;
    split.row_end = first->row_end;
    split.partial = first->partial;
    split.count = cuts;
    return split;
}

/* The last of the listed items that begins at or before a piece. */
CPA_HOST_DEVICE static inline int32_t cpa_cuda_tiled_item_at(const cpa_cuda_tiled_item *list, int32_t n,
                                                             int32_t piece) {
    int32_t low = 0, high = n;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (list[middle].before.pieces <= piece) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

#endif
