/* What the device transports share: the pool of exchanges, the streams that carry them, and the watch over them.
 *
 * A transport has lanes, streams on which its exchanges are done in order. Exchange n on a lane: wait for the event
 * `ready` of n, move the messages, record the event `done` of n for that lane. start enqueues all this, and finish
 * makes the caller's stream wait for the `done` events: the host waits for nothing that a device does. In capture all
 * this becomes part of the graph, whose launches are not counted: of them the watch knows only for how long nothing
 * moves in a drain.
 */
#ifndef CPA_COMM_EXCHANGE_H
#define CPA_COMM_EXCHANGE_H

#include "comm/comm.h"
#include "comm/device/driver.h"
#include "comm/device/lane_counts.h"

/* Sets of ranks and of lanes are the bits of a 64-bit word. */
#define CPA_DEVICE_MAX_RANKS 64

typedef struct cpa_device_transport cpa_device_transport;

/* The place of another rank among all others of `rank`. */
static inline int32_t cpa_other_index(int32_t rank, int32_t other) {
    return other < rank ? other : other - 1;
}

struct cpa_exchange {
    int in_flight;
    int captured;
    int64_t number;      /* how many were started before; the same on all ranks */
    cudaStream_t stream; /* the caller's: what it holds so far makes the buffers ready */
    uint64_t lanes;      /* a bit for each lane that the exchange uses */
    cudaEvent_t ready;   /* the caller's buffers are; recorded by the first lane that begins */
    int ready_recorded;
    cudaEvent_t *done; /* [n_lanes] */
};

/* What the transports differ in. */
typedef struct cpa_device_ops {
    /* Enqueues the messages of an exchange: between cpa_lane_begin and cpa_lane_end of each lane that it uses, or on
     * the caller's stream. */
    cpa_status (*enqueue)(cpa_device_transport *t, cpa_exchange *exchange, const cpa_message *msgs, int32_t n_msgs,
                          cpa_error *err);
    /* Enqueues on `waiter` what ends an exchange, beyond waiting for its lanes; may be NULL. */
    cpa_status (*finish)(cpa_device_transport *t, const cpa_exchange *exchange, cudaStream_t waiter, cpa_error *err);
    /* Fails if the transport has failed by itself; may be NULL. */
    cpa_status (*check)(cpa_device_transport *t, cpa_error *err);
    /* Makes the device end what waits for other ranks. Called again and again until it has. */
    void (*abort)(cpa_device_transport *t);
} cpa_device_ops;

/* The head of a device transport. */
struct cpa_device_transport {
    cpa_transport base;
    const cpa_device_ops *ops;
    cpa_control *control;
    int device; /* the current one of the thread that opened it */
    cpa_driver driver;
    int32_t n_lanes;
    cudaStream_t *lanes;
    int64_t started;
    cpa_exchange exchanges[CPA_TRANSPORT_MAX_IN_FLIGHT];
    cpa_lane_counts counts;  /* what is done on the lanes */
    uint64_t captured_peers; /* the ranks that captured exchanges wait for, whenever their graphs run */
    cpa_error failure;       /* why it gave up; CPA_OK while it works */
};

/* Fills the head; not collective. On failure nothing is left to close. */
cpa_status cpa_device_transport_open(cpa_device_transport *t, const cpa_transport_table *table,
                                     const cpa_device_ops *ops, cpa_control *control, int32_t n_lanes, cpa_error *err);
/* Waits until the lanes are idle, or gives them up. The first thing that a transport does when it closes. */
void cpa_device_transport_settle(cpa_device_transport *t);
/* Frees what open made. */
void cpa_device_transport_close(cpa_device_transport *t);

/* For ops->enqueue. `peers` has a bit for each rank that the lane waits for in this exchange. `ops` clean up behind the
 * exchange, out of the way of who waits for it, and have room for one more. */
cpa_status cpa_lane_begin(cpa_device_transport *t, cpa_exchange *exchange, int32_t lane, cpa_error *err);
cpa_status cpa_lane_end(cpa_device_transport *t, cpa_exchange *exchange, int32_t lane, uint64_t peers, cpa_mem_op *ops,
                        int n_ops, cpa_error *err);

/* Functions of the table. */
cpa_status cpa_device_transport_start(cpa_transport *transport, const cpa_message *msgs, int32_t n_msgs, void *ready,
                                      cpa_exchange **out, cpa_error *err);
void cpa_device_transport_poll(cpa_transport *transport);
cpa_status cpa_device_transport_finish(cpa_transport *transport, cpa_exchange *exchange, void *waiter, double *waited_s,
                                       cpa_error *err);
cpa_status cpa_device_transport_drain(cpa_transport *transport, void *stream, const cpa_progress *beside,
                                      cpa_error *err);

#endif
