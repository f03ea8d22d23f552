/* A place below the device that keeps units, host memory or disk: pools of its blocks, or slots, and what is found
 * in them. What was used last is kept longest, of the party that has the most. A unit has a block on each rank where
 * its blocks, [cp_size], are not -1. Part of the scheduler. */
#ifndef CPA_EVICTED_TIER_H
#define CPA_EVICTED_TIER_H

#include "src/schedule/scheduler_internal.h"

/* Told of the evictions of one pool. */
typedef struct cpa_tier_evict {
    const cpa_scheduler *scheduler;
    struct cpa_evicted_tier *tier;
    int32_t pool;
} cpa_tier_evict;

typedef struct cpa_evicted_tier {
    cpa_block_pool **pools;                         /* [n_pools]; NULL: there is no such tier */
    cpa_prefix_cache *caches[CPA_MAX_LAYER_GROUPS]; /* of each group */
    cpa_tier_evict *evict;                          /* [n_pools] */
    int32_t *dropped;                               /* [cp_size], scratch: the blocks of a unit that is forgotten */
} cpa_evicted_tier;

/* Over these pools, which must outlive it: of host blocks, or (on_disk) of slots. */
cpa_status cpa_tier_create(const cpa_scheduler *s, cpa_block_pool **pools, int on_disk, cpa_evicted_tier *t,
                           cpa_error *err);
/* Does nothing to one of zeros. */
void cpa_tier_destroy(const cpa_scheduler *s, cpa_evicted_tier *t);

/* The blocks of a unit there; NULL: it is not. */
const int32_t *cpa_tier_find(const cpa_evicted_tier *t, int32_t group, const cpa_prefix_digest *key);
/* It is not found there any more, if it was. */
void cpa_tier_forget(const cpa_scheduler *s, cpa_evicted_tier *t, int32_t group, const cpa_prefix_digest *key);
/* It has been used. */
void cpa_tier_touch(const cpa_scheduler *s, cpa_evicted_tier *t, int32_t group, const cpa_prefix_digest *key);

/* In the pools of a tier, or of the device: takes a block of each rank on which a unit has some, as `spread` says;
 * 0: there are too few, and none is taken. */
int cpa_unit_take(const cpa_scheduler *s, cpa_block_pool *const *pools, int32_t group, const int32_t *spread,
                  int32_t *blocks);
/* Lets a unit be found in blocks that are owned, and be kept for a party when they are not; 0: it is not, as it is
 * found already or there is no memory. */
int cpa_unit_keep(const cpa_scheduler *s, cpa_prefix_cache *cache, cpa_block_pool *const *pools, int32_t group,
                  const cpa_prefix_digest *key, const int32_t *blocks, int32_t party);
/* Lets go of its blocks. */
void cpa_unit_release(const cpa_scheduler *s, cpa_block_pool *const *pools, int32_t group, const int32_t *blocks);

#endif
