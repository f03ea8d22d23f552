/* Units of a waiting request that are not on the device any more come back from host memory and disk before it is
 * admitted (evicted_units.h): it is passed over until they can be found, as one that waits for what others compute.
 * Part of the scheduler. */
#ifndef CPA_SCHEDULER_FETCH_H
#define CPA_SCHEDULER_FETCH_H

#include "src/schedule/scheduler_internal.h"

/* How many units of the sequence could be found if some were fetched; `found`: there are none of these. */
int64_t cpa_fetch_units(cpa_scheduler *s, cpa_sequence *sequence, int64_t found);
/* Blocks of each pool that this takes, or that are to stay there meanwhile, in s->lacks. */
void cpa_fetch_count_blocks(cpa_scheduler *s, cpa_sequence *sequence, int64_t units);
/* Plans it, as far as host memory allows, with the blocks that there are. *coming: something is on its way,
 * or will be. */
cpa_status cpa_fetch_plan(cpa_scheduler *s, cpa_sequence *sequence, int64_t units, int *coming, cpa_error *err);

#endif
