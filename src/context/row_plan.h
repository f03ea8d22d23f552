/* What attends of rows of one form are planned by: a plan of attend over the keys as they lie; or over an own shard that
 * lies on the host a plan of a ring; or, of a form whose keys are expanded, the passes over them (expanded_keys.h), or a
 * plan over latents where rows are absorbed (absorbed_rows.h). Of an own shard whose first tokens are precise there are two
 * plans, of these and of the keys behind them, and an attend resumes the states of the first: there is always a state. */
#ifndef CPA_ROW_PLAN_H
#define CPA_ROW_PLAN_H

#include "src/context/absorbed_rows.h"
#include "src/context/expanded_keys.h"
#include "src/ops/ring_plan.h"

typedef struct cpa_row_plan {
    cpa_attend_plan *attend;  /* of no items where keys are expanded, or come through a ring */
    cpa_attend_plan *precise; /* the same rows over first tokens that are precise; NULL until some are */
    int is_precise;           /* whether the last setting has both */
    cpa_row_run ready;        /* of it: rows whose queries come apart from the others */
    cpa_ring_plan *ring;      /* made by the first setting over an own shard on the host */
    int through_ring;         /* whether the last setting was one */
    cpa_expanded_keys expanded;
    cpa_absorbed_rows absorbed;
    int has_single, has_several; /* whether some item has one row, and whether some has more */
    int is_told;                 /* ops->kernels has the names of its kernels */
} cpa_row_plan;

/* A plan that prepares keys in the workspace of the context. */
cpa_status cpa_row_plan_create(cpa_context_ops *ops, cpa_row_plan **out);
void cpa_row_plan_destroy(cpa_row_plan *plan, const cpa_context_ops *ops);

/* Sets a plan of the first n of ops->items, whose rows have a form, by block tables on the host or those that stay of the
 * fusion. The fusion of a form whose keys are expanded has no more than those and its mask. */
cpa_status cpa_row_plan_set(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form, int64_t n_items,
                            const int32_t *block_tables, int64_t n_table_entries, cpa_attend_fusion fusion);

/* Enqueues what brings the setting to the device; and a number that two settings share only if attends enqueue the same. */
cpa_status cpa_row_plan_upload(const cpa_row_plan *plan, cpa_context_ops *ops, cpa_stream *stream);
uint64_t cpa_row_plan_shape(const cpa_row_plan *plan, const cpa_context_ops *ops);

/* Attends the rows of a plan; `layer` is that of their form. Of a form whose keys are expanded there is a state and no
 * `out`. `kind` says whose rows or keys they are, `round` in which they came. */
cpa_status cpa_row_plan_attend(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form,
                               const cpa_form_layer *layer, const cpa_attend_args *args, const void *ready_q,
                               cpa_span_kind kind, int32_t round, cpa_stream *stream);
/* The same against the own shard, from the empty state, of own rows on a side. */
cpa_status cpa_row_plan_attend_own(cpa_row_plan *plan, cpa_context_ops *ops, const cpa_form *form,
                                   const cpa_form_layer *layer, cpa_score_side side, cpa_partial state, void *out,
                                   cpa_stream *stream);

#endif
