/* The keys that an indexer chooses for the rows of a step (cpa_context_select): what is planned of it with the step,
 * and one layer. Of a row of a sharded sequence each rank scores its own keys and tells all ranks of its best, of which
 * each rank chooses the same (cpattn/topk.h). */
#ifndef CPA_INDEX_CHOICE_H
#define CPA_INDEX_CHOICE_H

#include "src/context/context_ops.h"
#include "src/context/planned_step.h"
#include "src/context/step_maps.h"

/* Rows of a chunk that one rank has, all of them where rows are replicated: rows of a choice from `row` on. */
typedef struct cpa_choice_group {
    int64_t chunk, row, rows, first; /* `first`: local index of the first one in its token set */
    cpa_token_set tokens;
    int32_t rank;
    int64_t given_at;  /* the caller's row that the first one is; -1: it is another rank's */
    int64_t chunk_row; /* row of the step that the first token of the chunk is */
} cpa_choice_group;

/* Rows that are chosen for alike: [row, row + rows), of which so many are scored at once. */
typedef struct cpa_choice_part {
    int64_t row, rows, most_rows;
    int64_t columns, stride; /* most entries of a row on this rank, and floats from row to row of their scores */
} cpa_choice_part;

/* Rows [row, row + rows) that are scored together, with a plan for each set of block tables. */
typedef struct cpa_choice_piece {
    int64_t row, rows;
    cpa_index_plan *plans[CPA_MOST_TABLE_SETS];
} cpa_choice_piece;

/* Pieces of a step. Those of padded steps have plans that are reserved, and stay; others are the step's, or those of
 * the one before, which may be under way. */
typedef struct cpa_choice_pieces {
    cpa_choice_piece *list;
    int64_t count, capacity, made; /* the first `made` have plans */
} cpa_choice_pieces;

typedef struct cpa_index_choice {
    cpa_context_ops *ops;
    const cpa_planned_step *step;
    cpa_choice_group *groups;
    int64_t n_groups, groups_capacity;
    cpa_choice_pieces pieces[2], padded_pieces;
    int turn;                   /* which of `pieces` is next */
    cpa_choice_pieces *of_step; /* those of the planned step */
    /* Rows, in this order: those of sharded sequences, rank after rank, or chunk after chunk where rows are replicated;
     * own rows of sequences that lie here; and rows of sequences that lie on other ranks, of which nothing is known. In
     * a padded step that exchanges all are shared, so that its launches do not depend on where sequences lie; each rank
     * has the rows that the step is padded to, the last of which may be of no sequence and get empty lists. */
    cpa_choice_part shared, own;
    int64_t foreign_rows, rows; /* rows: all of them, as many as the step has */
    /* Of each row how many entries it sees here, its shard, how many entries it sees in all, its row in the step, and
     * the entry that is listed behind what is chosen. */
    cpa_step_maps maps;
    cpa_context_buffer queries, scores, candidates, lists, counts;
} cpa_index_choice;

void cpa_index_choice_create(cpa_index_choice *choice, cpa_context_ops *ops, const cpa_planned_step *step);
void cpa_index_choice_destroy(cpa_index_choice *choice);

/* Enqueues what brings the plan to the device, once for each stream. */
cpa_status cpa_index_choice_upload(cpa_index_choice *choice, cpa_stream *stream);
/* A number that two padded plans share only if choices enqueue the same on this rank. */
uint64_t cpa_index_choice_shape(const cpa_index_choice *choice);

/* Bytes of the queries of a row, and of their weights behind them, as they travel. */
static inline int64_t cpa_index_choice_row_bytes(const cpa_index_form *form) {
    const int64_t head = form->dim * cpa_dtype_bytes(form->dtype) + (form->has_weights ? (int64_t)sizeof(float) : 0);
    return (form->heads * head + 15) / 16 * 16;
}

/* The most entries of a list. */
static inline int32_t cpa_index_list_width(const cpa_index_form *form) {
    return form->open_tail ? form->k + 1 : form->k;
}

/* Whether something travels. */
int cpa_index_choice_exchanges(const cpa_index_choice *choice);
/* The rows that the caller gives queries of. */
int64_t cpa_index_choice_given_rows(const cpa_index_choice *choice);
cpa_status cpa_index_choice_run(cpa_index_choice *choice, const cpa_context_select_args *args, cpa_key_indices *out,
                                cpa_stream *stream);

#endif
