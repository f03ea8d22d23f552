/* What the parts of a plan share while it is made. */
#ifndef CPA_CUDA_ATTEND_PLAN_H
#define CPA_CUDA_ATTEND_PLAN_H

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_cascade.h"
#include "kernels/cuda/attend/attend_split.h"

typedef struct cpa_cuda_plan_builder {
    const cpa_attend_batch *given;
    cpa_attend_batch own; /* the given batch, of whose items those that share keys have their own keys alone */
    const cpa_attend_batch *batch;
    cpa_cuda_cascade *cascade;
    cpa_cuda_cascade_cut cut; /* pieces over shared keys, and their rows */
    int64_t n_shared;         /* pieces over shared keys, and those that fill a padded plan up */
    int64_t n_listed;         /* rows in the lists of pieces over shared keys */
    const int64_t *state_shifts;
    cpa_table_set tables; /* the batch's tables, where they stay and the kernels read them */
    int32_t group;
    int32_t multiprocessors;
    int wide_fits;        /* whether wide CTAs of decode fit */
    int32_t tile_rows;    /* rows of a prefill tile */
    int64_t decode_rows;  /* packed, the most of an item of decode */
    cpa_cuda_team team;   /* CTAs of decode that work together */
    int64_t padded_items; /* most decode units of a plan whose launches stay the same; 0: as many as the plan has */
    int64_t unit_rows;    /* the most packed rows of a decode unit */
    int64_t n_decode;     /* decode units */
    int64_t n_tiles, tile_keys; /* prefill tiles, and the keys of all of them, in CPA_CUDA_PREFILL_KEYS */
    int64_t most_keys;          /* most keys of one prefill tile, in CPA_CUDA_PREFILL_KEYS */
    int64_t split_keys;         /* keys of a piece of a prefill tile */
    int64_t n_pieces;           /* pieces of prefill */
    int64_t by_head;            /* see cpa_cuda_prefill.by_head */
    int64_t tail_pieces;        /* pieces of prefill for which there is room beyond n_pieces */
    int64_t visible_keys;       /* keys that rows of all prefill pieces see */
    cpa_cuda_decode_shares shares;
    int64_t first_ready; /* index of the first ready item; all from it on are ready */
    int full, masked;    /* see cpa_attend_fusion */
    cpa_cuda_piece *decode;
    cpa_cuda_piece *prefill;
    cpa_cuda_costed_piece *in_order;
    cpa_cuda_split *splits; /* prefill */
    int64_t n_splits;
    int64_t n_decode_splits;
    int64_t partial_rows;
    int64_t n_places; /* blocks that are prepared */
} cpa_cuda_plan_builder;

static inline int cpa_cuda_is_decode(const cpa_cuda_plan_builder *b, const cpa_attend_item *item) {
    return cpa_cuda_packed_rows(b->batch, item) <= b->decode_rows;
}

/* attend_plan_pieces.c. How many units, tiles and keys there are. */
cpa_status cpa_cuda_plan_count_work(cpa_cuda_plan_builder *b, cpa_error *err);
/* Decides where keys are cut, which tells how many pieces there may be. */
void cpa_cuda_plan_choose_splits(cpa_cuda_plan_builder *b);
/* Finds sections for the pieces of prefill, large enough for what the splits may come to; *end moves behind them. */
void cpa_cuda_plan_place_prefill(const cpa_cuda_plan_builder *b, cpa_cuda_prefill *set, int64_t *end);
/* Writes the pieces; those of prefill in the order in which they run, to the sections that were found. */
void cpa_cuda_plan_write_decode(cpa_cuda_plan_builder *b);
void cpa_cuda_plan_write_prefill(cpa_cuda_plan_builder *b, char *image, cpa_cuda_prefill *set);

/* attend_plan_blocks.c. Whether items get tables of their own: those that lie on the device have to, and so do small
 * blocks that are prepared together, since their places depend on where an item begins and ends. */
int cpa_cuda_plan_packs_tables(const cpa_attend_batch *batch);
/* Items whose tables lie one behind the other; those of the host are copied. Notes the most entries of an item. */
cpa_status cpa_cuda_plan_pack_items(cpa_cuda_plan_memory *memory, const cpa_attend_batch *batch,
                                    cpa_attend_batch *packed, int64_t *most_entries, cpa_error *err);
#endif
