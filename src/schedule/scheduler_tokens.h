/* What comes of the tokens that plans emit: which were drawn, and which end their request. Between plans; the thread
 * that plans. */
#ifndef CPA_SCHEDULER_TOKENS_H
#define CPA_SCHEDULER_TOKENS_H

#include "src/schedule/scheduler.h"

/* The next token of a request that a plan has emitted, one of those without CPA_CHUNK_FINISHES, is there, and counts.
 * To be called in the order of the tokens, before the second plan after the one that emits it; with drafts, before the
 * next one. A token more than the plan emits for certain accepts a draft; where that is the last of the request, it has
 * finished. Nothing happens for a request that has ended. */
cpa_status cpa_scheduler_report(cpa_scheduler *scheduler, uint64_t request, uint32_t token, cpa_error *err);

/* With drafting.is_told: the model expects that token behind the one of the request that was reported last. Nothing
 * happens for a request that has ended. */
void cpa_scheduler_guess(cpa_scheduler *scheduler, uint64_t request, uint32_t token);

/* Ends a request, whatever it does: waiting, running, in host memory, or with its last token planned and not there yet.
 * Its blocks are free with the next plan, which also says that what was emitted for it and not reported is not wanted.
 * *ended is 0 if there is no such request. */
cpa_status cpa_scheduler_end(cpa_scheduler *scheduler, uint64_t request, int *ended, cpa_error *err);

#endif
