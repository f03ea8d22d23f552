/* What every back end chooses by (cpattn/topk.h): scores as numbers that order them, the columns of a row that count,
 * and where they go. */
#ifndef CPA_KERNELS_TOPK_H
#define CPA_KERNELS_TOPK_H

#include <string.h>

#include <cpattn/topk.h>

/* The order of -infinity and NaN: what is not above it is not chosen. And that of forced entries, above +infinity. */
#define CPA_TOPK_NEVER 0x007fffffu
#define CPA_TOPK_FORCED 0xffffffffu

/* A number that is larger for a larger score, and the same for equal ones. */
CPA_HOST_DEVICE static inline uint32_t cpa_topk_order(float score) {
    const uint32_t sign = 0x80000000u, infinity = 0x7f800000u;
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    if ((bits & ~sign) > infinity) return CPA_TOPK_NEVER;
    if ((bits & ~sign) == 0) return sign;
    return bits & sign ? ~bits : bits | sign;
}

/* The columns of a row that count, and those that are forced: [first, forced_until) and [forced_from, end). */
typedef struct cpa_topk_row {
    int32_t first, end, forced_until, forced_from;
} cpa_topk_row;

CPA_HOST_DEVICE static inline int64_t cpa_topk_clamp(int64_t number, int64_t least, int64_t most) {
    return number < least ? least : number > most ? most : number;
}

CPA_HOST_DEVICE static inline cpa_topk_row cpa_topk_row_of(const cpa_topk_args *a, int64_t row) {
    const int64_t first = cpa_topk_clamp(a->first ? a->first[row] : 0, 0, a->width);
    const int64_t end = cpa_topk_clamp(a->end ? a->end[row] : a->width, first, a->width);
    int64_t until = first + a->forced_first, from = end - a->forced_last;
    if (a->shards) {
        const int64_t length = a->forced_last > 0 ? a->lengths[row] : 0;
        const int32_t shard = a->shards[row];
        until = a->forced_first;
        from = a->forced_last > 0 ? cpa_topk_clamp(length - a->forced_last, 0, length > 0 ? length : 0) : end;
        if (shard >= 0) {
            until = cpa_shard_len(a->map, shard, until);
            from = a->forced_last > 0 ? cpa_shard_len(a->map, shard, from) : end;
        }
    }
    cpa_topk_row out;
    out.first = (int32_t)first;
    out.end = (int32_t)end;
    out.forced_until = (int32_t)cpa_topk_clamp(until, first, end);
    out.forced_from = (int32_t)cpa_topk_clamp(from, first, end);
    return out;
}

/* The order of a column that counts. */
CPA_HOST_DEVICE static inline uint32_t cpa_topk_column_order(cpa_topk_row row, int32_t column, float score) {
    return column < row.forced_until || column >= row.forced_from ? CPA_TOPK_FORCED : cpa_topk_order(score);
}

/* What `indices` gets for a column of a row. */
CPA_HOST_DEVICE static inline int32_t cpa_topk_index(const cpa_topk_args *a, int64_t row, int32_t column) {
    if (a->shards) return a->shards[row] < 0 ? column : (int32_t)cpa_shard_pos(a->map, a->shards[row], column);
    if (!a->tables) return column;
    const int32_t *table = a->tables + (a->table_rows ? a->table_rows[row] : row) * a->table_stride;
    return table[column / a->block_size] * a->block_size + column % a->block_size;
}

/* Entries that a row of lists has room for, and the one behind what is chosen of a row; negative: none. */
CPA_HOST_DEVICE static inline int32_t cpa_topk_list_width(int32_t k, const int32_t *tails) {
    return tails ? k + 1 : k;
}
CPA_HOST_DEVICE static inline int32_t cpa_topk_tail(const int32_t *tails, int64_t row) {
    return tails ? tails[row] : -1;
}

/* The row of the results that a row's go to; negative: none. */
CPA_HOST_DEVICE static inline int64_t cpa_topk_out_row(const int32_t *out_rows, int64_t row) {
    return out_rows ? out_rows[row] : row;
}

/* What `scores` gets. */
CPA_HOST_DEVICE static inline float cpa_topk_score(float score) {
    const uint32_t minus_infinity = 0xff800000u;
    if (score == score) return score;
    memcpy(&score, &minus_infinity, sizeof score);
    return score;
}

/* The order of a candidate of merge. */
CPA_HOST_DEVICE static inline uint32_t cpa_topk_candidate_order(const cpa_topk_merge_args *a, int64_t row,
                                                                int32_t index, float score) {
    if (index < 0) return CPA_TOPK_NEVER;
    const int forced =
        index < a->forced_first ||
        (a->forced_last > 0 && index >= (int64_t)a->lengths[row] - a->forced_last && index < a->lengths[row]);
    return forced ? CPA_TOPK_FORCED : cpa_topk_order(score);
}

#endif
