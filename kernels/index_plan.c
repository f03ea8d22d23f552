/* What the plan of an indexer keeps of a batch. */
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/indexer.h"

static int more_rows_first(const void *a, const void *b) {
    const cpa_attend_item *left = a, *right = b;
    if (left->q_count != right->q_count) return left->q_count < right->q_count ? 1 : -1;
    return (left->q_row > right->q_row) - (left->q_row < right->q_row);
}

cpa_status cpa_index_plan_describe(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err) {
    int64_t n = 0;
    if (!cpa_array_reserve(&plan->memory, &plan->capacity, batch->n_items, sizeof *plan->memory))
        return cpa_fail(err, CPA_NO_MEMORY, "index plan: no memory for %lld items", (long long)batch->n_items);
    plan->rows = plan->most_keys = 0;
    for (int64_t i = 0; i < batch->n_items; i++) {
        const cpa_attend_item *item = &batch->items[i];
        if (item->q_count == 0) continue;
        plan->memory[n++] = *item;
        plan->rows = cpa_max64(plan->rows, item->q_row + item->q_count);
        plan->most_keys = cpa_max64(plan->most_keys, item->k_count);
    }
    if (n) qsort(plan->memory, (size_t)n, sizeof *plan->memory, more_rows_first);
    plan->block_size = batch->block_size;
    plan->items = (cpa_index_items){batch->map, tokens_per_key, plan->memory, n};
    return CPA_OK;
}

void cpa_index_plan_release(cpa_index_plan *plan) {
    free(plan->memory);
}
