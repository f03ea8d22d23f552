/* What the sequence that is being scheduled may be given: tokens of the budget, and blocks of the ranks. */
#ifndef CPA_SCHEDULER_BLOCKS_H
#define CPA_SCHEDULER_BLOCKS_H

#include "src/schedule/scheduler_internal.h"

/* So many more blocks can be pinned without failing; 0 without memory. */
int cpa_scheduler_reserve_pins(cpa_scheduler *s, int64_t n);
/* Keeps a block that the plan reads from being handed out before the next plan; the caller's ownership passes over. */
cpa_status cpa_scheduler_pin(cpa_scheduler *s, cpa_block_pool *pool, int32_t block, cpa_error *err);
/* The blocks that the last plan read may be handed out again. */
cpa_status cpa_scheduler_unpin_all(cpa_scheduler *s, cpa_error *err);
/* What is found in a block of a pool is found no more; the blocks that it was found with go together, so none of them
 * is kept. Returns how many these were. */
int64_t cpa_scheduler_unfind(cpa_scheduler *s, int32_t pool, int32_t block);
/* The tokens a sequence may be given now. */
int64_t cpa_scheduler_next_tokens(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Takes the blocks that s->lacks says. */
void cpa_scheduler_take_lacking(cpa_scheduler *s, cpa_sequence *sequence);
/* The same, and gives the sequence `tokens` more tokens in this plan. */
void cpa_scheduler_place(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens);
/* Sets s->lacks for the first `tokens` tokens of a sequence; whether the pools have that. */
int cpa_scheduler_has_room(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens);
/* What plans the chunks of a sequence: it exchanges nothing if it lies on one rank. */
cpa_planner cpa_scheduler_planner(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Whether the tenant may hold what s->lacks says besides what it holds. */
int cpa_scheduler_within_quota(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Adds the blocks in the tables of a sequence to those of its tenant, or (sign -1) takes them away. */
void cpa_scheduler_charge(const cpa_sequence *sequence, int32_t n_pools, int sign);

#endif
