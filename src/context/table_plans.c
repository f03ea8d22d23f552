#include "src/context/table_plans.h"

#include "base/check.h"
#include "base/hash.h"

static cpa_status reserve(cpa_table_plans *plans, cpa_context_ops *ops, int32_t sets) {
    for (int32_t set = 0; set < sets; set++)
        if (!plans->list[set]) CPA_TRY(cpa_row_plan_create(ops, &plans->list[set]));
    plans->sets = sets;
    return CPA_OK;
}

/* The set of precise keys has no plans of its own. */
static int32_t sets_of_layers(const cpa_context_ops *ops, const cpa_planned_step *step) {
    return cpa_block_tables_sets(step->tables) - (ops->precise.tokens > 0);
}

cpa_status cpa_table_plans_create(cpa_table_plans *plans, cpa_context_ops *ops) {
    return reserve(plans, ops, 1);
}

void cpa_table_plans_destroy(cpa_table_plans *plans, const cpa_context_ops *ops) {
    for (int32_t set = 0; set < CPA_MOST_TABLE_SETS; set++) cpa_row_plan_destroy(plans->list[set], ops);
}

cpa_status cpa_table_plans_set(cpa_table_plans *plans, cpa_context_ops *ops, const cpa_form *form,
                               const cpa_planned_step *step, int64_t n_items, cpa_attend_fusion fusion) {
    CPA_TRY(reserve(plans, ops, sets_of_layers(ops, step)));
    for (int32_t set = 0; set < plans->sets; set++) {
        const int64_t attended = ops->keys_attended, read = ops->keys_read;
        fusion.tables = (cpa_table_set){step->tables, set};
        CPA_TRY(cpa_row_plan_set(plans->list[set], ops, form, n_items, NULL, 0, fusion));
        if (set == 0) continue;
        ops->keys_attended = attended;
        ops->keys_read = read;
    }
    return CPA_OK;
}

cpa_status cpa_table_plans_clear(cpa_table_plans *plans, cpa_context_ops *ops, const cpa_form *form,
                                 const cpa_planned_step *step) {
    CPA_TRY(reserve(plans, ops, sets_of_layers(ops, step)));
    for (int32_t set = 0; set < plans->sets; set++)
        CPA_TRY(cpa_row_plan_set(plans->list[set], ops, form, 0, NULL, 0, (cpa_attend_fusion){0}));
    return CPA_OK;
}

cpa_status cpa_table_plans_upload(const cpa_table_plans *plans, cpa_context_ops *ops, cpa_stream *stream) {
    for (int32_t set = 0; set < plans->sets; set++) CPA_TRY(cpa_row_plan_upload(plans->list[set], ops, stream));
    return CPA_OK;
}

uint64_t cpa_table_plans_shape(const cpa_table_plans *plans, const cpa_context_ops *ops) {
    if (plans->sets == 1) return cpa_row_plan_shape(plans->list[0], ops);
    uint64_t hash = CPA_HASH_START;
    for (int32_t set = 0; set < plans->sets; set++) {
        const uint64_t shape = cpa_row_plan_shape(plans->list[set], ops);
        hash = cpa_hash_bytes(hash, &shape, sizeof shape);
    }
    return hash;
}
