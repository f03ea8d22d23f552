#include "src/cache/block_pool.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/check.h"

/* Neighbours of a kept block without an owner in the list of its party, the least recently used first; -1: none. */
typedef struct links {
    int32_t before, after;
} links;

typedef struct kept_list {
    int32_t first, last;
    int64_t count;
} kept_list;

struct cpa_block_pool {
    int64_t total;
    int64_t peak;
    int32_t *owners; /* [total]; 0 = none */
    int32_t *ring;   /* [total]; the empty blocks, first in first out, from `head` on */
    int64_t head;
    int64_t empty_count;
    int32_t *party;   /* [total] + 1, that it is kept for; 0 = not kept */
    links *links;     /* [total] */
    kept_list *lists; /* [n_lists], by party */
    int32_t n_lists;
    int64_t kept_count;
    cpa_block_evict_fn evict;
    void *evict_ctx;
};

cpa_status cpa_block_pool_create(int64_t num_blocks, cpa_block_pool **out, cpa_error *err) {
    if (num_blocks < 1 || num_blocks > INT32_MAX)
        return cpa_fail(err, CPA_INVALID, "block pool: %" PRId64 " blocks; expected 1 to %" PRId32, num_blocks,
                        INT32_MAX);
    cpa_block_pool *pool = calloc(1, sizeof *pool);
    if (!pool) goto no_memory;
    pool->owners = calloc((size_t)num_blocks, sizeof *pool->owners);
    pool->ring = malloc((size_t)num_blocks * sizeof *pool->ring);
    pool->party = calloc((size_t)num_blocks, sizeof *pool->party);
    pool->links = malloc((size_t)num_blocks * sizeof *pool->links);
    if (!pool->owners || !pool->ring || !pool->party || !pool->links) goto no_memory;
    for (int64_t i = 0; i < num_blocks; i++) pool->ring[i] = (int32_t)i;
    pool->total = pool->empty_count = num_blocks;
    *out = pool;
    return CPA_OK;

no_memory:
    cpa_block_pool_destroy(pool);
    return cpa_fail(err, CPA_NO_MEMORY, "block pool: no memory for the bookkeeping of %" PRId64 " blocks", num_blocks);
}

void cpa_block_pool_destroy(cpa_block_pool *pool) {
    if (!pool) return;
    free(pool->lists);
    free(pool->links);
    free(pool->party);
    free(pool->ring);
    free(pool->owners);
    free(pool);
}

int64_t cpa_block_pool_total(const cpa_block_pool *pool) {
    return pool->total;
}

int64_t cpa_block_pool_free_count(const cpa_block_pool *pool) {
    return pool->empty_count + pool->kept_count;
}

int64_t cpa_block_pool_kept_count(const cpa_block_pool *pool) {
    return pool->kept_count;
}

int64_t cpa_block_pool_peak(const cpa_block_pool *pool) {
    return pool->peak;
}

void cpa_block_pool_set_evict(cpa_block_pool *pool, cpa_block_evict_fn evict, void *ctx) {
    pool->evict = evict;
    pool->evict_ctx = ctx;
}

static kept_list *list_of(const cpa_block_pool *pool, int32_t block) {
    return &pool->lists[pool->party[block] - 1];
}

static void push_kept(cpa_block_pool *pool, int32_t block) {
    kept_list *list = list_of(pool, block);
    pool->links[block] = (links){list->last, -1};
    *(list->last < 0 ? &list->first : &pool->links[list->last].after) = block;
    list->last = block;
    list->count++;
    pool->kept_count++;
}

static void unlink_kept(cpa_block_pool *pool, int32_t block) {
    kept_list *list = list_of(pool, block);
    links at = pool->links[block];
    *(at.before < 0 ? &list->first : &pool->links[at.before].after) = at.after;
    *(at.after < 0 ? &list->last : &pool->links[at.after].before) = at.before;
    list->count--;
    pool->kept_count--;
}

static void push_empty(cpa_block_pool *pool, int32_t block) {
    pool->ring[(pool->head + pool->empty_count) % pool->total] = block;
    pool->empty_count++;
}

static int32_t take_empty(cpa_block_pool *pool) {
    int32_t block = pool->ring[pool->head];
    pool->head = pool->head + 1 < pool->total ? pool->head + 1 : 0;
    pool->empty_count--;
    return block;
}

static int32_t take_kept(cpa_block_pool *pool) {
    const kept_list *most = pool->lists;
    for (int32_t p = 1; p < pool->n_lists; p++)
        if (pool->lists[p].count > most->count) most = &pool->lists[p];
    const int32_t block = most->first, party = pool->party[block] - 1;
    unlink_kept(pool, block);
    pool->party[block] = 0;
    if (pool->evict) pool->evict(pool->evict_ctx, block, party);
    return block;
}

int cpa_block_pool_take(cpa_block_pool *pool, int64_t n, int32_t *out) {
    if (n < 0 || n > cpa_block_pool_free_count(pool)) return 0;
    for (int64_t i = 0; i < n; i++) {
        out[i] = pool->empty_count > 0 ? take_empty(pool) : take_kept(pool);
        pool->owners[out[i]] = 1;
    }
    int64_t used = pool->total - cpa_block_pool_free_count(pool);
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
    int idle = block >= 0 && block < pool->total && pool->owners[block] == 0 && pool->party[block];
    if (!idle) CPA_TRY(check_in_use(pool, block, "retain", err));
    if (idle) unlink_kept(pool, block);
    pool->owners[block]++;
    int64_t used = pool->total - cpa_block_pool_free_count(pool);
    if (used > pool->peak) pool->peak = used;
    return CPA_OK;
}

/* Makes lists for parties up to the given one. */
static cpa_status reserve_lists(cpa_block_pool *pool, int32_t party, cpa_error *err) {
    if (party < pool->n_lists) return CPA_OK;
    kept_list *moved = realloc(pool->lists, ((size_t)party + 1) * sizeof *moved);
    if (!moved) return cpa_fail(err, CPA_NO_MEMORY, "block pool: no memory to keep blocks for party %" PRId32, party);
    pool->lists = moved;
    while (pool->n_lists <= party) pool->lists[pool->n_lists++] = (kept_list){-1, -1, 0};
    return CPA_OK;
}

cpa_status cpa_block_pool_keep(cpa_block_pool *pool, int32_t block, int32_t party, cpa_error *err) {
    CPA_TRY(check_in_use(pool, block, "keep", err));
    if (party < 0) return cpa_fail(err, CPA_INVALID, "block pool: party %" PRId32 "; expected 0 or more", party);
    CPA_TRY(reserve_lists(pool, party, err));
    if (!pool->party[block]) pool->party[block] = party + 1;
    return CPA_OK;
}

void cpa_block_pool_forget(cpa_block_pool *pool, int32_t block) {
    if (!pool->party[block]) return;
    const int idle = pool->owners[block] == 0;
    if (idle) unlink_kept(pool, block);
    pool->party[block] = 0;
    if (idle) push_empty(pool, block);
}

cpa_status cpa_block_pool_release(cpa_block_pool *pool, int32_t block, cpa_error *err) {
    CPA_TRY(check_in_use(pool, block, "release", err));
    if (--pool->owners[block] > 0) return CPA_OK;
    if (pool->party[block]) {
        push_kept(pool, block);
    } else {
        push_empty(pool, block);
    }
    return CPA_OK;
}

int32_t cpa_block_pool_owners(const cpa_block_pool *pool, int32_t block) {
    return block < 0 || block >= pool->total ? 0 : pool->owners[block];
}
