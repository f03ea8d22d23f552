/* What the back ends share of XAttention (cpattn/xattn.h): which blocks of queries see which blocks of keys, and the rows
 * of a selection. */
#ifndef CPA_KERNELS_XATTN_H
#define CPA_KERNELS_XATTN_H

#include <cpattn/xattn.h>

/* Tokens of a chunk, so that its groups are counted in 32 bits. */
#define CPA_XATTN_MOST_TOKENS ((int64_t)1 << 30)

/* Whether groups are packed out of such a cache. */
static inline int cpa_xattn_reads(cpa_dtype dtype) {
    return cpa_dtype_is_plain(dtype) || dtype == CPA_FP8_E4M3 || dtype == CPA_INT8 || dtype == CPA_FP8_E5M2 ||
           cpa_dtype_is_turboquant(dtype);
}

/* The place in the sequence, in blocks, of the `block`-th from the local index `first` of a set on. */
CPA_HOST_DEVICE static inline int64_t cpa_xattn_place(const cpa_xattn_shape *shape, cpa_owner_map map,
                                                      cpa_token_set set, int64_t first, int64_t block) {
    const int64_t token = first + block * shape->block;
    const int alone = map.cp_size == 1 || set.kind == CPA_TOKENS_ALL;
    return (alone ? token : cpa_token_index(map, set, token)) / shape->block;
}

/* How many blocks of the chunk of keys a block of queries at that place sees some group of: the first ones. Of the
 * last of them, if it is the block's own, causality hides groups. */
CPA_HOST_DEVICE static inline int64_t cpa_xattn_blocks_seen(const cpa_xattn_shape *shape, const cpa_xattn_chunks *c,
                                                            int64_t place) {
    const int64_t all = (c->k_tokens + shape->block - 1) / shape->block, end = (place + 1) * shape->block;
    if (!shape->causal) return all;
    const int alone = c->map.cp_size == 1 || c->k_set.kind == CPA_TOKENS_ALL;
    const int64_t before = (alone ? end : cpa_tokens_before(c->map, c->k_set, end)) - c->k_first;
    const int64_t seen = before <= 0 ? 0 : (before + shape->block - 1) / shape->block;
    return seen < all ? seen : all;
}

/* The blocks of keys that a block row may keep, [0, end), of which [0, first) and [last, end) are forced. */
typedef struct cpa_xattn_row {
    int32_t end, first, last;
} cpa_xattn_row;

CPA_HOST_DEVICE static inline cpa_xattn_row cpa_xattn_row_of(const cpa_xattn_select_args *a, int64_t q_block) {
    const int64_t place = cpa_xattn_place(&a->shape, a->map, a->q_set, a->q_first, q_block);
    const int64_t recent = a->recent > 1 ? a->recent : 1;
    cpa_xattn_row row = {(int32_t)a->k_blocks, 0, (int32_t)a->k_blocks};
    if (!a->shape.causal) return row;
    row.first = 1;
    if (place + 1 < row.end) row.end = (int32_t)(place + 1);
    row.last = place + 1 - recent < row.end ? (int32_t)(place + 1 - recent) : row.end;
    if (row.last < row.first) row.last = row.first;
    return row;
}

/* Where A of a block of keys lies among those of its row. */
CPA_HOST_DEVICE static inline int64_t cpa_xattn_sum_at(const cpa_xattn_select_args *a, int32_t block) {
    if (a->map.cp_size == 1 || a->shard_stride == 0) return block;
    const cpa_owner_map of_blocks = {a->map.cp_size, a->map.interleave / a->shape.block};
    const cpa_placement sharded = {CPA_SHARDED, a->first_rank};
    const int32_t rank = cpa_owner_rank(of_blocks, sharded, block);
    return rank * a->shard_stride + cpa_shard_len(of_blocks, cpa_tokens_on(of_blocks, sharded, rank).shard, block);
}

#endif
