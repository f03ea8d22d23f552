/* The attend plan. Rows are dealt to units of CPA_HOST_UNIT_ROWS, so that the packing of a tile of keys is shared by
 * many rows. Where an item has only a few, the heads that its keys lie beside go together. Where that leaves threads
 * idle (few rows, many keys), the splits of a unit are dealt to several units. */
#include "kernels/host/attend/attend_plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "kernels/host/attend/attend_cascade.h"

/* A unit is divided when it holds more than 1 / (threads * this) of the work. */
enum { UNITS_PER_THREAD = 4 };
/* Most floats that the partial states of divided units take: 64 MiB. */
static const int64_t MAX_PARTIALS = (int64_t)16 << 20;

/* Makes room for n elements in the array at that address. */
static cpa_status reserve(void *array, int64_t *capacity, int64_t n, size_t element, cpa_error *err) {
    if (cpa_array_reserve(array, capacity, n, element)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory for %lld entries", (long long)n);
}

static cpa_status add_unit(cpa_host_unit **units, int64_t *n, int64_t *capacity, cpa_host_unit unit, cpa_error *err) {
    CPA_TRY(reserve(units, capacity, *n + 1, sizeof **units, err));
    (*units)[(*n)++] = unit;
    return CPA_OK;
}

/* How many query-key pairs the rows have under a causal mask, or a full one, less those of splits before the unit's; at
 * least one a row, as no row is free. */
static int64_t cost_of(const cpa_attend_batch *batch, const cpa_host_unit *unit, int full) {
    const cpa_attend_item *item = &batch->items[unit->item];
    int64_t last_query = (unit->row + unit->rows - 1) / (batch->shape.q_heads / batch->shape.kv_heads);
    int64_t position = cpa_token_position(batch->map, item->q_set, item->q_first + last_query);
    int64_t keys = cpa_tokens_before(batch->map, item->k_set, position + 1) - item->k_first;
    if (keys > item->k_count || full) keys = item->k_count;
    keys -= cpa_max64(unit->split_begin * CPA_HOST_SPLIT_TOKENS - item->k_first, 0);
    return cpa_host_unit_rows(unit) * (keys > 1 ? keys : 1);
}

static cpa_status add_item(cpa_host_plan *plan, int64_t index, int full, cpa_error *err) {
    const cpa_attend_batch *batch = &plan->batch;
    const cpa_attend_item *item = &batch->items[index];
    int64_t rows = item->q_count * (batch->shape.q_heads / batch->shape.kv_heads),
            k_end = item->k_first + item->k_count;
    cpa_host_unit unit = {.item = index,
                          .members = -1,
                          .split_begin = plan->paths[index].split_begin,
                          .split_end = (k_end + CPA_HOST_SPLIT_TOKENS - 1) / CPA_HOST_SPLIT_TOKENS,
                          .partial = -1};
    const int64_t heads = cpa_host_unit_heads(plan, rows);
    for (int64_t head = 0; head < batch->shape.kv_heads; head += heads) {
        unit.kv_head = (int32_t)head;
        unit.kv_heads = (int32_t)(batch->shape.kv_heads - head < heads ? batch->shape.kv_heads - head : heads);
        for (unit.row = 0; unit.row < rows; unit.row += CPA_HOST_UNIT_ROWS) {
            unit.rows = (int32_t)(rows - unit.row < CPA_HOST_UNIT_ROWS ? rows - unit.row : CPA_HOST_UNIT_ROWS);
            unit.cost = cost_of(batch, &unit, full);
            CPA_TRY(add_unit(&plan->units, &plan->n_units, &plan->units_capacity, unit, err));
        }
    }
    return CPA_OK;
}

/* Deals the splits of a unit, whose states have their place, to `parts` units of the array. */
static cpa_status divide_unit(cpa_host_plan *plan, cpa_host_unit **units, int64_t *n, int64_t *capacity, int64_t index,
                              int64_t parts, cpa_error *err) {
    const cpa_host_unit whole = (*units)[index];
    const int64_t splits = whole.split_end - whole.split_begin, floats = cpa_host_partial_floats(plan, &whole);
    for (int64_t i = 0; i < parts; i++) {
        cpa_host_unit part = whole;
        part.cost /= parts;
        part.split_begin = whole.split_begin + splits * i / parts;
        part.split_end = whole.split_begin + splits * (i + 1) / parts;
        part.partial = whole.partial + (part.split_begin - whole.split_begin) * floats;
        if (i == 0)
            (*units)[index] = part;
        else
            CPA_TRY(add_unit(units, n, capacity, part, err));
    }
    return CPA_OK;
}

static int64_t parts_of(const cpa_host_unit *unit, int64_t share) {
    return cpa_min64((unit->cost + share - 1) / share, unit->split_end - unit->split_begin);
}

static cpa_status divide_units(cpa_host_plan *plan, int32_t threads, cpa_error *err) {
    int64_t total = 0, n = plan->n_units, n_shared = plan->n_shared_units;
    for (int64_t i = 0; i < n; i++) total += plan->units[i].cost;
    for (int64_t i = 0; i < n_shared; i++) total += plan->shared_units[i].cost;
    int64_t share = total / ((int64_t)threads * UNITS_PER_THREAD) + 1;
    for (int64_t i = 0; threads > 1 && i < n_shared; i++) {
        const int64_t parts = parts_of(&plan->shared_units[i], share);
        if (parts > 1)
            CPA_TRY(divide_unit(plan, &plan->shared_units, &plan->n_shared_units, &plan->shared_units_capacity, i,
                                parts, err));
    }
    for (int64_t i = 0; threads > 1 && i < n; i++) {
        cpa_host_unit *unit = &plan->units[i];
        const int64_t parts = parts_of(unit, share);
        const int64_t floats = (unit->split_end - unit->split_begin) * cpa_host_partial_floats(plan, unit);
        if (parts <= 1 || floats > MAX_PARTIALS - plan->n_partials) continue;
        unit->partial = plan->n_partials;
        plan->n_partials += floats;
        CPA_TRY(add_unit(&plan->folds, &plan->n_folds, &plan->folds_capacity, *unit, err));
        CPA_TRY(divide_unit(plan, &plan->units, &plan->n_units, &plan->units_capacity, i, parts, err));
    }
    return reserve(&plan->partials, &plan->partials_capacity, plan->n_partials, sizeof *plan->partials, err);
}

static int costlier_first(const void *a, const void *b) {
    int64_t left = ((const cpa_host_unit *)a)->cost, right = ((const cpa_host_unit *)b)->cost;
    return (left < right) - (left > right);
}

int64_t cpa_host_least_workspace(const cpa_attention_shape *shape, int32_t block_size) {
    (void)shape;
    (void)block_size;
    return 0; /* kernels take every cache as it lies */
}

cpa_status cpa_host_plan_create(cpa_device *device, const cpa_key_workspace *workspace, cpa_attend_plan **out,
                                cpa_error *err) {
    (void)workspace;
    cpa_host_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return cpa_fail(err, CPA_NO_MEMORY, "attend plan: no memory");
    plan->base.device = device;
    *out = &plan->base;
    return CPA_OK;
}

static cpa_status copy_tables(cpa_host_plan *plan, const cpa_attend_batch *batch, cpa_error *err) {
    CPA_TRY(reserve(&plan->tables, &plan->tables_capacity, batch->n_table_entries, sizeof *plan->tables, err));
    if (batch->n_table_entries)
        memcpy(plan->tables, batch->block_tables, (size_t)batch->n_table_entries * sizeof *plan->tables);
    plan->batch.block_tables = plan->tables;
    return CPA_OK;
}

cpa_status cpa_host_plan_set(cpa_attend_plan *base, const cpa_attend_batch *batch, cpa_attend_fusion fusion,
                             cpa_error *err) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    base->n_items = plan->n_units = plan->n_folds = plan->n_partials = 0;
    CPA_TRY(reserve(&plan->items, &plan->items_capacity, batch->n_items, sizeof *plan->items, err));
    if (batch->n_items) memcpy(plan->items, batch->items, (size_t)batch->n_items * sizeof *plan->items);
    plan->batch = *batch;
    plan->batch.items = plan->items;
    if (!fusion.tables.tables) CPA_TRY(copy_tables(plan, batch, err));
    CPA_TRY(cpa_host_plan_cascade(plan, fusion.tables, err));
    for (int64_t i = 0; i < batch->n_items; i++) CPA_TRY(add_item(plan, i, fusion.full, err));
    CPA_TRY(divide_units(plan, ((const cpa_host_device *)base->device)->thread_count, err));
    if (plan->n_shared_units)
        qsort(plan->shared_units, (size_t)plan->n_shared_units, sizeof *plan->shared_units, costlier_first);
    if (plan->n_units) qsort(plan->units, (size_t)plan->n_units, sizeof *plan->units, costlier_first);
    cpa_attend_plan_describe(base, batch, fusion);
    if (plan->n_shared > 0) base->keys_read -= cpa_cascade_keys_saved(&plan->cascade);
    return CPA_OK;
}

void cpa_host_plan_destroy(cpa_attend_plan *base) {
    cpa_host_plan *plan = (cpa_host_plan *)base;
    if (!plan) return;
    cpa_host_cascade_release(plan);
    free(plan->places);
    free(plan->refused_rows);
    free(plan->read_tables);
    free(plan->read_items);
    free(plan->partials);
    free(plan->folds);
    free(plan->units);
    free(plan->tables);
    free(plan->items);
    free(plan);
}
