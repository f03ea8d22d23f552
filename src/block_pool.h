/* The block pool of one rank: which blocks are free, and how many owners each of the others has. Pure logic; one
 * thread. */
#ifndef CPA_BLOCK_POOL_H
#define CPA_BLOCK_POOL_H

#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_block_pool cpa_block_pool;

cpa_status cpa_block_pool_create(int64_t num_blocks, cpa_block_pool **out, cpa_error *err);
void cpa_block_pool_destroy(cpa_block_pool *pool);

int64_t cpa_block_pool_total(const cpa_block_pool *pool);
int64_t cpa_block_pool_free_count(const cpa_block_pool *pool);
/* The most blocks that were ever in use at once. */
int64_t cpa_block_pool_peak(const cpa_block_pool *pool);

/* Takes n free blocks, the longest free first, one owner each, into out[0..n). All or nothing: returns 0 and takes none
 * if fewer are free, else 1. */
int cpa_block_pool_take(cpa_block_pool *pool, int64_t n, int32_t *out);
/* One more owner of a block in use; a free block or an id out of range is CPA_INVALID. */
cpa_status cpa_block_pool_retain(cpa_block_pool *pool, int32_t block, cpa_error *err);
/* One owner less; the last one frees the block. A free block (double free) or an id out of range is CPA_INVALID. */
cpa_status cpa_block_pool_release(cpa_block_pool *pool, int32_t block, cpa_error *err);
/* 0 for a free block and for an id out of range. */
int32_t cpa_block_pool_owners(const cpa_block_pool *pool, int32_t block);

#endif
