/* Small messages, stored by kernels into the inbox of their receiver.
 *
 * Every rank keeps an inbox for every other: CPA_STORE_SLOTS slots, with room for CPA_STORE_BYTES. Exchange n uses
 * slot n modulo CPA_STORE_SLOTS, the same on all ranks. start enqueues one kernel on the caller's stream, which writes
 * the messages to all peers into their inboxes; finish one that takes the messages of all peers out into the caller's
 * buffers. So no rank needs an address of another's buffer, and a message leaves before its receiver has started the
 * exchange.
 *
 *     push:  wait until the peer has taken out what was in the slot before (`acked` equals `pushed`)
 *            store the message over NVLink; ++pushed; store it in the peer's `arrived`
 *     pull:  wait until `arrived` is `pulled` + 1; copy the message; ++pulled; store it in the peer's `acked`
 *
 * The counts live in device memory and the kernels advance them, so a captured exchange may be launched again and
 * again.
 *
 * No deadlock: a push waits only for the peer's pull of an earlier exchange with the same slot, which the peer has
 * enqueued at the latest before its own push of this one (an exchange that was not finished by then is taken out early,
 * on the stream that starts the new one); a pull waits only for the peer's push of the same exchange. The same holds
 * for the flags of messages in peer-mapped buffers.
 *
 * A rank also keeps a peer-mapped buffer for every other, in which that one's own kernels store a message (the
 * transport's `peer_buffer`). Of these start passes on that they are there, and finish waits for those of the peers; or
 * a kernel of the caller does (base/stored.cuh).
 *
 * A kernel that waits for long marks its flag `stalled` in host memory, where the transport's check times it; a flag
 * `abort` makes all of them end. */
#ifndef CPA_PEER_STORES_H
#define CPA_PEER_STORES_H

#include "comm/device/exchange.h"
#include "comm/peer/store_kernels.h"

/* The longest message that goes this way; where copy engines are as fast, which leave the stream to the caller. */
enum { CPA_STORE_BYTES = 1 << 20, CPA_STORE_SLOTS = CPA_TRANSPORT_MAX_IN_FLIGHT };

/* What the host knows of a slot. */
typedef struct cpa_store_slot {
    int64_t number; /* number of the last exchange in the slot */
    int open;       /* not 0: the exchange was started, and its messages are not taken out yet */
    int captured;
    int pushed;            /* not 0: the exchange sent messages */
    cudaStream_t ready;    /* stream on which the exchange was started */
    cpa_store_part *parts; /* [size - 1] to take out */
    int32_t n_parts;
    cpa_store_part *flags; /* [size - 1] messages that come into peer-mapped buffers */
    int32_t n_flags;
    cudaEvent_t done; /* behind the last use of the slot */
    int recorded;     /* not 0: `done` was recorded */
    int done_captured;
    cudaStream_t last; /* stream on which `done` was recorded */
} cpa_store_slot;

/* For how long a peer has been waited for in a slot. */
typedef struct cpa_store_wait {
    uint32_t mark; /* mark of the waiting kernel; 0: it does not wait */
    double since;
} cpa_store_wait;

typedef struct cpa_store_host cpa_store_host;

typedef struct cpa_stores {
    int32_t rank, size;
    int starts_early;      /* the device places a kernel before the one in front of it is over, where it may */
    char *own;             /* device: the cells, the inbox, the peer-mapped buffers */
    char **theirs;         /* [size] memory of the other ranks, laid out as `own`, mapped; NULL: not connected */
    cpa_store_host *host;  /* page-locked */
    cpa_store_wait *waits; /* [CPA_STORE_SLOTS, size, 2] */
    cpa_store_slot slots[CPA_STORE_SLOTS];
    const cpa_store_slot *newest; /* the slot whose kernels were enqueued last */
    cudaStream_t newest_stream;   /* the stream of those kernels */
} cpa_stores;

/* Device memory that a rank of a group of `size` needs, in bytes; to be zeroed. */
int64_t cpa_stores_bytes(int32_t size);
/* `own` is that memory and stays the caller's. On failure cpa_stores_close frees what was made. */
cpa_status cpa_stores_open(cpa_stores *stores, const cpa_control *control, void *own, cpa_error *err);
/* `theirs` is that of another rank, mapped. */
void cpa_stores_connect(cpa_stores *stores, int32_t peer, void *theirs);
void cpa_stores_close(cpa_stores *stores);

/* Where this rank's kernels may store a message for the peer, CPA_STORE_BYTES, and where the peer's do. */
void cpa_stores_peer_buffers(const cpa_stores *stores, int32_t peer, void **theirs, void **own);

/* Whether a message of so many bytes goes this way: both its ranks say the same. */
int cpa_stores_carry(int64_t bytes);
/* The messages of an exchange that go this way: enqueues the push on the exchange's stream, and the flag of messages
 * that lie in peer-mapped buffers. */
cpa_status cpa_stores_start(cpa_stores *stores, const cpa_exchange *exchange, const cpa_message *msgs, int32_t n_msgs,
                            cpa_error *err);
/* Enqueues the pull, and the wait for messages in peer-mapped buffers, on the native stream `waiter`. */
cpa_status cpa_stores_finish(cpa_stores *stores, const cpa_exchange *exchange, cudaStream_t waiter, cpa_error *err);
/* For an exchange in a graph: leaves the wait to the kernel that comes next on the stream of start, and what that waits
 * for in *out. Returns 0, and nothing has changed, if the exchange has messages to pull, too many in peer-mapped
 * buffers, or sent none. */
int cpa_stores_defer_wait(cpa_stores *stores, const cpa_exchange *exchange, cpa_store_batch *out);

/* CPA_COMM if a kernel has waited for longer than timeout_s, with the ranks that it waits for, or if a message was of
 * another size than expected. */
cpa_status cpa_stores_check(cpa_stores *stores, double timeout_s, cpa_error *err);
/* Ends all waiting, for good. */
void cpa_stores_abort(cpa_stores *stores);
/* Whether all that was enqueued outside of graphs is over. */
int cpa_stores_are_idle(cpa_stores *stores);
/* Whether all peers have taken out what this rank sent: from then on none of them writes to this rank's memory.
 * `stream` is one that waits for nothing. */
int cpa_stores_are_acked(const cpa_stores *stores, cudaStream_t stream);

#endif
