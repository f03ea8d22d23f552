/* The step of context attention that is planned: its chunks, the block tables and the rows of this rank.
 * cpa_context_plan fills it; pass-KV, pass-Q and what scatters heads read it. */
#ifndef CPA_PLANNED_STEP_H
#define CPA_PLANNED_STEP_H

#include <cpattn/context.h>

#include "kernels/block_tables.h"

/* Layers whose keys lie in other blocks have sets of block tables of their own: at most so many. */
enum { CPA_MOST_TABLE_SETS = 8 };

/* A chunk of the planned step: tokens [start, end) of a sequence. */
typedef struct cpa_planned_chunk {
    int64_t start, end;
    cpa_placement placement;
    cpa_algorithm algorithm; /* CPA_AUTO: nothing travels, as it lies on one rank */
    int64_t table;           /* place in each set of tables of this rank's first entry */
    int32_t form;            /* form of the chunk's rows */
    /* Number of the chunk's first row among those of its form: own rows of this rank, or all where they are
     * replicated. */
    int64_t row;
} cpa_planned_chunk;

/* What one rank has of a chunk: the queries are its local indices [first, keys), the keys are [0, keys). */
typedef struct cpa_chunk_share {
    cpa_token_set tokens;
    int64_t first, rows, keys;
} cpa_chunk_share;

/* How the ranks take part in a step; the same on all of them. What follows from it is asked of the functions below. */
typedef enum cpa_step_kind {
    CPA_STEP_ALONE = 0,  /* nothing travels: there is one rank, or each sequence lies on one */
    CPA_STEP_MIXED,      /* each rank has its own rows; keys or queries travel, as each chunk says */
    CPA_STEP_DECODE,     /* as those, one row a sequence, all of one form; all that travel are queries */
    CPA_STEP_REPLICATED, /* each rank has all rows, and ends with some heads of them */
    CPA_STEP_RESERVED    /* as decode, of limits: lengths and tables lie on the device, and there are no chunks */
} cpa_step_kind;

typedef struct cpa_planned_step {
    cpa_owner_map map;
    int32_t rank;
    cpa_step_kind kind;
    /* Not 0: pass-KV takes the keys of all peers at once, and attends the rows of its chunks over the own shard too;
     * does not change from step to step. */
    int gathers;
    int64_t padded_rows; /* rows that every rank plans for, of one form, see cpa_context_plan_ahead; 0: each its own */
    cpa_planned_chunk *chunks;
    int64_t n_chunks, chunks_capacity;
    cpa_block_tables *tables; /* block tables of the chunks' sequences on this rank; not owned */
    /* Largest block id of each set, by cpa_block_tables_largest of the chunks' rows. */
    int32_t max_block[CPA_MOST_TABLE_SETS];
    int64_t rows[CPA_MOST_ROW_FORMS]; /* rows of this rank, by form */
} cpa_planned_step;

void cpa_planned_step_destroy(cpa_planned_step *step);

/* Whether anything travels between ranks. */
static inline int cpa_step_exchanges(const cpa_planned_step *step) {
    return step->kind != CPA_STEP_ALONE && step->map.cp_size > 1;
}
/* Whether every rank has all rows. */
static inline int cpa_step_is_replicated(const cpa_planned_step *step) {
    return step->kind == CPA_STEP_REPLICATED;
}
/* Whether own rows are attended together with those that come from the peers: two attends of few rows take longer than
 * one, by more than what the first hides of the exchange. */
static inline int cpa_step_joins_own(const cpa_planned_step *step) {
    return step->kind == CPA_STEP_DECODE || step->kind == CPA_STEP_RESERVED;
}

/* The rows of a form that every rank plans for; 0: each its own. */
static inline int64_t cpa_planned_padding(const cpa_planned_step *step, int32_t form) {
    return step->rows[form] > 0 ? step->padded_rows : 0;
}

/* Whether some rank has rows of the form. */
int cpa_planned_has_form(const cpa_planned_step *step, int32_t form);

/* The end of the longest sequence. */
int64_t cpa_planned_end(const cpa_planned_step *step);

/* Pure; `rank` is any rank of the map. */
cpa_chunk_share cpa_planned_share(const cpa_planned_step *step, const cpa_planned_chunk *chunk, int32_t rank);
/* map[i]: the row of the whole step, all tokens of chunk after chunk, that a rank's i-th row of the chunk is;
 * first_row: that of the chunk's first token. And that of each own row of a form. */
void cpa_planned_map_rows(const cpa_planned_step *step, const cpa_planned_chunk *chunk, int32_t rank, int64_t first_row,
                          int32_t *map);
void cpa_planned_map_own(const cpa_planned_step *step, int32_t form, int32_t *map);
/* The own rows of a chunk over the own shard, from a local index on. */
cpa_attend_item cpa_planned_own_item(const cpa_planned_step *step, const cpa_planned_chunk *chunk, int64_t first);
/* Whether pass-KV attends the rows of a chunk over the own shard too. */
int cpa_planned_own_in_pass_kv(const cpa_planned_step *step, const cpa_planned_chunk *chunk);
/* Puts the own rows of a form over the own shard, but those that pass-KV takes, behind n items, as rows from first_row
 * on. There is room for an item a chunk. Returns how many items there are then. */
int64_t cpa_planned_own_items(const cpa_planned_step *step, int32_t form, cpa_attend_item *items, int64_t n,
                              int64_t first_row);

#endif
