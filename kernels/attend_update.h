/* What an update of a reserved plan makes of a sequence: its rows, who asks for them, and their items over the own shard.
 * Every back end reads its arrays by these functions. */
#ifndef CPA_KERNELS_ATTEND_UPDATE_H
#define CPA_KERNELS_ATTEND_UPDATE_H

#include "kernels/attend_plan.h"

/* Where the table of a sequence begins, and its length; -1: it has none that could be its own. */
typedef struct cpa_attend_extent {
    int64_t table, length;
} cpa_attend_extent;

CPA_HOST_DEVICE static inline cpa_attend_extent cpa_attend_extent_of(const cpa_attend_update *update,
                                                                     int32_t block_size, int64_t s) {
    cpa_attend_extent extent = {s * update->table_stride, 0};
    if (update->kv_indptr) {
        const int64_t begin = update->kv_indptr[s], end = update->kv_indptr[s + 1];
        const int64_t last = update->last_page_len && end > begin ? update->last_page_len[s] : block_size;
        extent.table = begin;
        extent.length = end == begin ? 0 : (end - begin - 1) * block_size + last;
        if (begin < 0 || end < begin || end > update->n_indices || last < 1 || last > block_size) extent.length = -1;
    } else if (update->lengths) {
        extent.length =
            update->length_bytes == 4 ? ((const int32_t *)update->lengths)[s] : ((const int64_t *)update->lengths)[s];
    }
    return extent;
}

/* The rows of a sequence, as far as they can be its own. */
typedef struct cpa_attend_rows {
    int64_t first;
    int32_t count;
    int32_t fits; /* 0: there would be more */
} cpa_attend_rows;

/* Rows that all sequences of an update have together, at most. */
CPA_HOST_DEVICE static inline int64_t cpa_attend_most_rows(const cpa_attend_reservation *r,
                                                           const cpa_attend_update *update) {
    const int64_t rows = update->sequences * r->rows;
    return rows < r->total_rows ? rows : r->total_rows;
}

/* `before`: the largest of the entries of qo_indptr in front of the sequence's own, at least 0. So the rows of sequences
 * are apart, whatever the array holds. */
CPA_HOST_DEVICE static inline cpa_attend_rows cpa_attend_rows_of(const cpa_attend_reservation *r,
                                                                 const cpa_attend_update *update, int64_t s,
                                                                 int64_t before) {
    cpa_attend_rows rows = {s * r->rows, r->rows, 1};
    if (!update->qo_indptr) return rows;
    const int64_t begin = update->qo_indptr[s], end = update->qo_indptr[s + 1], most = r->rows;
    const int64_t all = r->fixed_rows ? end : cpa_attend_most_rows(r, update);
    if (!r->fixed_rows) rows.first = begin < before ? before : begin;
    if (end <= begin || (!r->fixed_rows && (begin < before || begin >= all))) {
        rows.count = 0;
        return rows;
    }
    const int64_t last = end < all ? end : all;
    rows.count = (int32_t)(last - begin < most ? last - begin : most);
    rows.fits = begin + rows.count == end;
    return rows;
}

/* What an update says of a sequence. */
typedef struct cpa_attend_sequence {
    int64_t table, length; /* length 0: it has no keys, or is refused */
    cpa_attend_rows rows;
    cpa_placement placement;
    int32_t first_asker; /* the rank of its first row; of a sequence without keys this one */
    int32_t refused;     /* cpa_attend_why; 0: it is not */
} cpa_attend_sequence;

CPA_HOST_DEVICE static inline cpa_attend_sequence cpa_attend_sequence_of(const cpa_attend_reservation *r,
                                                                         const cpa_attend_update *update, int64_t s,
                                                                         int64_t before) {
    const cpa_attend_extent extent = cpa_attend_extent_of(update, r->block_size, s);
    cpa_attend_sequence found;
    found.table = extent.table;
    found.length = extent.length;
    found.rows = cpa_attend_rows_of(r, update, s, before);
    found.placement.kind = CPA_SHARDED;
    found.placement.rank = update->first_ranks ? update->first_ranks[s] : 0;
    found.refused = 0;
    if (found.length != 0 && (found.length < found.rows.count || found.length > r->tokens))
        found.refused = CPA_REFUSED_LENGTH;
    if (!found.rows.fits) found.refused = CPA_REFUSED_ROWS;
    if (!cpa_placement_is_valid(r->map, found.placement)) found.refused = CPA_REFUSED_RANK;
    if (found.refused) found.placement.rank = 0, found.length = 0;
    found.first_asker =
        found.length > 0 ? cpa_owner_rank(r->map, found.placement, found.length - found.rows.count) : r->rank;
    return found;
}

/* Keys of a sequence on a rank. */
CPA_HOST_DEVICE static inline int64_t cpa_attend_keys_on(const cpa_attend_reservation *r,
                                                         const cpa_attend_sequence *found, int32_t rank) {
    return cpa_tokens_before(r->map, cpa_tokens_on(r->map, found->placement, rank), found->length);
}

/* The rows that a rank asks for: local indices [first, first + count) of its tokens. */
typedef struct cpa_attend_asked {
    int64_t first;
    int32_t count;
} cpa_attend_asked;

CPA_HOST_DEVICE static inline cpa_attend_asked cpa_attend_asked_by(const cpa_attend_reservation *r,
                                                                   const cpa_attend_sequence *found, int32_t rank) {
    cpa_attend_asked asked = {0, rank == r->rank ? found->rows.count : 0};
    if (found->length == 0) return asked;
    const cpa_token_set own = cpa_tokens_on(r->map, found->placement, rank);
    asked.first = cpa_tokens_before(r->map, own, found->length - found->rows.count);
    asked.count = (int32_t)(cpa_tokens_before(r->map, own, found->length) - asked.first);
    return asked;
}

/* Ranks that may ask for rows of one sequence, one behind the other from the first on: as many as its new tokens lie in
 * runs of. */
CPA_HOST_DEVICE static inline int32_t cpa_attend_askers(const cpa_attend_reservation *r) {
    const int64_t runs = ((int64_t)r->rows - 1 + r->map.interleave - 1) / r->map.interleave + 1;
    return runs < r->map.cp_size ? (int32_t)runs : r->map.cp_size;
}
CPA_HOST_DEVICE static inline int32_t cpa_attend_asker(const cpa_attend_reservation *r,
                                                       const cpa_attend_sequence *found, int32_t index) {
    return (found->first_asker + index) % r->map.cp_size;
}

/* The item of the rows of an asker over the own shard, of `keys` keys, whose entries begin at `table`; without rows where
 * nothing is attended. `refused`: the sequence is, or its table. */
CPA_HOST_DEVICE static inline cpa_attend_item cpa_attend_item_of(const cpa_attend_reservation *r,
                                                                 const cpa_attend_sequence *found, int32_t asker,
                                                                 cpa_attend_place place, int64_t keys, int64_t table,
                                                                 int refused) {
    const cpa_attend_asked asked = cpa_attend_asked_by(r, found, asker);
    /* An empty sequence has rows where results are those of the attend, and not of a merge by row maps. */
    const int has_rows = found->length > 0 ? asker == r->rank : !r->row_maps;
    cpa_attend_item item = {0};
    item.q_row = place.first_row + found->rows.first;
    item.q_count = refused || keys > 0 || has_rows ? asked.count : 0;
    item.q_first = asked.first;
    item.k_count = refused ? 0 : keys;
    item.table = table;
    item.q_set = cpa_tokens_on(r->map, found->placement, asker);
    item.k_set = cpa_tokens_on(r->map, found->placement, r->rank);
    return item;
}

/* The entry of row_maps for a rank and the i-th row of the sequence. */
CPA_HOST_DEVICE static inline int32_t cpa_attend_map_row(const cpa_attend_reservation *r,
                                                         const cpa_attend_sequence *found, int32_t rank, int32_t i) {
    const int asks = i < cpa_attend_asked_by(r, found, r->rank).count && (found->refused || found->length > 0);
    const int has = rank == r->rank || cpa_attend_keys_on(r, found, rank) > 0;
    return asks && has ? (int32_t)(found->rows.first + i) : -1;
}

/* The row of the step that is the i-th of a rank's. Those that it does not have are any. */
CPA_HOST_DEVICE static inline int32_t cpa_attend_step_row(const cpa_attend_reservation *r,
                                                          const cpa_attend_sequence *found, int32_t rank, int32_t i) {
    const cpa_attend_asked asked = cpa_attend_asked_by(r, found, rank);
    if (found->length == 0 || i >= asked.count) return (int32_t)found->rows.first;
    const cpa_token_set own = cpa_tokens_on(r->map, found->placement, rank);
    const int64_t position = cpa_token_position(r->map, own, asked.first + i);
    return (int32_t)(found->rows.first + position - (found->length - found->rows.count));
}

#endif
