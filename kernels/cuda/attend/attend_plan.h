/* What the parts of a plan share while it is made. */
#ifndef CPA_CUDA_ATTEND_PLAN_H
#define CPA_CUDA_ATTEND_PLAN_H

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/attend/attend_cascade.h"
#include "kernels/cuda/attend/attend_split.h"

typedef struct cpa_cuda_plan_builder {
    const cpa_attend_batch *given;
    cpa_attend_batch own; /* the same, where items share keys with those alone that are their own */
    const cpa_attend_batch *batch;
    cpa_cuda_cascade *cascade;
    cpa_cuda_cascade_cut cut; /* of shared keys */
    int64_t n_shared;         /* pieces over them, and those that fill a padded plan up */
    int64_t n_listed;         /* rows of theirs */
    const int64_t *state_shifts;
    cpa_table_set tables; /* that stay, and that the kernels read */
    int32_t group;
    int32_t multiprocessors;
    int wide_fits;              /* CTAs of decode */
    int32_t tile_rows;          /* of prefill */
    int64_t padded_items;       /* the most decode units of a plan whose launches stay the same; 0: of this one */
    int64_t unit_rows;          /* and the most packed rows of one of them */
    int64_t n_decode;           /* units */
    int64_t n_tiles, tile_keys; /* prefill tiles, and the keys of all of them, in CPA_CUDA_PREFILL_KEYS */
    int64_t most_keys;          /* of one tile, in the same unit */
    int64_t split_keys;         /* prefill tiles are cut into pieces of so many */
    int64_t n_pieces;           /* prefill */
    int64_t by_head;            /* as in the plan */
    int64_t tail_pieces;        /* prefill; room for so many more */
    int64_t visible_keys;       /* of all prefill pieces */
    cpa_cuda_decode_shares shares;
    int64_t first_ready; /* item; the last ones are ready */
    int full, masked;    /* as in the fusion */
    cpa_cuda_piece *decode;
    cpa_cuda_piece *prefill;
    cpa_cuda_costed_piece *in_order;
    cpa_cuda_split *splits; /* prefill */
    int64_t n_splits;
    int64_t n_decode_splits;
    int64_t partial_rows;
    int64_t n_widened; /* places of blocks of prefill items, and of shared ones, if their kernels take no others */
} cpa_cuda_plan_builder;

static inline int cpa_cuda_is_decode(const cpa_cuda_plan_builder *b, const cpa_attend_item *item) {
    return cpa_cuda_packed_rows(b->batch, item) <= cpa_cuda_most_decode_rows(&b->batch->shape, b->batch->block_size);
}

/* Whether prefill kernels may need blocks widened: where the cache is quantised, or its rows lie in runs. */
static inline int cpa_cuda_may_widen(const cpa_attend_batch *batch) {
    return cpa_dtype_is_quantised(batch->shape.kv_dtype) || batch->shape.layout == CPA_VLLM_X;
}

static inline int64_t cpa_cuda_places_of(const cpa_attend_batch *batch, const cpa_attend_item *item) {
    return cpa_cuda_wide_places(batch->block_size, cpa_cuda_ceil_div(item->k_count, batch->block_size));
}

/* attend_plan_pieces.c. Decides where keys are cut, which tells how many pieces there may be. */
void cpa_cuda_plan_choose_splits(cpa_cuda_plan_builder *b);
/* Writes the pieces; those of prefill in the order in which they run. */
void cpa_cuda_plan_write_decode(cpa_cuda_plan_builder *b);
void cpa_cuda_plan_write_prefill(cpa_cuda_plan_builder *b);

/* attend_plan_blocks.c. Whether items get tables of their own: those that lie on the device have to, and so do small
 * blocks that are widened together, since their places depend on where an item begins and ends. */
int cpa_cuda_plan_packs_tables(const cpa_attend_batch *batch);
/* Items whose tables lie one behind the other; those of the host are copied. Notes the most entries of an item. */
cpa_status cpa_cuda_plan_pack_items(cpa_cuda_plan_memory *memory, const cpa_attend_batch *batch,
                                    cpa_attend_batch *packed, int64_t *most_entries, cpa_error *err);
/* Room for so many blocks in the dtype of the queries; 0: there is none. */
int cpa_cuda_plan_reserve_blocks(cpa_cuda_plan *plan, const cpa_attend_batch *batch, int64_t blocks);
/* Places for the blocks of shared keys, if these have to be widened and there is room; 0: there is none. */
int cpa_cuda_plan_widens_shared(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan);
/* Gives each block of the prefill items, and of shared keys, a place; what lies on the device is placed there. */
void cpa_cuda_plan_place_blocks(const cpa_cuda_plan_builder *b, int32_t *tables, int32_t *blocks,
                                cpa_cuda_table_source *sources);

#endif
