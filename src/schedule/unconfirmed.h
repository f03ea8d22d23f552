/* Blocks of the last steps, of which it is not known yet whether all that was computed in them is finite: nobody finds
 * them before, and if a request turns out not to be, nobody ever does. Only with options.confirms. */
#ifndef CPA_UNCONFIRMED_H
#define CPA_UNCONFIRMED_H

#include "src/schedule/scheduler_internal.h"

/* The block of a pool can be found by that key from now on, if what the step at hand computes is finite. */
cpa_status cpa_unconfirmed_note(cpa_scheduler *s, const cpa_prefix_digest *key, uint64_t request, int32_t pool,
                                int32_t block, cpa_error *err);
/* Whether what has that key in a group is to be waited for. */
int cpa_unconfirmed_has(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *key);
/* A plan begins: the steps up to two before it are known. */
void cpa_unconfirmed_settle(cpa_scheduler *s);
void cpa_unconfirmed_destroy(cpa_scheduler *s);

/* A request is not finite in a step that has run, reported before the second plan after that step: what it has computed
 * cannot be found any more. It is to be ended after this. */
void cpa_scheduler_forget_blocks(cpa_scheduler *s, uint64_t request);

#endif
