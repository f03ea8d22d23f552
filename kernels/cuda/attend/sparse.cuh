/* The keys of a row that lists name, position by position, and where each lies. */
#ifndef CPA_CUDA_SPARSE_CUH
#define CPA_CUDA_SPARSE_CUH

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/sparse.h"

namespace {

/* A row of the call: the piece has the item's, or no more than its place. */
struct listed_row {
    cpa_cuda_piece piece;
    row_keys seen; /* of the item's keys, where entries are indices */
    int32_t sinks;
    bool any; /* false: nobody's row, of a plan that is filled up */
};

/* Row `index` of the call. Member by member, as it may lie in shared memory: registers are few. */
__device__ inline void fill_listed_row(listed_row &row, const cpa_cuda_sparse_args &args, int64_t index) {
    const cpa_cuda_attend_args &a = args.a[0];
    cpa_cuda_piece &piece = row.piece;
    row.any = true;
    piece.row_begin = 0, piece.row_end = a.group;
    piece.partial = -1;
    piece.q_row = index;
    piece.state_shift = 0;
    piece.ready = piece.refused = 0;
    if (args.lists[0].slots > 0) return;
    const cpa_cuda_item *found = item_of_row(a, index * a.group);
    const int64_t token = index - found->begin / a.group;
    row.any = token >= 0 && token < found->item.q_count;
    if (!row.any) return;
    piece.q_row = found->item.q_row + token;
    piece.state_shift = found->state_shift;
    piece.q_first = found->item.q_first + token;
    piece.k_first = found->item.k_first;
    piece.table = found->item.table;
    piece.k_end = (int32_t)found->item.k_count;
    piece.q_set = found->item.q_set;
    piece.k_set = found->item.k_set;
    piece.refused = found->refused;
    row.seen = keys_of_row(a, piece, 0);
    row.sinks = row.seen.first > 0 ? keys_before(a, piece, a.mask.sinks) : 0;
}

/* The list of a row and KV head. */
struct listed_keys {
    const int32_t *entries; /* NULL: all keys of the item */
    int32_t count;          /* positions: tokens of all entries */
    int32_t unit;
};

__device__ inline listed_keys listed_keys_of(const cpa_cuda_lists &lists, const listed_row &row, int kv_head) {
    if (!row.any) return {nullptr, 0, 1};
    const int64_t of = lists.row_map ? lists.row_map[row.piece.q_row] : row.piece.q_row;
    const int32_t entries = lists.counts ? min(lists.counts[of], lists.width) : lists.width;
    if (entries < 0 && lists.slots == 0) return {nullptr, row.seen.end, 1};
    return {lists.entries + of * lists.row_stride + kv_head * lists.head_stride, max(entries, 0) * lists.unit,
            lists.unit};
}

/* A key of the item by its index in the sequence; -1: it is none of them. */
__device__ inline int64_t key_of_index(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int64_t index) {
    int64_t key = index;
    if (a.map.cp_size > 1) {
        key = cpa_tokens_before(a.map, piece.k_set, index);
        if (cpa_tokens_before(a.map, piece.k_set, index + 1) == key) return -1;
    }
    return key - piece.k_first;
}

/* The entry of the list that has a position. */
__device__ inline int32_t entry_at(const listed_keys &keys, int32_t position) {
    if (position >= keys.count) return -1;
    if (!keys.entries) return 0;
    return __ldg(keys.entries + (keys.unit > 1 ? position / keys.unit : position));
}

/* The slot of a position, given its entry; -1: no key is attended there. */
__device__ inline int64_t slot_of(const cpa_cuda_attend_args &a, const cpa_cuda_lists &lists, const listed_row &row,
                                  const listed_keys &keys, int32_t position, int32_t entry) {
    if (position >= keys.count || entry < 0) return -1;
    int64_t token = position;
    if (keys.entries) {
        token = (int64_t)entry * keys.unit + (keys.unit > 1 ? position % keys.unit : 0);
        if (lists.slots > 0) return token < lists.slots ? token : -1;
        token = key_of_index(a, row.piece, token);
    }
    if (token < 0 || token >= row.piece.k_end || !sees(row.seen, row.sinks, (int32_t)token)) return -1;
    const int64_t block = __ldg(a.tables + row.piece.table + (token >> a.block_shift));
    return (block << a.block_shift) + (token & ((1 << a.block_shift) - 1));
}

__device__ inline int64_t slot_at(const cpa_cuda_attend_args &a, const cpa_cuda_lists &lists, const listed_row &row,
                                  const listed_keys &keys, int32_t position) {
    return slot_of(a, lists, row, keys, position, entry_at(keys, position));
}

} // namespace

#endif
