/* What the files of the scheduler share. Tests look in here as well. */
#ifndef CPA_SCHEDULER_INTERNAL_H
#define CPA_SCHEDULER_INTERNAL_H

#include "src/cache/prefix_cache.h"
#include "src/schedule/scheduler.h"
#include "src/schedule/sequence.h"
#include "src/schedule/sequence_queue.h"

/* Most waiting requests that one plan passes over. */
enum { CPA_MAX_SKIPPED = 16 };

/* A block that the current plan reads and the next one gives back. */
typedef struct cpa_pin {
    cpa_block_pool *pool;
    int32_t block;
} cpa_pin;

/* Told of the evictions of one rank. */
typedef struct cpa_evict_ctx {
    cpa_scheduler *scheduler;
    int32_t rank;
} cpa_evict_ctx;

struct cpa_scheduler {
    cpa_scheduler_options options;
    cpa_block_pool **pools;      /* [cp_size] */
    cpa_block_pool **host_pools; /* [cp_size]; NULL without host memory */
    cpa_evict_ctx *evict;        /* [cp_size] */
    cpa_prefix_cache *cache;
    char *identity;
    cpa_tenant *tenants;   /* hash table */
    cpa_sequence *by_id;   /* hash table of every unfinished sequence */
    cpa_sequence *pending; /* hash table by `next`: what running sequences are about to compute */
    cpa_sequence_queue future;
    cpa_sequence_queue waiting;
    cpa_sequence **running; /* [max_num_seqs], in the order of cpa_sequence_before */
    int32_t n_running;
    cpa_sequence **finished; /* [max_num_seqs], finished in the last plan; they still hold index and blocks */
    int32_t n_finished;
    int32_t *free_indices; /* [max_num_seqs], a stack: those of no running sequence */
    int32_t n_free_indices;
    cpa_pin *pins;
    int64_t n_pins, pins_capacity;
    uint64_t step;
    cpa_scheduler_stats stats;

    /* Of the plan being made. */
    cpa_step_plan *plan;
    cpa_sequence **scheduled; /* [max_num_seqs], in the order of the chunks; those with planned == 0 were withdrawn */
    int32_t n_scheduled;
    int64_t budget;      /* tokens left */
    int short_of_blocks; /* a running sequence lacked blocks, or was preempted for another */
    int64_t *lacks;      /* [cp_size], blocks that the sequence being scheduled lacks */
    int32_t *marks;      /* [num_blocks], scratch, zero between uses */
};

/* scheduler.c */

/* Keeps a block that the plan reads from being handed out before the next plan; the caller's ownership passes over. */
cpa_status cpa_scheduler_pin(cpa_scheduler *s, cpa_block_pool *pool, int32_t block, cpa_error *err);
/* The tokens a sequence may be given now. */
int64_t cpa_scheduler_next_tokens(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Takes the blocks that s->lacks says and gives the sequence `tokens` more tokens in this plan. */
void cpa_scheduler_place(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens);
/* Sets s->lacks for the first `tokens` tokens of a sequence; whether the pools have that. */
int cpa_scheduler_has_room(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens);
/* What plans the chunks of a sequence: it exchanges nothing if it lies on one rank. */
cpa_planner cpa_scheduler_planner(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Whether the tenant may hold what s->lacks says besides what it holds. */
int cpa_scheduler_within_quota(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Adds the blocks in the tables of a sequence to those of its tenant, or (sign -1) takes them away. */
void cpa_scheduler_charge(const cpa_sequence *sequence, int32_t cp_size, int sign);

/* scheduler_preempt.c */

/* Makes room for what s->lacks says of running[index] by preempting sequences after it, and sets *made; does nothing if
 * that cannot succeed. */
cpa_status cpa_scheduler_make_room(cpa_scheduler *s, int32_t index, int *made, cpa_error *err);
/* Takes running[index] out of the running sequences. */
cpa_status cpa_scheduler_preempt(cpa_scheduler *s, int32_t index, int may_swap, cpa_error *err);
/* Forgets what a sequence has in host memory. */
cpa_status cpa_scheduler_drop_host(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);

/* scheduler_admit.c */
cpa_status cpa_scheduler_admit(cpa_scheduler *s, cpa_error *err);

/* scheduler_write.c */

/* Writes the chunks of all that were given tokens and were not withdrawn, and what comes with them. */
cpa_status cpa_scheduler_write(cpa_scheduler *s, cpa_error *err);
/* Gives back the blocks of running sequences that no query sees any more. */
cpa_status cpa_scheduler_void_unseen(cpa_scheduler *s, cpa_error *err);
/* Whether others may find what a sequence computes. */
int cpa_scheduler_shares(const cpa_scheduler *s, const cpa_sequence *sequence);
/* The digest of tokens [first, first + n) of a sequence after a prefix; 0 if it could not be computed. */
int cpa_scheduler_digest(cpa_scheduler *s, const cpa_sequence *sequence, const cpa_prefix_digest *parent, int64_t first,
                         int32_t n, cpa_prefix_digest *out);
/* Lets others find what the sequence has computed, and know what it will compute next. */
cpa_status cpa_scheduler_link(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);
/* Others no longer wait for what the sequence would have computed next. */
void cpa_scheduler_unlink(cpa_scheduler *s, cpa_sequence *sequence);

#endif
