/* A scheduler, as its files see it. Tests look in here as well. */
#ifndef CPA_SCHEDULER_INTERNAL_H
#define CPA_SCHEDULER_INTERNAL_H

#include "src/cache/prefix_cache.h"
#include "src/schedule/scheduler.h"
#include "src/schedule/sequence.h"
#include "src/schedule/sequence_queue.h"
#include "src/schedule/step_cost.h"
#include "src/schedule/waiting_lines.h"

/* Most waiting requests of a tenant that one plan passes over. */
enum { CPA_MAX_SKIPPED = 16 };

/* A block that the current plan reads and the next one gives back. */
typedef struct cpa_pin {
    cpa_block_pool *pool;
    int32_t block;
} cpa_pin;

/* A device block that a plan has found for a waiting sequence, and that the second plan after gives back. */
typedef struct cpa_hold {
    int32_t pool, block;
    uint64_t step;
} cpa_hold;

/* Told of the evictions of one pool. */
typedef struct cpa_evict_ctx {
    cpa_scheduler *scheduler;
    int32_t pool;
} cpa_evict_ctx;

/* A block of the last steps; see unconfirmed.h. */
typedef struct cpa_unconfirmed {
    cpa_prefix_digest key; /* digest of the unit in its group: see unconfirmed.c */
    uint64_t request, step;
    int32_t pool, block;
    UT_hash_handle hh;
} cpa_unconfirmed;

typedef struct cpa_evicted cpa_evicted;

struct cpa_scheduler {
    cpa_scheduler_options options;
    int32_t n_pools;                                /* see cpa_pools */
    cpa_block_pool **pools;                         /* [n_pools] */
    cpa_block_pool **host_pools;                    /* [n_pools]; NULL without host memory */
    cpa_evict_ctx *evict;                           /* [n_pools] */
    cpa_prefix_cache *caches[CPA_MAX_LAYER_GROUPS]; /* prefix cache of each group; the first makes the digests */
    cpa_evicted *evicted;                           /* evicted_units.h; NULL: what is evicted is gone */
    char *identity, *model;
    cpa_tenants tenants;
    cpa_step_cost step_cost;
    cpa_sequence *by_id;          /* hash table of every unfinished sequence */
    cpa_sequence *pending;        /* hash table by `next`: what running sequences are about to compute */
    cpa_unconfirmed *unconfirmed; /* hash table by key */
    cpa_sequence_queue future;
    cpa_waiting_lines waiting;
    cpa_sequence **running; /* [max_num_seqs], in the order of cpa_sequence_before */
    int32_t n_running;
    /* [max_num_seqs] sequences that ended in or since the last plan; they still hold index and blocks. */
    cpa_sequence **finished;
    int32_t n_finished;
    cpa_plan_discard *discards; /* emitted for requests that have ended; the next plan carries them */
    int64_t n_discards, cap_discards;
    int32_t *free_indices; /* [max_num_seqs] stack of indices that no running sequence has */
    int32_t n_free_indices;
    cpa_pin *pins;
    int64_t n_pins, pins_capacity;
    cpa_hold *holds;
    int64_t n_holds, cap_holds;
    uint64_t step;
    cpa_scheduler_stats stats;

    /* Of the plan being made. */
    cpa_step_plan *plan;
    /* [2 * max_num_seqs], in the order of the chunks; those with planned == 0 were withdrawn, and others admitted in their
     * places. */
    cpa_sequence **scheduled;
    int32_t n_scheduled;
    int64_t budget;          /* tokens that the plan may still be given */
    int awaits_confirmation; /* not 0: a waiting sequence is passed over for blocks that are not confirmed yet */
    int short_of_blocks;     /* not 0: a running sequence lacked blocks, or was preempted for another */
    int64_t *lacks;          /* [n_pools], blocks that the sequence being scheduled lacks */
    int64_t *spared;  /* [n_pools], scratch: free blocks that the sequence at hand is not to take (scheduler_chunk.c) */
    int32_t *unit;    /* [cp_size], scratch: the blocks of a unit; -1: a rank has none */
    int32_t *sources; /* [n_pools], scratch: blocks of which the sequence being admitted gets copies */
    int32_t *marks;   /* [blocks of the largest pool], scratch, zero between uses */
};

#endif
