/* The best entries of rows of scores, exactly and in a defined order: what an indexer's logits choose for sparse
 * attention (DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556, section 2.1), on one device, or from shards whose candidates
 * are merged.
 *
 * Of two entries the better one has the larger score, of equal scores the smaller index. NaN counts as -infinity, -0
 * equals +0, and an entry of -infinity is never chosen: a row with fewer entries above it than k gets these alone. What
 * is chosen is listed by ascending index, then -1: lists as cpa_key_indices (cpattn/selection.h) has them, of `k`
 * entries at most. The same entries on every back end.
 *
 * Forced entries are better than all others, whatever their score, NaN and -infinity too: those that the row always
 * attends. They count within k, which must have room for them.
 *
 * Pointers lie on the stream's device. Calls enqueue only; which calls may run at once is said in cpattn/device.h. */
#ifndef CPATTN_TOPK_H
#define CPATTN_TOPK_H

#include <cpattn/device.h>
#include <cpattn/owner_map.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The most entries that are chosen of a row, and the columns that a row has at most. */
#define CPA_MOST_TOPK 4096
#define CPA_TOPK_MOST_COLUMNS ((int64_t)1 << 30)

/* topk: the k best of the columns [first, end) of each row of logits. Others are not read. */
typedef struct cpa_topk_args {
    size_t size;
    int64_t rows;
    int64_t width;              /* columns of a row, 1 to CPA_TOPK_MOST_COLUMNS */
    const float *logits;        /* [rows, width] */
    int64_t logits_stride;      /* elements from row to row; 0 = width */
    const int32_t *first, *end; /* [rows] each, cut to 0..width; NULL: 0, and width */
    int32_t k;                  /* 1 to CPA_MOST_TOPK */
    int32_t *indices;           /* [rows, k]: what was chosen, ascending, then -1 */
    int64_t indices_stride;     /* 0 = k */
    int32_t *counts;            /* [rows], or NULL: how many were chosen */
    float *scores;              /* [rows, k], or NULL: the scores of `indices`, -infinity for NaN; then -infinity */
    int64_t scores_stride;      /* 0 = k */
    /* Which entries are forced, as counts of entries: the first ones of a row and the last ones, [first, first +
     * forced_first) and [end - forced_last, end); an entry of both counts once. The block that a row itself lies in is
     * the last entry where entries are blocks, so forced_last = 1 takes it. Together at most k. */
    int32_t forced_first, forced_last;
    /* Columns are the entries of a shard (cpattn/owner_map.h): column j of a row is entry cpa_shard_pos(map,
     * shards[row], j) of its sequence, which `indices` gets, and below 2^31; a negative shard holds all: entry j.
     * Forced entries are those of the sequence then, [0, forced_first) and [lengths[row] - forced_last, lengths[row]),
     * as far as the shard has them. NULL: columns are entries. */
    const int32_t *shards; /* [rows], below map.cp_size */
    const int32_t
        *lengths; /* [rows]: entries of the sequence that the row sees, on all shards; with shards and forced_last */
    cpa_owner_map map; /* interleave counts entries */
    /* Not with shards. `indices` gets slots: column j of a row is slot table[j / block_size] * block_size + j %
     * block_size of the table that begins at tables + (table_rows ? table_rows[row] : row) * table_stride; of that only
     * the entries of what is chosen are read, which are not negative. Ascending is the column then. NULL: no slots. */
    const int32_t *tables;
    const int32_t *table_rows; /* [rows], or NULL */
    int64_t table_stride;      /* 0: all rows have the same table */
    int32_t block_size;        /* a power of two */
    const int32_t
        *out_rows; /* [rows]: row of indices, counts and scores that a row's go to; negative: none; NULL: its own */
    /* NULL, or [rows]: an entry that is listed behind what is chosen, beside the k and larger than all of it, such
     * as the last one of a sequence that has no score yet; negative: none. Rows of indices have k + 1 entries then,
     * 0 as their stride stands for that, and counts counts it. With neither scores nor tables. */
    const int32_t *tails;
} cpa_topk_args;
CPA_API cpa_status cpa_topk(const cpa_topk_args *args, cpa_stream *stream);

/* topk_merge: the k best of the candidates of a row in n lists, each the k or so best of a part of the row's entries:
 * what shards have chosen by topk, with their scores. An entry is in one list at most. The result is that of topk over
 * all entries, the same wherever it is computed. */
typedef struct cpa_topk_merge_args {
    size_t size;
    int64_t rows;
    int32_t n;     /* lists of a row, 1 to CPA_MERGE_MAX_STATES (cpattn/ops.h) */
    int32_t width; /* entries of a list, 1 to CPA_MOST_TOPK */
    /* List i of a row begins at i * list_stride + row * row_stride of both: indices that ascend, then negative ones,
     * which are none, and their scores. */
    const float *scores;
    const int32_t *indices;
    int64_t list_stride;     /* 0 = rows * row_stride */
    int64_t row_stride;      /* 0 = width */
    int32_t k;               /* 1 to CPA_MOST_TOPK */
    int32_t *out;            /* [rows, k]: indices that were chosen, ascending, then -1 */
    int64_t out_stride;      /* 0 = k */
    int32_t *counts;         /* [rows], or NULL */
    int32_t forced_first;    /* entries [0, forced_first) are forced, */
    int32_t forced_last;     /* and [lengths[row] - forced_last, lengths[row]) */
    const int32_t *lengths;  /* [rows]; with forced_last */
    const int32_t *out_rows; /* [rows]: as of topk */
    const int32_t *tails;    /* [rows]: as of topk */
} cpa_topk_merge_args;
CPA_API cpa_status cpa_topk_merge(const cpa_topk_merge_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
