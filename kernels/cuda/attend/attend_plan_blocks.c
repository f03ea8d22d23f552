/* Block tables of a plan: those of the host, one behind the other where that is needed. */
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "kernels/cuda/attend/attend_plan.h"

/* Table entries of an item. */
static int64_t entries_of(const cpa_attend_batch *batch, const cpa_attend_item *item) {
    return cpa_cuda_ceil_div(item->k_count, batch->block_size);
}

int cpa_cuda_plan_packs_tables(const cpa_attend_batch *batch) {
    return batch->block_tables_on_device || (cpa_dtype_is_quantised(batch->shape.kv_dtype) &&
                                             cpa_cuda_wide_block(batch->block_size) > batch->block_size);
}

cpa_status cpa_cuda_plan_pack_items(cpa_cuda_plan_memory *memory, const cpa_attend_batch *batch,
                                    cpa_attend_batch *packed, int64_t *most_entries, cpa_error *err) {
    int64_t n = 0;
    *most_entries = 0;
    if (!cpa_array_reserve(&memory->packed, &memory->packed_capacity, batch->n_items, sizeof *memory->packed))
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld items", (long long)batch->n_items);
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t entries = entries_of(batch, &batch->items[i]);
        memory->packed[i] = batch->items[i];
        memory->packed[i].table = n;
        n += entries;
        if (entries > *most_entries) *most_entries = entries;
    }
    packed->items = memory->packed;
    packed->n_table_entries = n;
    if (batch->block_tables_on_device) return CPA_OK;
    if (!cpa_array_reserve(&memory->packed_tables, &memory->packed_tables_capacity, n, sizeof *memory->packed_tables))
        return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld table entries", (long long)n);
    for (int64_t i = 0; i < batch->n_items; i++) {
        const int64_t entries = entries_of(batch, &batch->items[i]);
        if (entries > 0)
            memcpy(memory->packed_tables + memory->packed[i].table, batch->block_tables + batch->items[i].table,
                   (size_t)entries * sizeof *memory->packed_tables);
    }
    packed->block_tables = memory->packed_tables;
    return CPA_OK;
}
