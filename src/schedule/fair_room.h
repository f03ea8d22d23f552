/* Room for who waits within the share of its tenant, at the cost of tenants above theirs. */
#ifndef CPA_FAIR_ROOM_H
#define CPA_FAIR_ROOM_H

#include "src/schedule/scheduler_internal.h"

/* Makes room for a waiting sequence: an index among running sequences, and `lacks` [cp_size] free blocks on each rank.
 * Where there is none, sequences of tenants above their share are preempted, if its own tenant is not above it even
 * then and they hold enough. *made: there is room. */
cpa_status cpa_fair_make_room(cpa_scheduler *s, const cpa_sequence *sequence, const int64_t *lacks, int *made,
                              cpa_error *err);

#endif
