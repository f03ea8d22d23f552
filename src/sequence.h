/* A request in the hands of the scheduler: how far it has come, and which blocks it holds on each rank. Pure logic. */
#ifndef CPA_SEQUENCE_H
#define CPA_SEQUENCE_H

#include <stdint.h>

/* A failed insertion leaves the element out instead of ending the process. */
#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#include "src/block_pool.h"
#include "src/scheduler.h"

typedef struct cpa_sequence_shard {
    int64_t held;      /* blocks on this rank */
    int64_t announced; /* how many of them the ranks know from earlier plans */
} cpa_sequence_shard;

typedef struct cpa_sequence {
    cpa_scheduler_request request;
    int32_t phase;
    int32_t slot;
    int64_t computed; /* tokens in the cache, once every planned step has run */
    int64_t emitted;  /* output tokens, likewise */
    int64_t planned;  /* tokens it is given in the plan being made; 0 = none */
    int32_t *blocks;  /* [cp_size, stride] ids of the blocks held; NULL when not running */
    int64_t stride;   /* most blocks on one rank over its whole life */
    UT_hash_handle hh;
    cpa_sequence_shard shards[]; /* [cp_size] */
} cpa_sequence;

/* A waiting sequence; NULL without memory. Its phase spreads short sequences over the ranks, while those that begin
 * with the same run of tokens share it. */
cpa_sequence *cpa_sequence_create(const cpa_scheduler_options *options, const cpa_scheduler_request *request);
void cpa_sequence_destroy(cpa_sequence *sequence);

/* The tokens a whole request caches: its last output token is never an input. */
int64_t cpa_request_cached_tokens(const cpa_scheduler_request *request);
/* Blocks that the fullest rank needs for `tokens` tokens of a sequence. */
int64_t cpa_request_blocks(const cpa_scheduler_options *options, int64_t tokens);

/* Tokens that are known: the prompt and what has been emitted. */
int64_t cpa_sequence_known(const cpa_sequence *sequence);
/* Whether the next chunk is one decode token. */
int cpa_sequence_decodes(const cpa_sequence *sequence);
/* Whether a goes before b: by priority, then arrival, then id. */
int cpa_sequence_before(const cpa_sequence *a, const cpa_sequence *b);

/* Blocks that it lacks on a rank to hold its first `tokens` tokens. */
int64_t cpa_sequence_lacks(const cpa_sequence *sequence, const cpa_scheduler_options *options, int32_t rank,
                           int64_t tokens);
/* Makes the table that blocks are added to; 0 without memory. */
int cpa_sequence_open(cpa_sequence *sequence, int32_t cp_size);
/* Takes n free blocks of the rank's pool, which must have them. */
void cpa_sequence_take(cpa_sequence *sequence, int32_t rank, cpa_block_pool *pool, int64_t n);
/* Gives every block back to the pools of the ranks. */
cpa_status cpa_sequence_close(cpa_sequence *sequence, cpa_block_pool **pools, int32_t cp_size, cpa_error *err);

#endif
