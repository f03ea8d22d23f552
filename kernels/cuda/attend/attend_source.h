/* Keys of a plan that are prepared before they are attended: those of prefill items, and those that decode items share,
 * where kernels do not take the cache as it lies. They go through a workspace in passes (kernels/key_source.h), each
 * with pieces of its own.
 *
 *   attend_source.c  which blocks go where, and the pieces of each pass, while a plan is set
 *   attend_passes.c  the launches
 *   attend_widened.c a preparation: codes, and rows in runs, become rows of elements */
#ifndef CPA_CUDA_ATTEND_SOURCE_H
#define CPA_CUDA_ATTEND_SOURCE_H

#include "kernels/cuda/attend/attend_kernels.h"
#include "kernels/cuda/attend/attend_plan.h"

/* What is prepared together, and the pieces over it. */
typedef struct cpa_cuda_pass {
    cpa_cuda_prefill pieces;
    /* Entries of the plan's list of blocks, which take the workspace from its beginning. */
    int64_t first_place, n_places;
    int64_t first_item, n_items; /* items of the plan, from that of the first keys to that of the last */
    int64_t rows;                /* theirs */
    int is_cut;                  /* not 0: the pass has one item's rows over a part of its keys */
    cpa_attend_item item;        /* rows and keys of a cut pass */
    int64_t state_shift;         /* of that item */
    int ends;                    /* not 0: a cut pass has the item's last keys */
} cpa_cuda_pass;

typedef struct cpa_cuda_passes {
    cpa_cuda_pass *list;
    int64_t n, capacity;
} cpa_cuda_passes;

/* What is cut into passes: prefill items, or nodes of shared keys. */
typedef struct cpa_cuda_prepared {
    cpa_key_item *keys;
    int64_t n, capacity;
    cpa_key_pass *cut;
    int64_t cut_capacity;
    cpa_cuda_key_place *places;
    int64_t places_capacity;
} cpa_cuda_prepared;

struct cpa_cuda_source {
    const cpa_key_workspace *workspace; /* the context's workspace, or `own` */
    cpa_key_workspace own;              /* the workspace of a plan without one of the context */
    int is_short;                       /* not 0: there was no memory for a larger workspace */
    cpa_cuda_passes prefill, shared;
    /* Scratch of plan_set. */
    cpa_cuda_prepared items, nodes;
    int64_t *indices; /* indices in the batch of the prefill items */
    int64_t indices_capacity;
    cpa_cuda_plan_builder *builders; /* one for each pass; unused where there is a single pass */
    int64_t builders_capacity, n_builders;
    cpa_attend_item *pass_items; /* items of the builders */
    int64_t *pass_shifts;
    int64_t pass_items_capacity, pass_shifts_capacity;
};

void cpa_cuda_source_destroy(cpa_device *device, struct cpa_cuda_source *source);
/* Whether prefill kernels of the device need the keys of such a cache prepared. */
int cpa_cuda_source_prepares(const cpa_device *device, const cpa_attention_shape *shape);

/* ---- while a plan is set, in this order ---- */

void cpa_cuda_source_clear(struct cpa_cuda_source *source);
/* The passes of shared keys, if these have to be prepared; where the workspace cannot hold them, nothing is shared. */
cpa_status cpa_cuda_source_cut_shared(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, cpa_error *err);
/* The passes of prefill items, likewise: none where there is no workspace. */
cpa_status cpa_cuda_source_cut_prefill(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, cpa_error *err);
/* Sections for the pieces of the passes. */
void cpa_cuda_source_place(struct cpa_cuda_source *source, int64_t *end);
/* The most pieces of a pass, or `pieces` if that is more. */
int64_t cpa_cuda_source_most_pieces(const struct cpa_cuda_source *source, int64_t pieces);
/* The list of blocks, and the tables with their places; what lies on the device is placed there. */
void cpa_cuda_source_write_blocks(const struct cpa_cuda_source *source, const cpa_cuda_plan_builder *b, int32_t *tables,
                                  int32_t *blocks, cpa_cuda_table_source *sources);
/* The pieces of the passes, when those of the plan are written; their states begin at `partial_rows`. */
void cpa_cuda_source_write_pieces(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan, int64_t partial_rows);

/* A number that two settings share only if they launch the same over shared keys, and at the same place. */
uint64_t cpa_cuda_source_shape(const struct cpa_cuda_source *source);

/* ---- attend ---- */

/* Launches a set of prefill pieces, and what joins the states of their splits. */
cpa_status cpa_cuda_launch_prefill(const cpa_cuda_attend_launch *launch, const cpa_cuda_prefill *pieces,
                                   cpa_stream *stream);
/* For kernels that know no scales of keys: these are rounded as values are. (attend_widened.c) */
extern const cpa_cuda_preparation cpa_cuda_widen_scaled;
/* Prepares and attends one pass after the other: all prefill items of a plan, or all keys that decode items share. */
cpa_status cpa_cuda_launch_passes(const cpa_cuda_attend_launch *launch, const cpa_cuda_passes *passes,
                                  cpa_stream *stream);
/* The same by kernels that take items, which attend what is prepared of a pass. */
typedef cpa_status cpa_cuda_pass_launcher(const cpa_cuda_attend_launch *launch, const cpa_cuda_pass *pass,
                                          cpa_stream *stream);
cpa_status cpa_cuda_launch_passes_by(const cpa_cuda_attend_launch *launch, const cpa_cuda_passes *passes,
                                     cpa_cuda_pass_launcher *attend, cpa_stream *stream);

#endif
