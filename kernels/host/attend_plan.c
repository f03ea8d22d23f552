#include "kernels/host/attend_plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* Makes room for n elements; keeps the old memory when that fails. */
static cpa_status reserve(void **memory, int64_t *capacity, int64_t n, size_t element, cpa_error *err) {
    if (n <= *capacity) return CPA_OK;
    int64_t larger = n > 2 * *capacity ? n : 2 * *capacity;
    void *moved = realloc(*memory, (size_t)larger * element);
    if (!moved) return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld entries", (long long)larger);
    *memory = moved;
    *capacity = larger;
    return CPA_OK;
}

cpa_status cpa_host_plan_create(cpa_device *device, cpa_attend_plan **out, cpa_error *err) {
    cpa_host_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory");
    plan->base.device = device;
    *out = &plan->base;
    return CPA_OK;
}

cpa_status cpa_host_plan_set(cpa_attend_plan *base, const cpa_attend_batch *batch, cpa_error *err) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    CPA_TRY(reserve((void **)&plan->items, &plan->items_capacity, batch->n_items, sizeof *plan->items, err));
    CPA_TRY(reserve((void **)&plan->tables, &plan->tables_capacity, batch->n_table_entries, sizeof *plan->tables, err));
    if (batch->n_items) memcpy(plan->items, batch->items, (size_t)batch->n_items * sizeof *plan->items);
    if (batch->n_table_entries)
        memcpy(plan->tables, batch->block_tables, (size_t)batch->n_table_entries * sizeof *plan->tables);
    plan->batch = *batch;
    plan->batch.items = plan->items;
    plan->batch.block_tables = plan->tables;
    plan->base.n_items = batch->n_items;
    return CPA_OK;
}

void cpa_host_plan_destroy(cpa_attend_plan *base) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    if (!plan) return;
    free(plan->items);
    free(plan->tables);
    free(plan);
}
