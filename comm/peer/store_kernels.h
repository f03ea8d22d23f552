/* The kernels of comm/peer/stores.h. Host and device share what lies here. */
#ifndef CPA_PEER_STORE_KERNELS_H
#define CPA_PEER_STORE_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Messages of up to so many bytes travel in lines of 16 bytes: 4 of the message, the number of the message in the slot,
 * 4 of the message, that number again. A half is written at once, so a receiver that sees the number has the bytes; the
 * sender need not wait until they are there to say so. (The LL protocol of NCCL.) With longer ones the doubled bytes
 * take longer than that wait. */
enum { CPA_STORE_LINE_BYTES = 192 << 10 };

/* What a rank holds of one slot for one other rank, in device memory. Counts begin at 0 and wrap. */
typedef struct cpa_store_cell {
    uint64_t arrived; /* written by the other: (how many messages have come << 32) | bytes of the last. In lines, it
                         tells only the size. */
    uint32_t acked;   /* written by the other: how many of this rank's messages it has taken out */
    uint32_t pushed;  /* messages sent */
    uint32_t pulled;  /* messages taken out */
    uint32_t push_tickets, pull_tickets; /* CTAs that are done with their share of the message */
    uint32_t unused;                     /* a sector is 32 bytes */
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

/* The messages of one launch. */
enum { CPA_STORE_PARTS = 8 };
typedef struct cpa_store_batch {
    cpa_store_part parts[CPA_STORE_PARTS];
    int32_t n_parts;
    int32_t n_stored;      /* pass_words: the first so many parts lie at their receiver; the others are to come */
    int32_t starts_early;  /* it may be placed before the kernel in front of it is over */
    const uint32_t *abort; /* page-locked host memory: not 0: wait no longer */
    cpa_store_mismatch *mismatch;
} cpa_store_batch;

/* Loads the kernels: the first launch of one that is not loaded may wait for what runs on the device. */
cudaError_t cpa_store_load_kernels(void);
/* Waits until the receivers have taken out what was in the slot before, and writes. */
cudaError_t cpa_store_launch_push(const cpa_store_batch *batch, cudaStream_t stream);
/* Waits until the messages are there, and takes them out. */
cudaError_t cpa_store_launch_pull(const cpa_store_batch *batch, cudaStream_t stream);
/* Tells the receivers of messages that lie there, and waits until those of others are here. */
cudaError_t cpa_store_launch_words(const cpa_store_batch *batch, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
