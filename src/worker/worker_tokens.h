/* The way of tokens from one step to the next: each rank draws the tokens of its emissions, all ranks get them, and the
 * rows of the next step take theirs, without a detour over the host. The host has them when the step is done. */
#ifndef CPA_WORKER_TOKENS_H
#define CPA_WORKER_TOKENS_H

#include "src/worker/worker.h"

/* Where this rank draws its tokens of the step that is prepared: all of them, where rows are replicated. */
cpa_drawn *cpa_worker_own_tokens(const cpa_worker *worker);
/* And what its logits say of them. */
cpa_token_ranks *cpa_worker_own_ranks(const cpa_worker *worker);
/* And what the layers that draft expect behind them. */
uint32_t *cpa_worker_own_guesses(const cpa_worker *worker);
/* Enqueue, captured with the layers: the tokens that the step goes on with; with layers that draft, those that follow
 * its rows, of which this rank has drawn some; and the exchange of what the step draws. */
cpa_status cpa_worker_take_tokens(cpa_worker *worker);
cpa_status cpa_worker_take_next_tokens(cpa_worker *worker);
cpa_status cpa_worker_share_tokens(cpa_worker *worker, cpa_error *err);

/* Enqueues the copy of what the step draws to the host, and with drafts of what each row adds to the digest, */
cpa_status cpa_worker_fetch_tokens(cpa_worker *worker);
/* and when the step is done, gives the sequences their tokens. */
void cpa_worker_keep_tokens(cpa_worker *worker);
/* What the step that ran last has yielded; `emission` counts what the chunks of its plan emit. On every rank. */
cpa_drawn cpa_worker_drawn(const cpa_worker *worker, int64_t emission);
/* Likewise, also of the scored rows behind the emissions; NULL: nobody has asked for it. */
const cpa_token_ranks *cpa_worker_ranks(const cpa_worker *worker, int64_t emission);

/* What layers that draft expect behind the token of an emission; of a model that has such layers. */
uint32_t cpa_worker_guess(const cpa_worker *worker, int64_t emission);

/* Takes the tokens that a plan discards, all of the step before, out of the digest: enqueues the copy of what they
 * added to it, unless that is here, before the rows of the plan come to the device. */
cpa_status cpa_worker_discard_tokens(cpa_worker *worker, const cpa_step_plan *plan, cpa_error *err);
/* The stream is idle: what was copied is there. */
void cpa_worker_settle_discards(cpa_worker *worker);

#endif
