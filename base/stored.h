/* Messages that kernels store in the memory of another device: what those who store them and those who wait for them
 * share; see comm/peer/stores.h. C and CUDA C++; base/stored.cuh has the waiting. */
#ifndef CPA_BASE_STORED_H
#define CPA_BASE_STORED_H

#include <stdint.h>

/* What a rank holds of one slot for one other rank, in device memory. Counts begin at 0 and wrap. */
typedef struct cpa_store_cell {
    uint64_t arrived; /* written by the other: (how many messages have come << 32) | bytes of the last. In lines, it
                         tells only the size. */
    /* Written by the other: how many of this rank's messages it has taken out, or seen in its peer-mapped buffer. */
    uint32_t acked;
    uint32_t pushed;       /* messages sent */
    uint32_t pulled;       /* messages taken out, or seen */
    uint32_t push_tickets; /* CTAs that are done with their share of the message */
    /* CTAs that have taken their share of the message out, or, in a peer-mapped buffer, know its number. */
    uint32_t pull_tickets;
    uint32_t unused; /* a sector is 32 bytes */
} cpa_store_cell;

/* A message of another size than the receiver expects: page-locked host memory. */
typedef struct cpa_store_mismatch {
    uint32_t peer; /* + 1; 0: there was none. Written last. */
    uint32_t expected, arrived;
} cpa_store_mismatch;

/* One message. A push takes it from the caller's buffer to the inbox of the receiver, a pull from the own inbox to the
 * caller's buffer. Of one that lies where it belongs neither is needed. */
typedef struct cpa_store_part {
    const char *from;
    char *to;
    cpa_store_cell *own;
    cpa_store_cell *theirs; /* mapped */
    uint32_t *stalled;      /* page-locked host memory: not 0 while the kernel has long been waiting for the peer */
    uint32_t bytes;
    uint32_t peer;
} cpa_store_part;

/* The messages of one launch, or of one wait. */
enum { CPA_STORE_PARTS = 8 };
typedef struct cpa_store_batch {
    cpa_store_part parts[CPA_STORE_PARTS];
    int32_t n_parts;
    int32_t starts_early;  /* not 0: the kernel may be placed before the one in front of it is over */
    const uint32_t *abort; /* page-locked host memory: not 0: wait no longer */
    cpa_store_mismatch *mismatch;
} cpa_store_batch;

#endif
