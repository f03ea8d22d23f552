/* Block tables of a plan: those of the host, one behind the other where that is needed, and the places of blocks that
 * prefill kernels take widened. */
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "kernels/cuda/attend/attend_plan.h"

enum { STEADY_WIDENED = 256 /* widened blocks of shared keys of a padded plan come in multiples of so many */ };

/* Table entries of an item. */
static int64_t entries_of(const cpa_attend_batch *batch, const cpa_attend_item *item) {
    return cpa_cuda_ceil_div(item->k_count, batch->block_size);
}

/* Gives the blocks of an item the places from `place` on. */
static void place_blocks(const cpa_cuda_plan_builder *b, const cpa_attend_item *item, int32_t place, int32_t *tables,
                         int32_t *blocks) {
    const int64_t entries = entries_of(b->batch, item), places = cpa_cuda_places_of(b->batch, item);
    const int32_t ratio = cpa_cuda_wide_block(b->batch->block_size) / b->batch->block_size;
    for (int64_t i = 0; i < places; i++) blocks[place + i] = i < entries ? b->batch->block_tables[item->table + i] : -1;
    for (int64_t i = 0; i < places / ratio; i++) tables[item->table + i] = place / ratio + (int32_t)i;
}

/* The keys of a node, as its first item's tables have them. */
static cpa_attend_item keys_of_node(const cpa_cuda_plan_builder *b, const cpa_cascade_node *node) {
    cpa_attend_item keys = b->given->items[b->cascade->tree.items[node->first].index];
    keys.table += node->k_begin / b->given->block_size;
    keys.k_count = node->k_end - node->k_begin;
    return keys;
}

void cpa_cuda_plan_place_blocks(const cpa_cuda_plan_builder *b, int32_t *tables, int32_t *blocks,
                                cpa_cuda_table_source *sources) {
    int32_t place = 0;
    if (b->n_widened == 0) return;
    for (int64_t i = 0; i < b->batch->n_items; i++) {
        const cpa_attend_item *item = &b->batch->items[i];
        if (cpa_cuda_packed_rows(b->batch, item) == 0 || cpa_cuda_is_decode(b, item)) continue;
        if (sources) {
            sources[i].place = place;
        } else {
            place_blocks(b, item, place, tables, blocks);
        }
        place += (int32_t)cpa_cuda_places_of(b->batch, item);
    }
    if (sources) return; /* tables of the device share nothing */
    for (int64_t i = 0; i < b->cascade->tree.n_nodes && b->n_shared > 0; i++) {
        const cpa_attend_item keys = keys_of_node(b, &b->cascade->tree.nodes[i]);
        place_blocks(b, &keys, place, tables, blocks);
        place += (int32_t)cpa_cuda_places_of(b->batch, &keys);
    }
    while (place < b->n_widened) blocks[place++] = -1;
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

int cpa_cuda_plan_reserve_blocks(cpa_cuda_plan *plan, const cpa_attend_batch *batch, int64_t blocks) {
    return blocks <= INT32_MAX && cpa_cuda_plan_reserve_widened(plan, batch, blocks * batch->block_size);
}

int cpa_cuda_plan_widens_shared(cpa_cuda_plan_builder *b, cpa_cuda_plan *plan) {
    int64_t places = 0;
    if (!cpa_cuda_may_widen(b->given)) return 1;
    for (int64_t i = 0; i < b->cascade->tree.n_nodes; i++) {
        const cpa_attend_item keys = keys_of_node(b, &b->cascade->tree.nodes[i]);
        places += cpa_cuda_places_of(b->given, &keys);
    }
    if (b->padded_items > 0) places = cpa_cuda_ceil_div(places, STEADY_WIDENED) * STEADY_WIDENED;
    if (!cpa_cuda_plan_reserve_blocks(plan, b->given, b->n_widened + places)) return 0;
    b->n_widened += places;
    return 1;
}
