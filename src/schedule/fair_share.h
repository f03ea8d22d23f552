/* How tenants share running sequences and blocks. Each active one has a share: as many running sequences, and as many
 * blocks of each pool, as there are for one of them. What nobody else asks for may be used beyond that; but who
 * waits within the share of its tenant is admitted at the cost of tenants above theirs (fair_room.h), and a tenant above
 * its share preempts nobody of one that is not. With CPA_POLICY_FCFS the share is everything. */
#ifndef CPA_FAIR_SHARE_H
#define CPA_FAIR_SHARE_H

#include "src/schedule/scheduler_internal.h"

typedef struct cpa_fair_share {
    int64_t tenants; /* tenants that have a share */
    int64_t running; /* sequences of one tenant that may run */
} cpa_fair_share;

cpa_fair_share cpa_fair_share_of(const cpa_scheduler *s);
/* The blocks of a pool. */
int64_t cpa_fair_share_blocks(const cpa_scheduler *s, const cpa_fair_share *share, int32_t pool);

/* Whether others than this tenant are active, and it has less of everything than its share. */
int cpa_fair_is_below(const cpa_scheduler *s, const cpa_tenant *tenant);

/* Notes of each tenant whether it has more blocks than its share in some pool, that of running[taker] with those that
 * s->lacks says. */
void cpa_fair_note_blocks(cpa_scheduler *s, int32_t taker);
/* Whether running[taker] may preempt running[victim] by what was noted. The first of the running sequences may in any
 * case, so that it always advances. */
int cpa_fair_may_take(const cpa_scheduler *s, int32_t taker, int32_t victim);

#endif
