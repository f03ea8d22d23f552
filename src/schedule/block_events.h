/* Tells whoever wants to know which full units can be found (cpa_block_event). Part of the scheduler. */
#ifndef CPA_BLOCK_EVENTS_H
#define CPA_BLOCK_EVENTS_H

#include "src/schedule/scheduler_internal.h"

/* What a sequence has computed next can be found in a group. */
void cpa_block_events_stored(cpa_scheduler *s, const cpa_sequence *sequence, int32_t group);
/* What is found by that digest cannot be found any more; NULL: nothing is. */
void cpa_block_events_removed(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *digest);

#endif
