/* The contract of communication between the ranks of one context-parallel group.
 *
 * Everything goes over a communicator (cpattn/comm.h), which mpi/ or store/ carries. On it there are two kinds of
 * channels. A control channel carries small host buffers: plans, verdicts, reports. A transport carries tensors in
 * pairwise exchanges; transport.c fills the table for host memory, nccl/ and peer/ for device memory
 * (comm/device_transport.h). */
#ifndef CPA_COMM_H
#define CPA_COMM_H

#include <stdint.h>

#include <cpattn/comm.h>

#include "base/progress.h"
#include "base/stored.h"
#include "comm/communicator.h"

/* A control channel. All calls but cpa_control_missing_ranks are collective and block; used by one thread. */
typedef struct cpa_control {
    cpa_comm *comm;
    int32_t rank;
    int32_t size;
    int32_t tag;        /* the first of its tags */
    int32_t channel;    /* how many were opened on the communicator before: what refusals name it by */
    uint64_t here;      /* a bit for each rank of this host, once find_host has found them */
    int32_t ranks_here; /* ranks of this host, once they are found */
    int32_t rank_here;  /* ranks of this host that come before this one */
    /* Of cpa_control_missing_ranks: messages from and to each rank. */
    cpa_comm_request *present[CPA_COMM_MAX_RANKS];
    cpa_comm_request *notified[CPA_COMM_MAX_RANKS];
} cpa_control;

/* The tags of a channel, counted from its first. */
enum {
    CPA_CONTROL_TAG_COLLECTIVE = 0,
    CPA_CONTROL_TAG_MAILBOX,
    CPA_CONTROL_TAG_PRESENT,
    CPA_CONTROL_TAG_REPORT,
    CPA_CONTROL_TAG_PLAN, /* of src/context */
    CPA_CONTROL_TAGS
};

/* Collective, without a message: every rank opens its channels on `comm`, which must outlive them, in the same order.
 * Fails only if there is no communicator, or too much is open on it. */
cpa_status cpa_control_open(cpa_comm *comm, cpa_control *out, cpa_error *err);
/* Does nothing to a channel of zeros. */
void cpa_control_close(cpa_control *control);
cpa_status cpa_control_bcast(cpa_control *control, void *data, int64_t bytes, int32_t root, cpa_error *err);
/* The element-wise maximum / sum over the ranks, in place, on every rank. */
cpa_status cpa_control_max(cpa_control *control, double *values, int32_t n, cpa_error *err);
cpa_status cpa_control_sum(cpa_control *control, double *values, int32_t n, cpa_error *err);
/* The sum modulo 2^64 over the ranks, in place, on every rank. */
cpa_status cpa_control_sum_u64(cpa_control *control, uint64_t *values, int32_t n, cpa_error *err);
/* Every rank's `bytes` bytes, in rank order, at `all` ([size * bytes]). */
cpa_status cpa_control_all_gather(cpa_control *control, const void *mine, int64_t bytes, void *all, cpa_error *err);
/* Every rank's `bytes` bytes, in rank order, at `all` on root ([size * bytes]; ignored elsewhere). */
cpa_status cpa_control_gather(cpa_control *control, const void *mine, int64_t bytes, void *all, int32_t root,
                              cpa_error *err);
/* Finds out which ranks are on the host of this one: sets here, ranks_here and rank_here. */
cpa_status cpa_control_find_host(cpa_control *control, cpa_error *err);
static inline int cpa_control_is_here(const cpa_control *control, int32_t rank) {
    return (int)(control->here >> rank & 1);
}
/* Sends send_bytes[r] bytes to each rank r, one after another from `send`, and receives recv_bytes[r] from each into
 * `recv`. Arrays of `size`; each sum at most INT_MAX. */
cpa_status cpa_control_exchange(cpa_control *control, const void *send, const int64_t *send_bytes, void *recv,
                                const int64_t *recv_bytes, cpa_error *err);
/* Something that every rank must be given alike. */
typedef struct cpa_named_value {
    const char *name;
    double value;
} cpa_named_value;
enum { CPA_SAME_MOST = 64 };
/* CPA_INVALID, on every rank alike, with the name, the values and the ranks, unless all ranks give the same bits. At
 * most CPA_SAME_MOST values, in the same order on every rank. */
cpa_status cpa_control_same(cpa_control *control, const char *what, const cpa_named_value *values, int32_t n,
                            cpa_error *err);
/* Makes one failure known to all: if any rank's status is not CPA_OK, every rank returns the status of the lowest such
 * rank, and its message, prefixed with "rank R: ", in err. */
cpa_status cpa_control_agree(cpa_control *control, cpa_status mine, cpa_error *err);
/* Where ranks no longer move together: tells every other rank that this one is here, and listens to them for so long.
 * Returns a bit for each rank that was not heard; at most 64 ranks. Waits for nobody beyond that. */
uint64_t cpa_control_missing_ranks(cpa_control *control, double seconds);
/* Where a rank failed: whether all ranks did and come here, found out in five seconds at most. */
int cpa_control_all_failed(cpa_control *control);

/* Messages from rank 0 to all other ranks, one after another, that travel on the control channel while the ranks do
 * something else. No call but those that say so waits for another rank; used by the thread of the channel. */
typedef struct cpa_mailbox cpa_mailbox;
/* What a message may have; a rank that is told of more has been told nonsense. */
#define CPA_MAILBOX_MOST_BYTES ((int64_t)1 << 30)
/* `control` must outlive it. Not collective. */
cpa_status cpa_mailbox_open(cpa_control *control, cpa_mailbox **out, cpa_error *err);
/* Gives up what is under way, after a second at the latest. */
void cpa_mailbox_close(cpa_mailbox *mailbox);
/* Rank 0: whether all ranks have received what was sent last, so that the next may be sent; moves it along. `wait`:
 * waits until they have. */
cpa_status cpa_mailbox_flush(cpa_mailbox *mailbox, int wait, int *flushed, cpa_error *err);
/* Rank 0, flushed: starts sending a copy. bytes < 0 travels too: there is no message, for a reason that the caller
 * knows. */
cpa_status cpa_mailbox_send(cpa_mailbox *mailbox, const void *data, int64_t bytes, cpa_error *err);
/* Other ranks: the next message once all of it is there, valid until the next call; *data is NULL before, and for a
 * message without bytes. `wait`: waits for it. *arrived says whether it is there. */
cpa_status cpa_mailbox_receive(cpa_mailbox *mailbox, int wait, int *arrived, const void **data, int64_t *bytes,
                               cpa_error *err);

/* Reports from all other ranks to rank 0, one of each after another, that travel on the control channel while the ranks
 * do something else; used by the thread of the channel. */
typedef struct cpa_reports cpa_reports;
/* `control` must outlive them. Not collective. */
cpa_status cpa_reports_open(cpa_control *control, cpa_reports **out, cpa_error *err);
/* Gives up what is under way, after a second at the latest. */
void cpa_reports_close(cpa_reports *reports);
/* Other ranks: starts sending a copy of this rank's next report, of 0 or more bytes; waits until the one before is on
 * its way. */
cpa_status cpa_reports_send(cpa_reports *reports, const void *data, int64_t bytes, cpa_error *err);
/* Rank 0: *arrived says whether the next report of every other rank is there; `wait`: waits for them. */
cpa_status cpa_reports_receive(cpa_reports *reports, int wait, int *arrived, cpa_error *err);
/* Rank 0: what that rank has reported, once it has arrived; valid until the next call that receives. */
const void *cpa_reports_of(const cpa_reports *reports, int32_t rank, int64_t *bytes);

/* What one rank sends to and receives from one peer in an exchange. Zero bytes in a direction: no message there. */
typedef struct cpa_message {
    int32_t peer;
    const void *send;
    int64_t send_bytes;
    void *recv;
    int64_t recv_bytes;
} cpa_message;

typedef struct cpa_transport_table cpa_transport_table;

/* The head of every transport. */
typedef struct cpa_transport {
    const cpa_transport_table *table;
    /* Device transports: how long exchanges may stand still before the transport gives up; open sets 60, and the owner
     * may change it between calls. */
    double timeout_s;
} cpa_transport;

/* An exchange in flight; owned by the transport, valid until finished or handed over. */
typedef struct cpa_exchange cpa_exchange;

/* How many exchanges may be in flight on one transport. */
#define CPA_TRANSPORT_MAX_IN_FLIGHT 8

struct cpa_transport_table {
    const char *name;

    /* Collective. `control` must outlive the transport. */
    cpa_status (*open)(cpa_control *control, cpa_transport **out, cpa_error *err);
    void (*close)(cpa_transport *transport);

    /* Starts one exchange and returns without waiting. Every rank starts the same exchanges in the same order, even one
     * in which it has no message; what a sends to b has the size that b expects from a. At most one message a peer.
     * `ready` is the native handle of the device stream whose work so far produces the send buffers and is the last to
     * use the receive buffers (NULL on the host). Buffers belong to the exchange until it is finished. `msgs` is
     * copied. */
    cpa_status (*start)(cpa_transport *transport, const cpa_message *msgs, int32_t n_msgs, void *ready,
                        cpa_exchange **out, cpa_error *err);
    /* Moves messages along, without waiting. On a device, where they move by themselves, it looks for failures. */
    void (*poll)(cpa_transport *transport);
    /* Ends an exchange: work enqueued on the native stream `waiter` from now on sees what was received and may
     * overwrite what was sent. On the host it blocks until that is so; device transports do not block. Returns in
     * *waited_s the seconds it blocked. */
    cpa_status (*finish)(cpa_transport *transport, cpa_exchange *exchange, void *waiter, double *waited_s,
                         cpa_error *err);
    /* Device transports, where kernels of this rank can store a message for `peer` themselves: *theirs is where, *own
     * where the peer stores its messages for this rank, *bytes how long each is; the same as long as the transport is
     * open. Such a message has been stored by the work enqueued so far when its exchange starts, with `send` in *theirs
     * at its sender and `recv` in *own at its receiver: nothing moves any more, and once the exchange is finished, or
     * await_stored has returned, it can be read. Before a rank stores one it must have received a message that the peer
     * sent after it had read the one before. NULL: no such buffers, and no defer_wait. */
    void (*peer_buffer)(cpa_transport *transport, int32_t peer, void **theirs, void **own, int64_t *bytes);
    /* Transports with peer-mapped buffers, for an exchange in a graph whose messages to this rank all come into such:
     * in the place of finish, leaves the wait for them to the kernel that the caller enqueues next on the stream of
     * start, which calls await_stored (base/stored.cuh) on *out. That one spins with all its CTAs: a device runs one
     * such graph at a time. Returns 0 where it cannot be: the exchange is still to be finished. */
    int (*defer_wait)(cpa_transport *transport, cpa_exchange *exchange, cpa_store_batch *out);
    /* Device transports: blocks until the native stream is idle. Where a stream waits for exchanges, call this instead
     * of synchronising it: when they have not moved for timeout_s, or fail, this gives them up, so that the stream can
     * end, and returns CPA_COMM with the ranks that were waited for. From then on the transport only fails with that
     * message; close it. While it waits it has what `beside` has for idle times; NULL: nothing. NULL where finish
     * blocks. */
    cpa_status (*drain)(cpa_transport *transport, void *stream, const cpa_progress *beside, cpa_error *err);
};

/* Host memory over messages of the communicator. */
extern const cpa_transport_table cpa_transport_host;

#endif
