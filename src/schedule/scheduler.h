/* The scheduler of rank 0: continuous batching with chunked prefill over the block pools of all ranks.
 *
 * A step has a budget of tokens and of sequences. Running sequences that decode come first, one token each, then
 * running prefills, then waiting requests, each in their order (by arrival, or by priority with ageing); prefill is cut
 * to what is left of the budget, and to the threshold for long prefills. A sequence takes blocks on each rank for the
 * tokens it is given. When a rank has too few, the running sequences that come last and hold blocks there are
 * preempted: their blocks are freed, a chunk they already had in this step is withdrawn, and they go back to the
 * waiting requests with every token they have emitted; their cache is computed again, or moved to host memory and back.
 * A sequence that would not get its blocks even so keeps what it holds and waits for a later step. No request is
 * admitted in a step that ran short of blocks. None overtakes a waiting one that goes before it, except one that waits
 * for its prefix, or whose tenant has used up its quota. While several tenants are about, the decoding sequences of one
 * with many take turns, and its prompts come in smaller chunks (fair_step.h). Nothing is lost: the first of the running
 * sequences always advances, so every request finishes.
 *
 * Layers of different masks are in groups (layer_groups.h), each with tables of its own for every sequence and a pool of
 * its own on every rank. A sequence is given tokens where all groups have blocks for them, and gives way in all of them
 * at once. What is left before a window is given back in each group by itself.
 *
 * Full blocks (where runs of ranks are shorter than blocks, units of a block of every rank) can be found by their
 * prefix (prefix_cache.h) from the step after the one that fills them, as long as nobody needs their memory. A
 * request that is admitted shares what can be found; at least its last token is computed, so a block that this token
 * falls into is copied first. A request whose next block is just being computed by a running sequence waits for it.
 * Samples of one prompt (requests of one group) share it in the same way, also where nothing else is shared. Blocks are
 * found in each group by itself: a sequence goes on behind the most units that the first group has all of, and each
 * other those that the next query sees.
 *
 * A short sequence may be placed on one rank (local_context), where it decodes without any exchange: on the rank
 * that then has the fewest blocks in use, so that what it finds there counts for a rank. Where a sequence lies is
 * decided each time that it is about to be admitted without a cache, and holds until it finishes or is computed again.
 *
 * The scheduler assumes that a planned step will run: it may be asked for the next plan while one executes. A sequence
 * that finishes in a step gives its blocks back in the next plan, and so does what a plan's copies read. A sequence
 * that comes back from host memory is given tokens in the second plan after, so that damage can be reported before
 * anything is computed from it.
 *
 * Plans need counts of tokens, not the tokens: a sequence whose next input is being drawn goes on with "the token that
 * the plan before emits". What was drawn is reported one step late. Only then do blocks that it fills get their
 * digests, in time for the step after the one that fills them, and only then may it turn out that the request has
 * ended: a chunk that it was given in the meantime computes a token that nobody wants, which the next plan says.
 *
 * Where somebody drafts, a decode chunk may have drafts behind its token: guesses of the tokens that follow. Each row of
 * it emits a token. The one of the first row is certain; a report of one more accepts the draft before it. How far that
 * went is known when the next plan is made, which says where the cache of the sequence ends. Until then the scheduler
 * counts what is certain alone: nothing that a draft has filled can be found before the draft is accepted. Pure logic:
 * no MPI, no device, no clock; one thread.
 *
 *   scheduler.c          create, add, one plan from start to end
 *   scheduler_preempt.c  room for running sequences, who gives way, and where to
 *   scheduler_admit.c    who is next, and what it shares
 *   scheduler_found.c    how much of it can be found
 *   scheduler_fetch.c    what of that comes back from host memory and disk
 *   evicted_units.c      what is kept there
 *   fair_room.c          what a tenant below its share takes from others
 *   fair_step.c          what a tenant adds to a step
 *   scheduler_transfer.c what comes from a store of blocks, and goes there
 *   scheduler_chunk.c    how many tokens a prefill is given
 *   scheduler_write.c    the entries of a plan
 *   scheduler_prefix.c   what can be found after it
 *   block_events.c       who is told what can be found
 *   unconfirmed.c        what cannot be found yet, as it may not be finite
 *   scheduler_tokens.c   tokens that were drawn, and requests that end
 *   scheduler_drafts.c   several tokens of a sequence in a step
 *   scheduler_blocks.c   budget, blocks and quotas of the sequence at hand
 */
#ifndef CPA_SCHEDULER_H
#define CPA_SCHEDULER_H

#include <stdint.h>

#include <cpattn/engine.h>
#include <cpattn/owner_map.h>
#include <cpattn/status.h>

#include "src/cache/layer_groups.h"
#include "src/cache/prefix_cache.h"
#include "src/schedule/drafting.h"
#include "src/schedule/planner.h"
#include "src/schedule/step_plan.h"

/* Zero stands for a scheduler without the feature. */
typedef struct cpa_scheduler_options {
    cpa_owner_map map;
    int32_t block_size;
    cpa_layer_groups groups; /* at least one */
    int64_t max_num_batched_tokens;
    int32_t max_num_seqs;
    cpa_planner planner;
    cpa_token_at_fn token_at; /* tokens of prompts, and output tokens where they are not drawn; pure and thread-safe */
    void *token_ctx;

    int32_t prefix_caching;
    /* Units that are evicted stay in host memory, as far as no swapped sequence needs that, and on disk where groups have
     * disk_blocks, and are found there (evicted_units.h). With prefix_caching. */
    int32_t keep_evicted;
    int32_t confirms; /* whether what a step computes is finite is known when the second plan after it is made, and only
                         then its blocks can be found (unconfirmed.h); else they can in the next one */
    /* What keys and values depend on besides tokens, and the name of the model in stores of blocks (NULL: ""); read by
     * cpa_scheduler_create only. */
    const char *identity, *model;
    /* A hash of all layers whose rows go to stores of blocks: those that draft too, which `identity` leaves out. */
    uint64_t store_layers;
    cpa_preemption_mode preemption;
    double host_bandwidth; /* for CPA_PREEMPT_AUTO: bytes/s between host and device, of one rank */
    cpa_policy policy;
    double ageing_s;                /* waiting time, in s, that counts as one level of priority */
    int64_t long_prefill_threshold; /* most tokens of one prefill in a step */
    int32_t adaptive_chunks;        /* a prefill is cut to what blocks are free for (scheduler_chunk.h) */
    int64_t tenant_block_quota;     /* most blocks of one pool that the running sequences of a tenant hold */
    int64_t
        local_context; /* sequences of up to so many tokens are placed on one rank; 0: those that the planner prefers
                              there, CPA_LOCAL_CONTEXT_NONE: none */
    cpa_block_event_fn on_block_event; /* NULL: nobody is told what can be found */
    void *block_event_ctx;
    cpa_drafting_options drafting; /* with a drafter every token of a plan is reported before the next plan is made */
} cpa_scheduler_options;

typedef struct cpa_scheduler_request {
    uint64_t id; /* unique */
    int64_t prompt_tokens;
    int64_t output_tokens; /* >= 1 */
    double arrival;        /* seconds */
    int32_t priority;      /* lower runs first */
    /* Blocks are shared with requests of the same salt alone; NULL: ""; read by cpa_scheduler_add alone. */
    const char *salt;
    const char *tenant; /* for whom the request is made; NULL: the salt tells; read by cpa_scheduler_add alone */
    uint64_t group;     /* samples of one prompt have the same group; 0: none */
    int32_t draws;      /* not 0: output tokens are drawn, and reported (scheduler_tokens.h); 0: token_at gives them */
    cpa_plan_sampling sampling; /* how output tokens are drawn; its prompt_tokens and biases are not looked at */
    int32_t imports, exports; /* its prompt may come from the store of blocks, and goes there (scheduler_transfer.h) */
    const cpa_plan_bias *biases; /* [sampling.n_biases + sampling.n_ends]; not copied */
} cpa_scheduler_request;

/* Tokens of a request that its cache holds in the end: its last output token is never an input. */
static inline int64_t cpa_cached_tokens(int64_t prompt_tokens, int64_t output_tokens) {
    return prompt_tokens + output_tokens - 1;
}

typedef struct cpa_scheduler_stats {
    int64_t waiting; /* requests that do not run, arrived or not */
    int64_t running;
    int64_t tenants;  /* tenants with requests that have arrived and wait, or run */
    int64_t finished; /* requests planned to their last token */
    int64_t ended;    /* requests ended by cpa_scheduler_end before their last token was planned */
    int64_t preemptions;
    int64_t used_blocks[CPA_MAX_LAYER_GROUPS]; /* blocks of each group in use now, on the rank that has the most */
    int64_t peak_blocks[CPA_MAX_LAYER_GROUPS]; /* most blocks of each group that were ever in use on one rank */
    int64_t chunks[3][CPA_REASON_COUNT];       /* prefill and decode chunks by algorithm and reason */
    int64_t prefix_queries;          /* full blocks of the prompts of admitted requests, counted once a request */
    int64_t prefix_hits;             /* blocks of prefix_queries that were found */
    int64_t evictions;               /* blocks that could be found until their memory was needed */
    int64_t swapped_out, swapped_in; /* blocks */
    int64_t cow_copies;
    int64_t rank_local; /* admissions of sequences to one of several ranks */
    int64_t swap_failures;
    int64_t imported_tokens; /* prompt tokens that came from the store */
    int64_t import_failures; /* times that some of an import was not there, or damaged */
    /* With keep_evicted, blocks on all ranks: those that moved to host memory, and from there to disk; that came back to
     * the device, and from disk to host memory, of these also the ones that were damaged or not there; that an earlier
     * scheduler has left on disk; and those that can be found in host memory and on disk now. */
    int64_t kept_blocks, stored_blocks, fetched_blocks, loaded_blocks, damaged_blocks, restored_blocks;
    int64_t blocks_in_host, blocks_on_disk;
    /* With adaptive_chunks, for want of blocks: prefill chunks that are shorter, and requests that were not begun. */
    int64_t cut_chunks, held_back;
} cpa_scheduler_stats;

typedef struct cpa_scheduler cpa_scheduler;

/* The pools of a scheduler are those of the ranks, group by group: so many, */
static inline int32_t cpa_pools(const cpa_scheduler_options *options) {
    return options->groups.count * options->map.cp_size;
}

/* and of each the group and the rank. */
static inline const cpa_layer_group *cpa_pool_group(const cpa_scheduler_options *options, int32_t pool) {
    return &options->groups.list[pool / options->map.cp_size];
}

static inline int32_t cpa_pool_rank(const cpa_scheduler_options *options, int32_t pool) {
    return pool % options->map.cp_size;
}

cpa_status cpa_scheduler_create(const cpa_scheduler_options *options, cpa_scheduler **out, cpa_error *err);
void cpa_scheduler_destroy(cpa_scheduler *scheduler);

/* CPA_INVALID, with the numbers, if a length is not positive, or the whole sequence (see cpa_cached_tokens) cannot fit
 * the pools of any rank even alone. Reads what never changes: any thread may call it. */
cpa_status cpa_scheduler_check(const cpa_scheduler *scheduler, const cpa_scheduler_request *request, cpa_error *err);
/* Queues a request. CPA_INVALID as above, or if an unfinished request has the id. */
cpa_status cpa_scheduler_add(cpa_scheduler *scheduler, const cpa_scheduler_request *request, cpa_error *err);

/* Plans the step that begins at time `now` into `plan`, which is cleared first. Requests that arrive later are left
 * alone. A plan without chunks means that nothing can run before *next_arrival (infinity: nothing is left; releases may
 * still stand in the plan), or, where *next_arrival is `now`, that sequences are on their way from host memory and the
 * next plan is to be asked for at once. After CPA_NO_MEMORY the scheduler can only be destroyed. */
cpa_status cpa_scheduler_plan(cpa_scheduler *scheduler, double now, cpa_step_plan *plan, double *next_arrival,
                              cpa_error *err);

/* A unit that an earlier scheduler has left on disk: see evicted_units.h. */
typedef struct cpa_restored_unit {
    cpa_prefix_digest key;
    int32_t group;
    uint64_t used;        /* grows with the time of its last use */
    const int32_t *slots; /* [cp_size], -1 where a rank has no block of it */
} cpa_restored_unit;

/* What a swap_in of that request brought back is damaged. To be called before the second plan after the one with the
 * swap_in; the request is then computed again. CPA_INVALID if no unfinished request has the id. */
cpa_status cpa_scheduler_swap_failed(cpa_scheduler *scheduler, uint64_t request, cpa_error *err);

void cpa_scheduler_get_stats(const cpa_scheduler *scheduler, cpa_scheduler_stats *out);

#endif
