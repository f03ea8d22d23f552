/* Who is still there: a thread of each rank says so, over a TCP connection to rank 0, whatever the rank's other threads
 * do, and rank 0 tells all who is not.
 *
 * A rank is lost that has been silent for the time-out (stopped, or cut off), has ended, or gives up and says why. One
 * that leaves says so: it is lost only to those who wait for it. A rank that was stopped itself, together with others
 * perhaps, starts to count anew. */
#ifndef CPA_STORE_WATCH_H
#define CPA_STORE_WATCH_H

#include "comm/comm.h"

typedef struct cpa_watch cpa_watch;

/* What a rank says about itself to those that wait for it in one call of a channel, or in that and all later ones. */
typedef struct cpa_refusal {
    int32_t channel; /* a tag that names it; -1: all, whatever the call */
    int32_t and_later;
    int64_t call;
} cpa_refusal;

/* Collective, over messages of `control`. Ranks that rank 0 cannot be reached from are not watched; a line of the log
 * says so. Fails on no memory and the like, on all ranks. */
cpa_status cpa_watch_start(cpa_control *control, double timeout_s, cpa_watch **out, cpa_error *err);
/* Says that this rank leaves, and ends the thread. NULL does nothing. */
void cpa_watch_stop(cpa_watch *watch);
void cpa_watch_set_timeout(cpa_watch *watch, double seconds);

/* Tells the other ranks; takes a millisecond, and waits for nobody. */
void cpa_watch_refuse(cpa_watch *watch, const cpa_refusal *refusal, cpa_status status, const char *message);

/* Whether it is worth to call cpa_watch_check. Costs a load. */
int cpa_watch_has_news(const cpa_watch *watch);
/* Fails if a rank is lost to who waits in `call` of `channel` for `peer` (-1: for any). */
cpa_status cpa_watch_check(cpa_watch *watch, int32_t peer, int32_t channel, int64_t call, cpa_error *err);
/* This rank waits for `peer`, or for nobody, -1. When all ranks wait for far longer than the time-out, all are lost. */
void cpa_watch_note_wait(cpa_watch *watch, int32_t peer);

#endif
