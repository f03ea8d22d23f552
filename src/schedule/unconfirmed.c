#include "src/schedule/unconfirmed.h"

#include <stdlib.h>

#include "base/check.h"
#include "src/schedule/scheduler_blocks.h"

/* The same unit has another key in each group: that of the unit, with the group in its last byte. */
static cpa_prefix_digest key_in(int32_t group, const cpa_prefix_digest *key) {
    cpa_prefix_digest own = *key;
    own.bytes[sizeof own.bytes - 1] ^= (uint8_t)group;
    return own;
}

static cpa_unconfirmed *find(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key) {
    const cpa_prefix_digest own = key_in(group, key);
    cpa_unconfirmed *entry;
    HASH_FIND(hh, s->unconfirmed, &own, sizeof own, entry);
    return entry;
}

cpa_status cpa_unconfirmed_note(cpa_scheduler *s, const cpa_prefix_digest *key, uint64_t request, int32_t pool,
                                int32_t block, cpa_error *err) {
    const int32_t group = pool / s->options.map.cp_size;
    if (!s->options.confirms) return CPA_OK;
    cpa_unconfirmed *entry = find(s, group, key);
    if (!entry) {
        entry = calloc(1, sizeof *entry);
        if (!entry) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        entry->key = key_in(group, key);
        HASH_ADD(hh, s->unconfirmed, key, sizeof entry->key, entry);
        if (!entry->hh.tbl) {
            free(entry);
            return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for a plan");
        }
    }
    entry->request = request;
    entry->pool = pool;
    entry->block = block;
    entry->step = s->plan ? s->step : s->step - 1;
    return CPA_OK;
}

int cpa_unconfirmed_has(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key) {
    return s->unconfirmed && find(s, group, key) && cpa_prefix_cache_find(s->caches[group], key);
}

static void forget(cpa_scheduler *s, cpa_unconfirmed *entry) {
    HASH_DEL(s->unconfirmed, entry);
    free(entry);
}

void cpa_unconfirmed_settle(cpa_scheduler *s) {
    cpa_unconfirmed *entry, *next;
    s->awaits_confirmation = 0;
    HASH_ITER(hh, s->unconfirmed, entry, next)
    if (entry->step + 2 <= s->step) forget(s, entry);
}

void cpa_unconfirmed_destroy(cpa_scheduler *s) {
    cpa_unconfirmed *entry, *next;
    HASH_ITER(hh, s->unconfirmed, entry, next) forget(s, entry);
}

/* Those that are confirmed hold what is finite; but who finds them would ask for more of the same. */
static void drop_own_blocks(cpa_scheduler *s, const cpa_sequence *sequence) {
    const int64_t unit = cpa_prefix_unit(&s->options, sequence->placement);
    for (int64_t j = sequence->shared; j < sequence->linked; j++)
        for (int32_t p = 0; p < s->n_pools; p++) {
            const int32_t *block = cpa_sequence_block(sequence, &s->options, p, j * unit, (j + 1) * unit);
            if (block && *block >= 0) cpa_scheduler_unfind(s, p, *block);
        }
}

void cpa_scheduler_forget_blocks(cpa_scheduler *s, uint64_t request) {
    cpa_unconfirmed *entry, *next;
    cpa_sequence *sequence;
    HASH_ITER(hh, s->unconfirmed, entry, next) {
        if (entry->request != request) continue;
        const int32_t group = entry->pool / s->options.map.cp_size;
        const cpa_prefix_digest key = key_in(group, &entry->key);
        const int32_t *unit = cpa_prefix_cache_find(s->caches[group], &key);
        if (unit && unit[cpa_pool_rank(&s->options, entry->pool)] == entry->block)
            cpa_scheduler_unfind(s, entry->pool, entry->block);
        forget(s, entry);
    }
    HASH_FIND(hh, s->by_id, &request, sizeof request, sequence);
    if (sequence && sequence->blocks) drop_own_blocks(s, sequence);
}
