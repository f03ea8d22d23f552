/* What a context keeps of the rows of one form in a step: those of its chunks. All forms share the transfers of pass-KV,
 * which are those of the cache. */
#ifndef CPA_FORM_LANE_H
#define CPA_FORM_LANE_H

#include "src/context/pass_q.h"
#include "src/context/scatter_heads.h"

typedef struct cpa_form_lane {
    const cpa_form *form;
    cpa_table_plans own; /* own rows over the own shard, but those that pass-KV or pass-Q takes */
    cpa_context_buffer own_memory, projected_memory;
    cpa_partial own_state; /* partial states of the own rows, where pass-Q does not have them */
    cpa_partial projected; /* own_state times the matrix of the form; unused without one */
    cpa_pass_q q;
    cpa_scatter_heads scatter;
} cpa_form_lane;

/* cpa_form_lane_destroy cleans up after a failure too, and does nothing with zeros. */
cpa_status cpa_form_lane_create(cpa_form_lane *lane, cpa_context_ops *ops, const cpa_form *form,
                                const cpa_planned_step *step);
void cpa_form_lane_destroy(cpa_form_lane *lane, cpa_context_ops *ops);
/* Whether rows that meet no key of another rank have states all the same: results are made of these by a merge, or
 * several attends find the keys of a row. */
static inline int cpa_form_lane_keeps_state(const cpa_form_lane *lane, const cpa_context_ops *ops) {
    return cpa_form_ends_in_merge(lane->form) || ops->precise.tokens > 0;
}
/* Room for the states of so many own rows. */
cpa_status cpa_form_lane_ensure(cpa_form_lane *lane, cpa_context_ops *ops, int64_t rows);

#endif
