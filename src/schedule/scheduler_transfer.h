/* What of a request's cache comes from a store of blocks, and what goes there (cpattn/blocks.h).
 *
 * A request that imports takes blocks for its prompt, but for the last token, when it is admitted and more of the prompt
 * could come from the store than can be found here, behind the full units that can; the plan says which blocks are to be filled, and the sequence is
 * given tokens in the second plan after, as one that comes back from host memory. What the store does not have, or what
 * is damaged, is heard of before that: the sequence goes back to the start, imports what is left in front of it, and if
 * that fails too, nothing. A request that exports does so once, in the plan with its first output token: the ranks put
 * its prompt into the store when the step is done. Part of the scheduler. */
#ifndef CPA_SCHEDULER_TRANSFER_H
#define CPA_SCHEDULER_TRANSFER_H

#include "src/schedule/scheduler_internal.h"

/* What is known of a sequence's parcels from its request on. CPA_INTERNAL without SHA-256. */
cpa_status cpa_transfer_begin(const cpa_scheduler *s, const cpa_scheduler_request *request, cpa_sequence *sequence,
                              cpa_error *err);
/* Tokens that a waiting sequence is to import where it goes on behind so many that can be found; 0: none. */
int64_t cpa_transfer_tokens(const cpa_sequence *sequence, int64_t found);
/* Blocks that an import of so many tokens needs in each pool beyond what the sequence shares, with that of the token
 * after, in s->lacks. */
void cpa_transfer_count_blocks(cpa_scheduler *s, const cpa_sequence *sequence, int64_t tokens);
/* Takes the blocks of that import, which there are, and plans it: of what comes behind the `computed` tokens. */
cpa_status cpa_transfer_plan_import(cpa_scheduler *s, cpa_sequence *sequence, int64_t tokens, cpa_error *err);
/* Plans the export of a sequence that has got its first output token in this plan, if it is to be exported. */
cpa_status cpa_transfer_plan_export(cpa_scheduler *s, cpa_sequence *sequence, cpa_error *err);

/* Of what a request was to import only the first `tokens` tokens have come. To be called before the second plan after
 * the one with the import. CPA_INVALID if no unfinished request has the id. */
cpa_status cpa_scheduler_import_failed(cpa_scheduler *s, uint64_t request, int64_t tokens, cpa_error *err);

#endif
