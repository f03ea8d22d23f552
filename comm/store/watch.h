/* Who is still there: a thread of each rank says so, over a TCP connection to rank 0, whatever the rank's other threads
 * do, and rank 0 tells all who is not.
 *
 * A rank is lost that has been silent for the time-out (stopped, or cut off), has ended, or gives up and says why. One
 * that leaves says so: it is lost only to those who wait for it. A rank that was stopped itself, together with others
 * perhaps, starts to count anew. */
#ifndef CPA_STORE_WATCH_H
#define CPA_STORE_WATCH_H

#include <cpattn/comm.h>

#include "comm/store/handshake.h"
#include "comm/store/works.h"

typedef struct cpa_watch cpa_watch;

/* What a rank says about itself to those that wait for it in one call of a channel, or in that and all later ones. */
typedef struct cpa_call_refusal {
    int32_t channel; /* a tag that names it; -1: all, whatever the call */
    int32_t and_later;
    int64_t call;
} cpa_call_refusal;

/* Calls of a channel that a rank waits in. */
typedef struct cpa_calls {
    int32_t channel; /* -1: none */
    int64_t first, last;
} cpa_calls;

/* What all ranks have to hear from rank 0: where it listens, and what makes their key one of this communicator. */
typedef struct cpa_watch_meeting {
    cpa_endpoint endpoint;
    unsigned char nonce[CPA_NONCE_BYTES];
} cpa_watch_meeting;

/* NULL without memory. */
cpa_watch *cpa_watch_create(int32_t rank, int32_t size, double timeout_s);
/* Rank 0: listens at `host`, NULL: at every address. *listener is -1, and *out without an address, where it cannot; the
 * caller closes it after cpa_watch_join. */
void cpa_watch_listen(const char *host, cpa_endpoint *out, int *listener);
/* Connects the ranks, which know `key`. Those that do not reach rank 0, which is at `meeting`, are not watched; a line of
 * the log says so. */
void cpa_watch_join(cpa_watch *watch, const cpa_endpoint *meeting, const cpa_job_key *key, int listener);
/* Starts the thread. */
cpa_status cpa_watch_start(cpa_watch *watch, cpa_error *err);
/* Says that this rank leaves, and ends the thread if it was started. NULL does nothing. */
void cpa_watch_stop(cpa_watch *watch);
void cpa_watch_set_timeout(cpa_watch *watch, double seconds);

/* Tells the other ranks; takes a millisecond, and waits for nobody. */
void cpa_watch_refuse(cpa_watch *watch, const cpa_call_refusal *refusal, cpa_status status, const char *message);

/* The rank that has said that it takes part in nothing any more, while this one has not; -1: none has. `why` gets the
 * line, unless it is NULL. Any thread may call it. */
int32_t cpa_watch_who_gave_up(cpa_watch *watch, cpa_error *why);

/* Whether it is worth to call cpa_watch_check. Costs a load. */
int cpa_watch_has_notice(const cpa_watch *watch);
/* Fails if a rank is lost to who waits in one of `calls` for `peer` (-1: for any). */
cpa_status cpa_watch_check(cpa_watch *watch, int32_t peer, cpa_calls calls, cpa_error *err);
/* This rank waits for `peer`, or for nobody, -1. When all ranks wait for far longer than the time-out, all are lost. */
void cpa_watch_note_wait(cpa_watch *watch, int32_t peer);
/* What this rank does. Where two ranks have waited for the time-out, and have done different things in the same call of
 * late, each is lost to the others: it `difference` the other, such as "reads another file than"; a literal. */
void cpa_watch_note_work(cpa_watch *watch, cpa_work work, const char *difference);

#endif
