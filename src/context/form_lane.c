#include "src/context/form_lane.h"

#include "base/check.h"

cpa_status cpa_form_lane_create(cpa_form_lane *lane, cpa_context_ops *ops, const cpa_form *form,
                                const cpa_planned_step *step) {
    lane->form = form;
    CPA_TRY(cpa_table_plans_create(&lane->own, ops));
    CPA_TRY(cpa_scatter_heads_create(&lane->scatter, ops, form, step));
    return cpa_pass_q_create(&lane->q, ops, form, step);
}

void cpa_form_lane_destroy(cpa_form_lane *lane, cpa_context_ops *ops) {
    cpa_scatter_heads_destroy(&lane->scatter);
    cpa_pass_q_destroy(&lane->q);
    if (!ops->device) return;
    cpa_table_plans_destroy(&lane->own, ops);
    cpa_context_free(ops, &lane->own_memory);
    cpa_context_free(ops, &lane->projected_memory);
}

cpa_status cpa_form_lane_ensure(cpa_form_lane *lane, cpa_context_ops *ops, int64_t rows) {
    const cpa_form *form = lane->form;
    CPA_TRY(cpa_context_ensure_state(ops, &lane->own_memory, rows, form->shape.v_dim, &lane->own_state));
    if (!form->has_matrix) return CPA_OK;
    return cpa_context_ensure_state(ops, &lane->projected_memory, rows, form->out_dim, &lane->projected);
}
