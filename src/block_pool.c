#include "src/block_pool.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/check.h"

struct cpa_block_pool {
    int64_t total;
    int64_t peak;
    int32_t *owners; /* [total]; 0 = free */
    int32_t *ring;   /* [total]; the free blocks, first in first out, from `head` on */
    int64_t head;
    int64_t free_count;
};

cpa_status cpa_block_pool_create(int64_t num_blocks, cpa_block_pool **out, cpa_error *err) {
    if (num_blocks < 1 || num_blocks > INT32_MAX)
        return cpa_fail(err, CPA_INVALID, "block pool: %" PRId64 " blocks; expected 1 to %" PRId32, num_blocks,
                        INT32_MAX);
    cpa_block_pool *pool = calloc(1, sizeof *pool);
    if (!pool) goto no_memory;
    pool->owners = calloc((size_t)num_blocks, sizeof *pool->owners);
    pool->ring = malloc((size_t)num_blocks * sizeof *pool->ring);
    if (!pool->owners || !pool->ring) goto no_memory;
    for (int64_t i = 0; i < num_blocks; i++) pool->ring[i] = (int32_t)i;
    pool->total = pool->free_count = num_blocks;
    *out = pool;
    return CPA_OK;

no_memory:
    cpa_block_pool_destroy(pool);
    return cpa_fail(err, CPA_NO_MEMORY, "block pool: no memory for the bookkeeping of %" PRId64 " blocks", num_blocks);
}

void cpa_block_pool_destroy(cpa_block_pool *pool) {
    if (!pool) return;
    free(pool->ring);
    free(pool->owners);
    free(pool);
}

int64_t cpa_block_pool_total(const cpa_block_pool *pool) {
    return pool->total;
}

int64_t cpa_block_pool_free_count(const cpa_block_pool *pool) {
    return pool->free_count;
}

int64_t cpa_block_pool_peak(const cpa_block_pool *pool) {
    return pool->peak;
}

int cpa_block_pool_take(cpa_block_pool *pool, int64_t n, int32_t *out) {
    if (n < 0 || n > pool->free_count) return 0;
    for (int64_t i = 0; i < n; i++) {
        out[i] = pool->ring[pool->head];
        pool->owners[out[i]] = 1;
        pool->head = pool->head + 1 < pool->total ? pool->head + 1 : 0;
    }
    pool->free_count -= n;
    int64_t used = pool->total - pool->free_count;
    if (used > pool->peak) pool->peak = used;
    return 1;
}

static cpa_status check_in_use(const cpa_block_pool *pool, int32_t block, const char *what, cpa_error *err) {
    if (block < 0 || block >= pool->total)
        return cpa_fail(err, CPA_INVALID, "block pool: %s of block %" PRId32 "; the pool has blocks 0 to %" PRId64,
                        what, block, pool->total - 1);
    if (pool->owners[block] == 0)
        return cpa_fail(err, CPA_INVALID, "block pool: %s of block %" PRId32 ", which is free", what, block);
    return CPA_OK;
}

cpa_status cpa_block_pool_retain(cpa_block_pool *pool, int32_t block, cpa_error *err) {
    CPA_TRY(check_in_use(pool, block, "retain", err));
    pool->owners[block]++;
    return CPA_OK;
}

cpa_status cpa_block_pool_release(cpa_block_pool *pool, int32_t block, cpa_error *err) {
    CPA_TRY(check_in_use(pool, block, "release", err));
    if (--pool->owners[block] > 0) return CPA_OK;
    pool->ring[(pool->head + pool->free_count) % pool->total] = block;
    pool->free_count++;
    return CPA_OK;
}

int32_t cpa_block_pool_owners(const cpa_block_pool *pool, int32_t block) {
    return block < 0 || block >= pool->total ? 0 : pool->owners[block];
}
