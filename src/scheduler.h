/* The scheduler of rank 0: continuous batching with chunked prefill over the block pools of all ranks.
 *
 * A step has a budget of tokens and of sequences. Running sequences that decode come first, one token each, then
 * running prefills, then waiting requests, each in order of priority (lower first), then arrival, then id; prefill is
 * cut to what is left of the budget. A sequence takes blocks on each rank for the tokens it is given. When a rank has
 * too few, the running sequences of the lowest priority and the latest arrival that hold blocks there are preempted:
 * their blocks are freed, a chunk they already had in this step is withdrawn, and they go back to the waiting requests
 * with every token they have emitted, to be computed again. A sequence that would not get its blocks even so keeps what
 * it holds and waits for a later step. No request is admitted in a step that ran short of blocks, and none overtakes a
 * waiting one that goes before it. Nothing is lost: the first of the running sequences always advances, so every
 * request finishes.
 *
 * The scheduler assumes that a planned step will run: it may be asked for the next plan while one executes. A sequence
 * that finishes in a step gives its blocks back in the next plan. Pure logic: no MPI, no device, no clock; one thread.
 */
#ifndef CPA_SCHEDULER_H
#define CPA_SCHEDULER_H

#include <stdint.h>

#include <cpattn/owner_map.h>
#include <cpattn/status.h>

#include "src/planner.h"
#include "src/step_plan.h"

/* The token at a position of a request, prompt and output alike. Pure and thread-safe. */
typedef uint32_t (*cpa_token_fn)(void *ctx, uint64_t request, int64_t position);

typedef struct cpa_scheduler_options {
    cpa_owner_map map;
    int32_t block_size;
    int64_t num_blocks; /* of one rank */
    int64_t max_num_batched_tokens;
    int32_t max_num_seqs;
    cpa_planner planner;
    cpa_token_fn token_at;
    void *token_ctx;
} cpa_scheduler_options;

typedef struct cpa_scheduler_request {
    uint64_t id; /* unique */
    int64_t prompt_tokens;
    int64_t output_tokens; /* >= 1 */
    double arrival;        /* seconds */
    int32_t priority;      /* lower runs first */
} cpa_scheduler_request;

typedef struct cpa_scheduler_stats {
    int64_t waiting; /* requests without a slot, arrived or not */
    int64_t running;
    int64_t finished; /* planned to the last token */
    int64_t preemptions;
    int64_t peak_blocks;                 /* most blocks in use on one rank */
    int64_t chunks[3][CPA_REASON_COUNT]; /* prefill and decode chunks by algorithm and reason */
} cpa_scheduler_stats;

typedef struct cpa_scheduler cpa_scheduler;

cpa_status cpa_scheduler_create(const cpa_scheduler_options *options, cpa_scheduler **out, cpa_error *err);
void cpa_scheduler_destroy(cpa_scheduler *scheduler);

/* Queues a request. CPA_INVALID, with the numbers, if a length is not positive, an unfinished request has the id, or
 * the whole sequence (prompt_tokens + output_tokens - 1 tokens are cached) cannot fit the pools of any rank even alone.
 */
cpa_status cpa_scheduler_add(cpa_scheduler *scheduler, const cpa_scheduler_request *request, cpa_error *err);

/* Plans the step that begins at time `now` into `plan`, which is cleared first. Requests that arrive later are left
 * alone. A plan without chunks means that nothing can run before *next_arrival (infinity: nothing is left; releases may
 * still stand in the plan). After CPA_NO_MEMORY the scheduler can only be destroyed. */
cpa_status cpa_scheduler_plan(cpa_scheduler *scheduler, double now, cpa_step_plan *plan, double *next_arrival,
                              cpa_error *err);

void cpa_scheduler_get_stats(const cpa_scheduler *scheduler, cpa_scheduler_stats *out);

#endif
