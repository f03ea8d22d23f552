/* Deliberate bugs of the scheduler and of the block pool, put around functions that one file of theirs calls in
 * another. */
#include <string.h>

#include "src/schedule/scheduler_blocks.h"
#include "src/schedule/scheduler_prefix.h"
#include "src/schedule/waiting_lines.h"
#include "tests/faults/fault.h"

/* ---- stale-hash: an evicted block can still be found by its hash ---- */

void __real_cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block);
void __wrap_cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block);

void __wrap_cpa_prefix_cache_drop(cpa_prefix_cache *cache, int32_t rank, int32_t block) {
    if (!cpa_fault_is(CPA_FAULT_STALE_HASH)) __real_cpa_prefix_cache_drop(cache, rank, block);
}

/* ---- uncounted-owner: a sequence that shares a block is not counted as its owner ---- */

cpa_status __real_cpa_block_pool_retain(cpa_block_pool *pool, int32_t block, cpa_error *err);
cpa_status __wrap_cpa_block_pool_retain(cpa_block_pool *pool, int32_t block, cpa_error *err);

cpa_status __wrap_cpa_block_pool_retain(cpa_block_pool *pool, int32_t block, cpa_error *err) {
    if (cpa_fault_is(CPA_FAULT_UNCOUNTED_OWNER) && cpa_block_pool_owners(pool, block) > 0) return CPA_OK;
    return __real_cpa_block_pool_retain(pool, block, err);
}

/* ---- uneven-unit: rank 1 shares the block before the one that was found with those of the others ---- */

cpa_status __real_cpa_sequence_share(cpa_sequence *sequence, int32_t rank, cpa_block_pool *pool, int32_t block,
                                     cpa_error *err);
cpa_status __wrap_cpa_sequence_share(cpa_sequence *sequence, int32_t rank, cpa_block_pool *pool, int32_t block,
                                     cpa_error *err);

cpa_status __wrap_cpa_sequence_share(cpa_sequence *sequence, int32_t rank, cpa_block_pool *pool, int32_t block,
                                     cpa_error *err) {
    const int64_t held = sequence->shards[rank].held;
    if (cpa_fault_is(CPA_FAULT_UNEVEN_UNIT) && rank == 1 && held > 0)
        block = sequence->blocks[rank * sequence->stride + held - 1];
    return __real_cpa_sequence_share(sequence, rank, pool, block, err);
}

/* ---- leaked-block: a sequence that ends keeps one of its blocks ---- */

cpa_status __real_cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t cp_size, cpa_error *err);
cpa_status __wrap_cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t cp_size, cpa_error *err);

cpa_status __wrap_cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t cp_size, cpa_error *err) {
    enum { KEPT = 2 };
    for (int32_t rank = 0; cpa_fault_is(CPA_FAULT_LEAKED_BLOCK) && rank < cp_size; rank++)
        if (sequence->shards[rank].held > KEPT) sequence->blocks[rank * sequence->stride + KEPT] = -1;
    return __real_cpa_sequence_close(sequence, pools, cp_size, err);
}

/* ---- early-reuse: a block is handed out while a copy still reads it ---- */

cpa_status __real_cpa_scheduler_pin(cpa_scheduler *s, cpa_block_pool *pool, int32_t block, cpa_error *err);
cpa_status __wrap_cpa_scheduler_pin(cpa_scheduler *s, cpa_block_pool *pool, int32_t block, cpa_error *err);

cpa_status __wrap_cpa_scheduler_pin(cpa_scheduler *s, cpa_block_pool *pool, int32_t block, cpa_error *err) {
    if (cpa_fault_is(CPA_FAULT_EARLY_REUSE)) return cpa_block_pool_release(pool, block, err);
    return __real_cpa_scheduler_pin(s, pool, block, err);
}

/* ---- lost-sequence: a preempted sequence, which alone still has blocks when it is queued, is forgotten ---- */

void __real_cpa_sequence_queue_push(cpa_sequence_queue *queue, cpa_sequence *sequence);
void __wrap_cpa_sequence_queue_push(cpa_sequence_queue *queue, cpa_sequence *sequence);

void __wrap_cpa_sequence_queue_push(cpa_sequence_queue *queue, cpa_sequence *sequence) {
    if (!cpa_fault_is(CPA_FAULT_LOST_SEQUENCE) || !sequence->blocks) __real_cpa_sequence_queue_push(queue, sequence);
}

/* Who is in no queue is taken out of none. */
void __real_cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence);
void __wrap_cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence);

void __wrap_cpa_waiting_remove(cpa_waiting_lines *lines, cpa_sequence *sequence) {
    const cpa_sequence_queue *queue = &sequence->line->queue;
    const int is_there = sequence->heap_index < queue->count && queue->heap[sequence->heap_index] == sequence;
    if (!cpa_fault_is(CPA_FAULT_LOST_SEQUENCE) || is_there) __real_cpa_waiting_remove(lines, sequence);
}

/* ---- early-hash: a block can be found while drafts fill it that nobody has accepted ---- */

cpa_status __real_cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);
cpa_status __wrap_cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);

cpa_status __wrap_cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err) {
    const int64_t early = cpa_fault_is(CPA_FAULT_EARLY_HASH) ? sequence->n_drafts : 0;
    sequence->computed += early;
    sequence->emitted += early;
    const cpa_status status = __real_cpa_scheduler_link(s, sequence, err);
    sequence->computed -= early;
    sequence->emitted -= early;
    return status;
}

/* ---- starved-waiter: a request waits for a prefix that nobody computes any more ---- */

void __real_cpa_scheduler_unlink(cpa_scheduler *s, cpa_sequence *sequence);
void __wrap_cpa_scheduler_unlink(cpa_scheduler *s, cpa_sequence *sequence);
const cpa_sequence *__real_cpa_scheduler_who_computes(const cpa_scheduler *s, const cpa_prefix_digest *key);
const cpa_sequence *__wrap_cpa_scheduler_who_computes(const cpa_scheduler *s, const cpa_prefix_digest *key);

/* What the last sequences that were preempted or ended would have computed next, and how one of them was then. */
enum { REMEMBERED = 64 };
static cpa_prefix_digest abandoned[REMEMBERED];
static uint64_t n_abandoned;
static cpa_sequence gone;

void __wrap_cpa_scheduler_unlink(cpa_scheduler *s, cpa_sequence *sequence) {
    if (cpa_fault_is(CPA_FAULT_STARVED_WAITER) && sequence->pending.tbl) {
        abandoned[n_abandoned++ % REMEMBERED] = sequence->next_key;
        gone = *sequence;
    }
    __real_cpa_scheduler_unlink(s, sequence);
}

const cpa_sequence *__wrap_cpa_scheduler_who_computes(const cpa_scheduler *s, const cpa_prefix_digest *key) {
    const cpa_sequence *computing = __real_cpa_scheduler_who_computes(s, key);
    if (!cpa_fault_is(CPA_FAULT_STARVED_WAITER)) return computing;
    for (uint64_t i = 0; !computing && i < n_abandoned && i < REMEMBERED; i++)
        if (memcmp(&abandoned[i], key, sizeof *key) == 0) computing = &gone;
    return computing;
}
