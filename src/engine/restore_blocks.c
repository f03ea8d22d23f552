#include "src/engine/restore_blocks.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/check.h"
#include "base/min_max.h"
#include "src/schedule/evicted_units.h"

/* Entries of a rank that are gathered at once. */
enum { BATCH = 1 << 14 };

/* An entry and whose it is. Entries of a batch that a rank has no more of have no ranks. */
typedef struct found_block {
    cpa_disk_entry entry;
    int32_t rank;
} found_block;

/* Rank 0: what all ranks have. */
typedef struct gathered {
    found_block *batch; /* [ranks, BATCH] */
    found_block *blocks;
    int64_t n, cap;
    cpa_restored_unit *units; /* [n_units] */
    int32_t *slots;           /* [n_units, ranks] */
    int64_t n_units;
} gathered;

static cpa_status take_batch(gathered *all, int64_t n, cpa_error *err) {
    for (int64_t i = 0; i < n; i++) {
        if (all->batch[i].entry.ranks == 0) continue;
        if (!cpa_array_reserve(&all->blocks, &all->cap, all->n + 1, sizeof *all->blocks))
            return cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no memory for what is there");
        all->blocks[all->n++] = all->batch[i];
    }
    return CPA_OK;
}

/* Collective. */
static cpa_status gather(cpa_engine *engine, gathered *all, cpa_error *err) {
    cpa_control *control = &engine->control;
    int64_t n;
    const cpa_disk_entry *own = cpa_disk_blocks_found(engine->worker->disk, &n);
    double most = (double)n;
    found_block *mine = calloc(BATCH, sizeof *mine);
    cpa_status status = mine ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no memory for what is there");
    if (status == CPA_OK && control->rank == 0) {
        all->batch = calloc((size_t)control->size * BATCH, sizeof *all->batch);
        if (!all->batch) status = cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no memory for what is there");
    }
    status = cpa_control_agree(control, status, err);
    if (status == CPA_OK) status = cpa_control_max(control, &most, 1, err);
    for (int64_t at = 0; at < (int64_t)most && status == CPA_OK; at += BATCH) {
        memset(mine, 0, BATCH * sizeof *mine);
        for (int64_t i = at; i < cpa_min64(at + BATCH, n); i++) mine[i - at] = (found_block){own[i], control->rank};
        status = cpa_control_gather(control, mine, BATCH * (int64_t)sizeof *mine, all->batch, 0, err);
        if (status == CPA_OK && control->rank == 0) status = take_batch(all, (int64_t)control->size * BATCH, err);
        status = cpa_control_agree(control, status, err);
    }
    free(mine);
    return status;
}

/* Those of one unit are neighbours. */
static int by_unit(const void *a, const void *b) {
    const found_block *x = a, *y = b;
    if (x->entry.group != y->entry.group) return x->entry.group < y->entry.group ? -1 : 1;
    return memcmp(x->entry.key, y->entry.key, sizeof x->entry.key);
}

/* The same; and of a rank's blocks of a unit the one that was used last comes last. */
static int by_unit_and_use(const void *a, const void *b) {
    const found_block *x = a, *y = b;
    const int unit = by_unit(a, b);
    if (unit != 0) return unit;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    return x->entry.used < y->entry.used ? -1 : x->entry.used > y->entry.used;
}

static int by_use(const void *a, const void *b) {
    const cpa_restored_unit *x = a, *y = b;
    return x->used < y->used ? -1 : x->used > y->used;
}

/* The unit of blocks [first, end), where it is whole. A block may be in a second slot, of a store that was dropped. */
static void add_unit(gathered *all, int64_t first, int64_t end, int32_t ranks) {
    const cpa_disk_entry *entry = &all->blocks[first].entry;
    int32_t *slots = all->slots + all->n_units * ranks;
    cpa_restored_unit unit = {.group = entry->group, .slots = slots};
    memcpy(unit.key.bytes, entry->key, sizeof unit.key.bytes);
    for (int32_t r = 0; r < ranks; r++) slots[r] = -1;
    for (int64_t i = first; i < end; i++) {
        const found_block *block = &all->blocks[i];
        slots[block->rank] = block->entry.slot;
        unit.used = block->entry.used > unit.used ? block->entry.used : unit.used;
    }
    int32_t there = 0;
    for (int32_t r = 0; r < ranks; r++) there += slots[r] >= 0;
    if ((uint32_t)there == entry->ranks) all->units[all->n_units++] = unit;
}

static cpa_status join(gathered *all, int32_t ranks, cpa_error *err) {
    all->units = calloc((size_t)all->n + 1, sizeof *all->units);
    all->slots = calloc(((size_t)all->n + 1) * (size_t)ranks, sizeof *all->slots);
    if (!all->units || !all->slots) return cpa_fail(err, CPA_NO_MEMORY, "swap_folder: no memory for what is there");
    if (all->n > 0) qsort(all->blocks, (size_t)all->n, sizeof *all->blocks, by_unit_and_use);
    for (int64_t first = 0, end; first < all->n; first = end) {
        for (end = first + 1; end < all->n && by_unit(&all->blocks[first], &all->blocks[end]) == 0;) end++;
        add_unit(all, first, end, ranks);
    }
    if (all->n_units > 0) qsort(all->units, (size_t)all->n_units, sizeof *all->units, by_use);
    return CPA_OK;
}

cpa_status cpa_engine_restore_blocks(cpa_engine *engine, cpa_error *err) {
    gathered all = {.batch = NULL};
    cpa_status status = gather(engine, &all, err);
    if (status == CPA_OK && engine->scheduler) {
        status = join(&all, engine->control.size, err);
        if (status == CPA_OK) status = cpa_evicted_restore(engine->scheduler, all.units, all.n_units, err);
        if (status == CPA_OK && all.n_units > 0)
            cpa_log(CPA_LOG_INFO, "swap folder: what %lld of its blocks hold, %lld units, can be found",
                    (long long)all.n, (long long)all.n_units);
    }
    free(all.slots);
    free(all.units);
    free(all.blocks);
    free(all.batch);
    return cpa_control_agree(&engine->control, status, err);
}
