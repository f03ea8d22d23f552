/* Who connects to a port where ranks are expected: all at once, so that strangers, silent or not, keep no rank waiting.
 * Each has CPA_HANDSHAKE_S in all to prove that it is of the job; where there are too many, who has said least goes
 * first, the oldest of these. */
#ifndef CPA_STORE_RECEPTION_H
#define CPA_STORE_RECEPTION_H

#include <stddef.h>

#include "comm/store/handshake.h"

enum { CPA_RECEPTION_MOST = 128, CPA_RECEPTION_LAST_BYTES = 160 };

/* Somebody who has connected and not yet proved anything. */
typedef struct cpa_visitor {
    int fd;
    double until;
    cpa_challenge challenge;
    size_t n_said; /* bytes of what follows that are here */
    struct {
        cpa_hello hello;
        cpa_proof proof;
    } said;
} cpa_visitor;

typedef struct cpa_reception {
    int listener;   /* the caller's */
    cpa_hello rank; /* the purpose, rank and number of ranks that a visitor has to name */
    cpa_job_key key;
    int32_t n;
    cpa_visitor visitors[CPA_RECEPTION_MOST]; /* in the order in which they came */
    int64_t turned_away;
    char last[CPA_RECEPTION_LAST_BYTES]; /* the last visitor that was turned away, and why */
} cpa_reception;

/* Rank `rank` of `size` takes callers for that purpose. */
void cpa_reception_open(int listener, cpa_purpose purpose, int32_t rank, int32_t size, const cpa_job_key *key,
                        cpa_reception *out);
/* The next who has proved that it is of the job: *fd, which is the caller's now, and what it has said about itself, whose
 * rank and size are still to be looked at. *fd is -1 if nobody has by the deadline. */
cpa_status cpa_reception_next(cpa_reception *reception, double deadline, int *fd, cpa_hello *who, cpa_error *err);
/* Sends everybody else away; a line of the log says how many strangers there were. */
void cpa_reception_close(cpa_reception *reception);

#endif
