/* The block pool of one rank: which blocks are free, and how many owners each of the others has.
 *
 * A block may be marked as kept, because its content can be found again. When its last owner lets go it is neither in
 * use nor empty: it may be retained once more, until a take needs it. Kept blocks are taken after all empty ones, and
 * never while they have an owner: the least recently used one of the party (a number) that has the most of them, so
 * that none can crowd out the others. Pure logic; one thread. */
#ifndef CPA_BLOCK_POOL_H
#define CPA_BLOCK_POOL_H

#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_block_pool cpa_block_pool;

/* Told that a block, kept for a party, is about to be taken: from now on nobody may find it. */
typedef void (*cpa_block_evict_fn)(void *ctx, int32_t block, int32_t party);

cpa_status cpa_block_pool_create(int64_t num_blocks, cpa_block_pool **out, cpa_error *err);
void cpa_block_pool_destroy(cpa_block_pool *pool);

int64_t cpa_block_pool_total(const cpa_block_pool *pool);
/* Blocks without an owner, kept ones included: what can be taken. */
int64_t cpa_block_pool_free_count(const cpa_block_pool *pool);
/* Kept blocks without an owner. */
int64_t cpa_block_pool_kept_count(const cpa_block_pool *pool);
/* The most blocks that were ever in use at once. */
int64_t cpa_block_pool_peak(const cpa_block_pool *pool);

/* Who is told of evictions; by default nobody. */
void cpa_block_pool_set_evict(cpa_block_pool *pool, cpa_block_evict_fn evict, void *ctx);

/* Takes n blocks without an owner, the longest free first, one owner each, into out[0..n). All or nothing: returns 0
 * and takes none if there are fewer, else 1. */
int cpa_block_pool_take(cpa_block_pool *pool, int64_t n, int32_t *out);
/* Keeps a block in use for a party (0, 1, ...) for when it has no owner any more. A block without an owner and a
 * negative party are CPA_INVALID. A block that is kept already stays with its party. */
cpa_status cpa_block_pool_keep(cpa_block_pool *pool, int32_t block, int32_t party, cpa_error *err);
/* The block is no longer kept: it is empty when it has no owner, or at once. */
void cpa_block_pool_forget(cpa_block_pool *pool, int32_t block);
/* One more owner of a block that is in use or kept; a free block or an id out of range is CPA_INVALID. */
cpa_status cpa_block_pool_retain(cpa_block_pool *pool, int32_t block, cpa_error *err);
/* One owner less; the last one frees the block, or leaves it to be found if it is kept. A free block (double free) or
 * an id out of range is CPA_INVALID. */
cpa_status cpa_block_pool_release(cpa_block_pool *pool, int32_t block, cpa_error *err);
/* 0 for a free block and for an id out of range. */
int32_t cpa_block_pool_owners(const cpa_block_pool *pool, int32_t block);

#endif
