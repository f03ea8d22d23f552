#include "src/schedule/evicted_tier.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

const int32_t *cpa_tier_find(const cpa_evicted_tier *t, int32_t group, const cpa_prefix_digest *key) {
    return t->pools ? cpa_prefix_cache_find(t->caches[group], key) : NULL;
}

/* Who finds the unit of a block of a pool there finds it no more. */
static void forget(const cpa_scheduler *s, cpa_evicted_tier *t, int32_t pool, int32_t block) {
    const int32_t size = s->options.map.cp_size, first = pool / size * size;
    const int32_t *unit = cpa_prefix_cache_unit(t->caches[pool / size], pool % size, block);
    if (!unit) return;
    memcpy(t->dropped, unit, (size_t)size * sizeof *unit);
    cpa_prefix_cache_drop(t->caches[pool / size], pool % size, block);
    for (int32_t r = 0; r < size; r++)
        if (t->dropped[r] >= 0) cpa_block_pool_forget(t->pools[first + r], t->dropped[r]);
}

static void on_evict(void *ctx, int32_t block, int32_t party) {
    const cpa_tier_evict *of = ctx;
    (void)party;
    forget(of->scheduler, of->tier, of->pool, block);
}

void cpa_tier_forget(const cpa_scheduler *s, cpa_evicted_tier *t, int32_t group, const cpa_prefix_digest *key) {
    const int32_t *unit = cpa_tier_find(t, group, key);
    for (int32_t r = 0; unit && r < s->options.map.cp_size; r++)
        if (unit[r] >= 0) {
            forget(s, t, group * s->options.map.cp_size + r, unit[r]);
            return;
        }
}

void cpa_unit_release(const cpa_scheduler *s, cpa_block_pool *const *pools, int32_t group, const int32_t *blocks) {
    for (int32_t r = 0; r < s->options.map.cp_size; r++)
        if (blocks[r] >= 0)
            (void)cpa_block_pool_release(pools[group * s->options.map.cp_size + r], blocks[r], NULL); /* it is owned */
}

int cpa_unit_take(const cpa_scheduler *s, cpa_block_pool *const *pools, int32_t group, const int32_t *spread,
                  int32_t *blocks) {
    const int32_t size = s->options.map.cp_size;
    int taken = 1;
    for (int32_t r = 0; r < size; r++) blocks[r] = -1;
    for (int32_t r = 0; r < size && taken; r++)
        if (spread[r] >= 0) taken = cpa_block_pool_take(pools[group * size + r], 1, &blocks[r]);
    if (!taken) cpa_unit_release(s, pools, group, blocks);
    return taken;
}

int cpa_unit_keep(const cpa_scheduler *s, cpa_prefix_cache *cache, cpa_block_pool *const *pools, int32_t group,
                  const cpa_prefix_digest *key, const int32_t *blocks, int32_t party) {
    const int32_t size = s->options.map.cp_size;
    if (!cpa_prefix_cache_add(cache, key, blocks, 0)) return 0;
    for (int32_t r = 0; r < size; r++)
        if (blocks[r] >= 0 && cpa_block_pool_keep(pools[group * size + r], blocks[r], party, NULL) != CPA_OK) {
            /* Without memory: the others' marks go with what is found. */
            for (int32_t q = 0; q < r; q++)
                if (blocks[q] >= 0) cpa_block_pool_forget(pools[group * size + q], blocks[q]);
            cpa_prefix_cache_drop(cache, r, blocks[r]);
            return 0;
        }
    return 1;
}

void cpa_tier_touch(const cpa_scheduler *s, cpa_evicted_tier *t, int32_t group, const cpa_prefix_digest *key) {
    const int32_t size = s->options.map.cp_size, *unit = cpa_tier_find(t, group, key);
    for (int32_t r = 0; unit && r < size; r++)
        if (unit[r] >= 0 && cpa_block_pool_retain(t->pools[group * size + r], unit[r], NULL) == CPA_OK)
            (void)cpa_block_pool_release(t->pools[group * size + r], unit[r], NULL);
}

cpa_status cpa_tier_create(const cpa_scheduler *s, cpa_block_pool **pools, int on_disk, cpa_evicted_tier *t,
                           cpa_error *err) {
    const cpa_scheduler_options *o = &s->options;
    t->evict = calloc((size_t)s->n_pools, sizeof *t->evict);
    t->dropped = calloc((size_t)o->map.cp_size, sizeof *t->dropped);
    if (!t->evict || !t->dropped) return cpa_fail(err, CPA_NO_MEMORY, "scheduler: no memory for what is evicted");
    for (int32_t g = 0; g < o->groups.count; g++) {
        const cpa_layer_group *group = &o->groups.list[g];
        CPA_TRY(cpa_prefix_cache_create(o->map.cp_size, on_disk ? group->disk_blocks : group->host_blocks,
                                        o->block_size, &t->caches[g], err));
    }
    t->pools = pools;
    for (int32_t p = 0; p < s->n_pools; p++) {
        t->evict[p] = (cpa_tier_evict){s, t, p};
        cpa_block_pool_set_evict(pools[p], on_evict, &t->evict[p]);
    }
    return CPA_OK;
}

void cpa_tier_destroy(const cpa_scheduler *s, cpa_evicted_tier *t) {
    for (int32_t g = 0; g < s->options.groups.count; g++) cpa_prefix_cache_destroy(t->caches[g]);
    free(t->dropped);
    free(t->evict);
}
