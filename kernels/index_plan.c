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

/* What is beyond the limits of a reserved plan, if anything: told as the first of these. */
static cpa_status check_limits(const cpa_index_plan *plan, const cpa_attend_batch *batch, cpa_error *err) {
    const cpa_index_limits *most = &plan->limits;
    int64_t items = 0, item_rows = 0, rows = 0, end = 0, keys = 0;
    for (int64_t i = 0; i < batch->n_items; i++) {
        const cpa_attend_item *item = &batch->items[i];
        if (item->q_count == 0) continue;
        items++;
        rows += item->q_count;
        item_rows = cpa_max64(item_rows, item->q_count);
        end = cpa_max64(end, item->q_row + item->q_count);
        keys = cpa_max64(keys, item->k_count);
    }
    const int64_t entries = batch->block_tables_on_device ? 0 : batch->n_table_entries;
    const struct {
        const char *what;
        int64_t has, most;
    } limits[] = {{"items with rows", items, most->items},
                  {"rows of an item", item_rows, most->item_rows},
                  {"rows", cpa_max64(rows, end), most->rows},
                  {"keys of an item", keys, most->keys},
                  {"table entries on the host", entries, most->table_entries}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
        if (limits[i].has > limits[i].most)
            return cpa_fail(err, CPA_INVALID, "index plan: %lld %s, but the plan is reserved for %lld",
                            (long long)limits[i].has, limits[i].what, (long long)limits[i].most);
    return CPA_OK;
}

cpa_status cpa_index_plan_describe(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err) {
    const int64_t reserved = plan->limits.items;
    int64_t n = 0;
    if (reserved > 0) CPA_TRY(check_limits(plan, batch, err));
    if (!cpa_array_reserve(&plan->memory, &plan->capacity, cpa_max64(batch->n_items, reserved), sizeof *plan->memory))
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
    for (; n < reserved; n++) plan->memory[n] = (cpa_attend_item){0};
    if (reserved > 0) {
        plan->rows = plan->limits.rows;
        plan->most_keys = plan->limits.keys;
    }
    plan->block_size = batch->block_size;
    plan->items = (cpa_index_items){batch->map, tokens_per_key, plan->memory, n};
    return CPA_OK;
}

void cpa_index_plan_release(cpa_index_plan *plan) {
    free(plan->memory);
}
