#include "src/ops/ring_passes.h"

#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"

static cpa_status reserve(void *array, int64_t *capacity, int64_t n, size_t element, cpa_error *err) {
    if (cpa_array_reserve(array, capacity, n, element)) return CPA_OK;
    return cpa_fail(err, CPA_NO_MEMORY, "ring: no memory for %lld entries of a plan", (long long)n);
}

/* ---- which keys are together ---- */

/* Keys are cut at multiples of the ring's step in their set of tokens: counted from the multiple before the item's first. */
static int64_t lead_of(const cpa_kv_ring *ring, const cpa_attend_item *item) {
    return item->k_count > 0 ? item->k_first % ring->step : 0;
}

static cpa_status cut_keys(cpa_ring_passes *p, const cpa_kv_ring *ring, const cpa_attend_batch *batch, cpa_error *err) {
    const cpa_key_room room = {.bytes = ring->segment_blocks * ring->options.block_size,
                               .token_bytes = 1, /* a room in tokens */
                               .unit = ring->options.block_size,
                               .step = ring->step};
    CPA_TRY(reserve(&p->keys, &p->keys_capacity, batch->n_items, sizeof *p->keys, err));
    for (int64_t i = 0; i < batch->n_items; i++)
        p->keys[i] = (cpa_key_item){batch->items[i].q_count, batch->items[i].k_count + lead_of(ring, &batch->items[i])};
    p->n = cpa_key_passes(&room, p->keys, batch->n_items, NULL);
    CPA_TRY(reserve(&p->cut, &p->cut_capacity, p->n, sizeof *p->cut, err));
    CPA_TRY(reserve(&p->list, &p->capacity, p->n, sizeof *p->list, err));
    cpa_key_passes(&room, p->keys, batch->n_items, p->cut);
    return CPA_OK;
}

/* The part of an item that a pass has. */
static cpa_attend_item part_of(const cpa_kv_ring *ring, const cpa_attend_item *item, const cpa_key_pass *cut) {
    cpa_attend_item part = *item;
    if (!cut->is_cut) return part;
    const int64_t lead = lead_of(ring, item), begin = cpa_max64(cut->key - lead, 0);
    part.k_first += begin;
    part.k_count = cut->key + cut->keys - lead - begin;
    part.table += begin / ring->options.block_size;
    return part;
}

/* How many of the first rows of an item see none of its keys under a causal mask. */
static int64_t blind_rows(cpa_owner_map map, const cpa_attend_item *item) {
    const int64_t position = cpa_token_position(map, item->k_set, item->k_first);
    return cpa_min64(cpa_max64(cpa_tokens_before(map, item->q_set, position) - item->q_first, 0), item->q_count);
}

static int is_fresh(cpa_owner_map map, int64_t settled, const cpa_attend_item *item) {
    return item->k_count > 0 && item->k_first + item->k_count > cpa_tokens_before(map, item->k_set, settled);
}

/* ---- which blocks ---- */

static int by_id(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Leaves each block once, in ascending order; how many there are. */
static int64_t sort_blocks(int32_t *blocks, int64_t n) {
    int64_t kept = 0;
    if (n > 0) qsort(blocks, (size_t)n, sizeof *blocks, by_id);
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || blocks[i] != blocks[i - 1]) blocks[kept++] = blocks[i];
    return kept;
}

/* Where a block is among the n sorted ones, which it is one of. */
static int32_t place_of(const int32_t *blocks, int64_t n, int32_t block) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (blocks[middle] < block)
            low = middle + 1;
        else
            high = middle;
    }
    return (int32_t)low;
}

static cpa_status add_runs(cpa_ring_passes *p, cpa_ring_pass *pass, int64_t n, cpa_error *err) {
    CPA_TRY(reserve(&p->runs, &p->runs_capacity, p->n_runs + n, sizeof *p->runs, err));
    pass->first_run = p->n_runs;
    for (int64_t i = 0; i < n; i++) {
        if (i > 0 && p->blocks[i] == p->blocks[i - 1] + 1)
            p->runs[p->n_runs - 1].count++;
        else
            p->runs[p->n_runs++] = (cpa_ring_run){p->blocks[i], i, 1};
    }
    pass->n_runs = p->n_runs - pass->first_run;
    return CPA_OK;
}

/* The blocks of the items of a pass lie in its segment in ascending order, those that items share once. */
static cpa_status place_blocks(cpa_ring_passes *p, cpa_ring_pass *pass, const cpa_attend_batch *batch, cpa_error *err) {
    const int64_t distinct = pass->is_cut ? 1 : pass->n_items; /* both items of a cut pass have one table */
    int64_t n = 0;
    for (int64_t i = 0; i < distinct; i++) n += cpa_ceil_div(p->items[pass->first_item + i].k_count, batch->block_size);
    CPA_TRY(reserve(&p->blocks, &p->blocks_capacity, n, sizeof *p->blocks, err));
    CPA_TRY(reserve(&p->tables, &p->tables_capacity, p->n_entries + n, sizeof *p->tables, err));
    n = 0;
    for (int64_t i = 0; i < distinct; i++) {
        const cpa_attend_item *item = &p->items[pass->first_item + i];
        for (int64_t e = 0; e < cpa_ceil_div(item->k_count, batch->block_size); e++)
            p->blocks[n++] = batch->block_tables[item->table + e];
    }
    const int64_t blocks = sort_blocks(p->blocks, n);
    pass->first_entry = p->n_entries;
    pass->n_entries = n;
    for (int64_t i = 0; i < distinct; i++) {
        cpa_attend_item *item = &p->items[pass->first_item + i];
        const int32_t *from = batch->block_tables + item->table;
        item->table = p->n_entries - pass->first_entry;
        for (int64_t e = 0; e < cpa_ceil_div(item->k_count, batch->block_size); e++)
            p->tables[p->n_entries++] = place_of(p->blocks, blocks, from[e]);
    }
    for (int64_t i = distinct; i < pass->n_items; i++)
        p->items[pass->first_item + i].table = p->items[pass->first_item].table;
    return add_runs(p, pass, blocks, err);
}

/* ---- all of it ---- */

/* The item of a cut pass becomes two, if some of its rows are blind. */
static void split_rows(cpa_ring_passes *p, cpa_ring_pass *pass, cpa_owner_map map) {
    cpa_attend_item *item = &p->items[pass->first_item];
    const int64_t blind = blind_rows(map, item);
    p->most_state_rows = cpa_max64(p->most_state_rows, item->q_count);
    if (blind == 0) return;
    item[1] = item[0];
    item[1].q_count = blind;
    item[0].q_row += blind;
    item[0].q_first += blind;
    item[0].q_count -= blind;
    pass->n_items = 2;
    p->n_items++;
}

static cpa_status add_pass(cpa_ring_passes *p, const cpa_kv_ring *ring, const cpa_attend_batch *batch, int64_t index,
                           int64_t settled, cpa_error *err) {
    const cpa_key_pass *cut = &p->cut[index];
    cpa_ring_pass *pass = &p->list[index];
    *pass =
        (cpa_ring_pass){.first_item = p->n_items, .n_items = cut->n_items, .given = cut->item, .is_cut = cut->is_cut};
    pass->ends = cut->is_cut && cut->key + cut->keys == p->keys[cut->item].keys;
    CPA_TRY(reserve(&p->items, &p->items_capacity, p->n_items + cut->n_items + cut->is_cut, sizeof *p->items, err));
    for (int64_t i = 0; i < cut->n_items; i++) {
        const cpa_attend_item part = part_of(ring, &batch->items[cut->item + i], cut);
        pass->is_fresh |= is_fresh(batch->map, settled, &part);
        p->items[p->n_items++] = part;
    }
    if (cut->is_cut) split_rows(p, pass, batch->map);
    return place_blocks(p, pass, batch, err);
}

cpa_status cpa_ring_passes_cut(cpa_ring_passes *p, const cpa_kv_ring *ring, const cpa_attend_batch *batch,
                               int64_t settled, cpa_error *err) {
    p->n_items = p->n_entries = p->n_runs = p->most_state_rows = 0;
    CPA_TRY(cut_keys(p, ring, batch, err));
    for (int64_t i = 0; i < p->n; i++) CPA_TRY(add_pass(p, ring, batch, i, settled, err));
    return CPA_OK;
}

void cpa_ring_passes_free(cpa_ring_passes *p) {
    free(p->list);
    free(p->items);
    free(p->tables);
    free(p->runs);
    free(p->keys);
    free(p->cut);
    free(p->blocks);
}
