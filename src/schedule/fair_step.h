/* What one tenant adds to a step. While others are about, a tenant that has many requests at once makes a step no longer
 * than a few times that of a few decoding sequences, by what steps cost here (step_cost.h): its sequences decode in turn,
 * and its prompts come in smaller chunks. So the first token of another tenant, which waits for the step in flight and
 * its own, does not wait for how many requests the one has. Others are about if they are active, or were so some seconds
 * ago. Where a sequence more costs little beside a step, as on a GPU, many decode in every step. With CPA_POLICY_FCFS
 * there are no bounds. */
#ifndef CPA_FAIR_STEP_H
#define CPA_FAIR_STEP_H

#include "src/schedule/scheduler_internal.h"

/* So many sequences are the few that a step is compared with. */
enum { CPA_FAIR_FEW = 12 };

/* Whether a tenant has more requests that run or wait than these: no other is bounded. */
int cpa_fair_has_many(const cpa_tenant *tenant);

/* A plan is begun at that time, and `newcomer`, a tenant without many or NULL, has a request that has just arrived:
 * what each tenant may add. For the newcomer's first token, those who were not served less add no more than one
 * sequence to this plan. */
void cpa_fair_step_begin(cpa_scheduler *s, double now, const cpa_tenant *newcomer);

/* Whether a sequence that decodes may do so in this plan; asked once of each that can, in the order of the running ones.
 * The first of these always may. */
int cpa_fair_step_has_turn(const cpa_scheduler *s, const cpa_sequence *sequence);
/* Most tokens of prompts that a tenant may still add; a block at least if it adds nothing else. */
int64_t cpa_fair_step_prompt_tokens(const cpa_scheduler *s, const cpa_tenant *tenant);
/* A sequence is given so many tokens. */
void cpa_fair_step_take(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens);

/* The plan is made. */
void cpa_fair_step_end(cpa_scheduler *s, double now);

#endif
