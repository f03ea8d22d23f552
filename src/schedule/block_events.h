/* Tells whoever wants to know which full units can be found (cpa_block_event). Part of the scheduler. */
#ifndef CPA_BLOCK_EVENTS_H
#define CPA_BLOCK_EVENTS_H

#include "src/schedule/scheduler_internal.h"

/* Tokens [first, first + n) of a sequence, a full unit, can be found in a group by `key`; `parent` is that of what comes
 * before, if anything does. */
typedef struct cpa_stored_unit {
    int32_t group;
    cpa_prefix_digest key, parent;
    int64_t first, n;
} cpa_stored_unit;
void cpa_block_events_stored(const cpa_scheduler *s, const cpa_sequence *sequence, const cpa_stored_unit *unit);
/* What is found by that digest cannot be found any more; NULL: nothing is. */
void cpa_block_events_removed(const cpa_scheduler *s, int32_t group, const cpa_prefix_digest *digest);

#endif
