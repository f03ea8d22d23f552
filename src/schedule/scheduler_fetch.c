#include "src/schedule/scheduler_fetch.h"

#include <string.h>

#include "base/check.h"
#include "src/schedule/evicted_units.h"
#include "src/schedule/scheduler_found.h"

/* A unit that a sequence needs in a group. */
typedef struct needed {
    cpa_stored_unit unit;
    const int32_t *blocks; /* on the device; NULL: it cannot be found there */
    cpa_evicted_place place;
} needed;

/* 0: the sequence does not need unit j of the first `units` in that group, or there is no memory. */
static int look_at(cpa_scheduler *s, cpa_sequence *sequence, int64_t units, int32_t group, int64_t j, needed *out) {
    const cpa_placement placement = sequence->placement;
    const int64_t unit = cpa_prefix_unit(&s->options, placement);
    if (!cpa_found_needs(s, sequence, placement, group, units, j)) return 0;
    *out = (needed){.unit = {.group = group, .first = j * unit, .n = unit}};
    if (!cpa_found_key(s, sequence, placement, j, &out->unit.key)) return 0;
    if (j > 0 && !cpa_found_key(s, sequence, placement, j - 1, &out->unit.parent)) return 0;
    out->blocks = cpa_found_blocks(s, sequence, placement, group, j);
    if (!out->blocks) out->place = cpa_evicted_where(s, group, &out->unit.key);
    return 1;
}

int64_t cpa_fetch_units(cpa_scheduler *s, cpa_sequence *sequence, int64_t found) {
    const int64_t units = cpa_found_with_evicted(s, sequence, sequence->placement);
    /* Where others take them again before the sequence is admitted, it computes them in the end. */
    return sequence->fetched < 4 * s->options.groups.count * units ? units : found;
}

void cpa_fetch_count_blocks(cpa_scheduler *s, cpa_sequence *sequence, int64_t units) {
    const int32_t size = s->options.map.cp_size;
    needed n;
    memset(s->lacks, 0, (size_t)s->n_pools * sizeof *s->lacks);
    for (int64_t j = 0; j < units; j++)
        for (int32_t g = 0; g < s->options.groups.count; g++) {
            if (!look_at(s, sequence, units, g, j, &n)) continue;
            const int is_below = n.place == CPA_EVICTED_IN_HOST || n.place == CPA_EVICTED_ON_DISK;
            const int32_t *spread = is_below ? cpa_evicted_spread(s, g, &n.unit.key) : n.blocks;
            for (int32_t r = 0; spread && r < size; r++)
                s->lacks[g * size + r] +=
                    spread[r] >= 0 && (is_below || cpa_block_pool_owners(s->pools[g * size + r], spread[r]) == 0);
        }
}

/* What is found already stays until the sequence can be admitted, and what is read in this plan until the next. */
static cpa_status keep_there(cpa_scheduler *s, const needed *n, cpa_error *err) {
    const int32_t size = s->options.map.cp_size, first = n->unit.group * size;
    if (n->place == CPA_EVICTED_IN_HOST) return cpa_evicted_pin(s, n->unit.group, &n->unit.key, err);
    for (int32_t r = 0; n->blocks && r < size; r++) {
        if (n->blocks[r] < 0) continue;
        CPA_TRY(cpa_block_pool_retain(s->pools[first + r], n->blocks[r], err));
        CPA_TRY(cpa_evicted_hold(s, first + r, n->blocks[r], err));
    }
    return CPA_OK;
}

/* Host blocks that are taken for what is loaded are never those of what is fetched: that is pinned. */
static cpa_status start(cpa_scheduler *s, const cpa_sequence *sequence, const needed *n, int *started, cpa_error *err) {
    *started = 0;
    if (n->place == CPA_EVICTED_ON_DISK) return cpa_evicted_load(s, sequence, &n->unit, started, err);
    if (n->place == CPA_EVICTED_IN_HOST) return cpa_evicted_fetch(s, sequence, &n->unit, started, err);
    return CPA_OK;
}

/* The first units first where not all can be loaded; the last ones first where they come to the device, as those that
 * are let go of last stay longest. */
cpa_status cpa_fetch_plan(cpa_scheduler *s, cpa_sequence *sequence, int64_t units, int *coming, cpa_error *err) {
    const int32_t groups = s->options.groups.count;
    const int64_t held = s->n_holds;
    needed n;
    int started;
    *coming = 0;
    for (int64_t i = units * groups - 1; i >= 0; i--)
        if (look_at(s, sequence, units, (int32_t)(i % groups), i / groups, &n)) CPA_TRY(keep_there(s, &n, err));
    for (int from_disk = 1; from_disk >= 0; from_disk--)
        for (int64_t k = 0; k < units * groups; k++) {
            const int64_t i = from_disk ? k : units * groups - 1 - k;
            if (!look_at(s, sequence, units, (int32_t)(i % groups), i / groups, &n)) continue;
            *coming |= n.place == CPA_EVICTED_COMING;
            if ((n.place == CPA_EVICTED_ON_DISK) != from_disk) continue;
            CPA_TRY(start(s, sequence, &n, &started, err));
            *coming |= started;
            sequence->fetched += started;
        }
    /* Where others have host memory for what is on its way, there is more of it later. */
    if (!*coming && cpa_evicted_is_moving(s)) {
        sequence->fetched++;
        *coming = 1;
    }
    /* Where nothing comes, what would have waited for it is not kept. */
    for (; !*coming && s->n_holds > held; s->n_holds--) {
        const cpa_hold *last = &s->holds[s->n_holds - 1];
        CPA_TRY(cpa_block_pool_release(s->pools[last->pool], last->block, err));
    }
    return CPA_OK;
}
