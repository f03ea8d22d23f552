/* An attend plan for each set of block tables of the planned step: the same items over other blocks. Layers take the
 * plan of ops->table_set. */
#ifndef CPA_TABLE_PLANS_H
#define CPA_TABLE_PLANS_H

#include "src/context/planned_step.h"
#include "src/context/row_plan.h"

typedef struct cpa_table_plans {
    cpa_row_plan *list[CPA_MOST_TABLE_SETS]; /* made when a step first needs them; NULL before */
    int32_t sets;                            /* sets of tables that have a plan of the step */
} cpa_table_plans;

/* Makes the plan of the first set, which is there from then on. */
cpa_status cpa_table_plans_create(cpa_table_plans *plans, cpa_context_ops *ops);
void cpa_table_plans_destroy(cpa_table_plans *plans, const cpa_context_ops *ops);

/* Sets the plans of the first n of ops->items, whose rows have a form. What they attend and read counts once, as the first set has it. */
cpa_status cpa_table_plans_set(cpa_table_plans *plans, cpa_context_ops *ops, const cpa_form *form,
                               const cpa_planned_step *step, int64_t n_items, cpa_attend_fusion fusion);
/* The same of no items, which need no tables. */
cpa_status cpa_table_plans_clear(cpa_table_plans *plans, cpa_context_ops *ops, const cpa_form *form,
                                 const cpa_planned_step *step);
cpa_status cpa_table_plans_upload(const cpa_table_plans *plans, cpa_context_ops *ops, cpa_stream *stream);
/* A number that two settings share only if attends enqueue the same. */
uint64_t cpa_table_plans_shape(const cpa_table_plans *plans, const cpa_context_ops *ops);

static inline cpa_row_plan *cpa_table_plans_now(const cpa_table_plans *plans, const cpa_context_ops *ops) {
    return plans->list[ops->table_set];
}

#endif
