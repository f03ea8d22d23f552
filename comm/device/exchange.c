#include "comm/device/exchange.h"

#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>

#include "base/clock.h"
#include "comm/messages.h"

#define DEFAULT_TIMEOUT_S 60.0

/* ---- life ---- */

static cpa_status create_events(cpa_exchange *exchange, int32_t n_lanes, cpa_error *err) {
    exchange->done = calloc((size_t)n_lanes + 1, sizeof *exchange->done);
    if (!exchange->done) return cpa_fail(err, CPA_NO_MEMORY, "no memory for the events of an exchange");
    for (int32_t i = -1; i < n_lanes; i++) {
        cudaEvent_t *event = i < 0 ? &exchange->ready : &exchange->done[i];
        cudaError_t error = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
        CPA_TRY(cpa_runtime_check(error, "cudaEventCreateWithFlags", err));
    }
    return CPA_OK;
}

static void destroy_events(cpa_exchange *exchange, int32_t n_lanes) {
    for (int32_t i = 0; exchange->done && i < n_lanes; i++) {
        if (exchange->done[i]) cudaEventDestroy(exchange->done[i]);
    }
    free(exchange->done);
    if (exchange->ready) cudaEventDestroy(exchange->ready);
}

/* Lanes go before attention: what they do is short, or needs few multiprocessors. */
static cpa_status create_lanes(cpa_device_transport *t, int32_t n_lanes, cpa_error *err) {
    int least, greatest;
    CPA_TRY(cpa_runtime_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange",
                              err));
    t->lanes = calloc((size_t)n_lanes + 1, sizeof *t->lanes);
    if (!t->lanes) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %d lanes", n_lanes);
    for (; t->n_lanes < n_lanes; t->n_lanes++) {
        cudaError_t error = cudaStreamCreateWithPriority(&t->lanes[t->n_lanes], cudaStreamNonBlocking, greatest);
        CPA_TRY(cpa_runtime_check(error, "cudaStreamCreateWithPriority", err));
    }
    return CPA_OK;
}

cpa_status cpa_device_transport_open(cpa_device_transport *t, const cpa_transport_table *table,
                                     const cpa_device_ops *ops, cpa_control *control, int32_t n_lanes, cpa_error *err) {
    if (control->size > CPA_DEVICE_MAX_RANKS) {
        return cpa_fail(err, CPA_UNSUPPORTED, "%s: %d ranks, at most %d", table->name, control->size,
                        CPA_DEVICE_MAX_RANKS);
    }
    t->base.table = table;
    t->base.timeout_s = DEFAULT_TIMEOUT_S;
    t->ops = ops;
    t->control = control;
    cpa_status status;
    CPA_TRY(cpa_runtime_check(cudaGetDevice(&t->device), "cudaGetDevice", err));
    CPA_TRY(cpa_driver_find(&t->driver, err));
    CPA_TRY_GOTO(create_lanes(t, n_lanes, err), failed);
    CPA_TRY_GOTO(cpa_lane_counts_open(&t->counts, n_lanes, err), failed);
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        CPA_TRY_GOTO(create_events(&t->exchanges[i], n_lanes, err), failed);
    }
    return CPA_OK;

failed:
    cpa_device_transport_close(t);
    return status;
}

void cpa_device_transport_close(cpa_device_transport *t) {
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) destroy_events(&t->exchanges[i], t->n_lanes);
    cpa_lane_counts_close(&t->counts);
    for (int32_t i = 0; i < t->n_lanes; i++) cudaStreamDestroy(t->lanes[i]);
    free(t->lanes);
}

void cpa_device_transport_settle(cpa_device_transport *t) {
    for (int32_t i = 0; i < t->n_lanes && t->failure.status == CPA_OK; i++) {
        cpa_device_transport_drain(&t->base, t->lanes[i], NULL, NULL);
    }
}

/* ---- failure ---- */

static int is_idle(cudaStream_t stream) {
    return cudaStreamQuery(stream) != cudaErrorNotReady;
}

/* Aborts until the stream is idle, or for some seconds: it may wait for more than exchanges. */
static void abort_stream(cpa_device_transport *t, cudaStream_t stream) {
    enum { ABORT_S = 10 };
    double begin = cpa_clock_now();
    do {
        t->ops->abort(t);
    } while (!is_idle(stream) && cpa_clock_now() - begin < ABORT_S);
}

static void give_up(cpa_device_transport *t, const cpa_error *why) {
    t->failure = *why;
    for (int32_t i = 0; i < t->n_lanes; i++) abort_stream(t, t->lanes[i]);
}

static cpa_status failure(const cpa_device_transport *t, cpa_error *err) {
    if (t->failure.status == CPA_OK) return CPA_OK;
    return cpa_fail(err, t->failure.status, "%s", t->failure.message);
}

/* Which of the ranks that an exchange with all waits for are to blame: those that do not answer either. The others wait
 * as long as this one does, and give up at about the same time. */
static const char *name_missing(const cpa_device_transport *t, uint64_t awaited, char names[CPA_RANK_NAMES]) {
    enum { LISTEN_S = 1 };
    uint64_t silent = t->control->size > 2 ? cpa_control_missing_ranks(t->control, LISTEN_S) : awaited;
    uint64_t missing = silent & awaited ? silent & awaited : silent;
    return cpa_rank_names(missing ? missing : awaited, names);
}

static cpa_status check_progress(cpa_device_transport *t, cpa_error *err) {
    double stalled = cpa_lane_counts_stalled_s(&t->counts);
    if (stalled <= t->base.timeout_s) return CPA_OK;
    int64_t exchange;
    char names[CPA_RANK_NAMES];
    name_missing(t, cpa_lane_counts_awaited(&t->counts, &exchange), names);
    return cpa_fail(err, CPA_COMM, "rank %d: exchange %" PRId64 " has waited %.1f s for %s", t->control->rank, exchange,
                    stalled, names);
}

/* Of exchanges in graphs it is known only that they must be over when the stream is. */
static cpa_status check_graphs(const cpa_device_transport *t, double still_s, cpa_error *err) {
    char names[CPA_RANK_NAMES];
    if (!t->captured_peers || still_s <= t->base.timeout_s) return CPA_OK;
    return cpa_fail(err, CPA_COMM, "rank %d: a graph with exchanges has waited %.1f s for %s", t->control->rank,
                    still_s, name_missing(t, t->captured_peers, names));
}

/* Looks whether the exchanges move; still_s is for how long the caller has waited and seen nothing move. */
static cpa_status watch(cpa_device_transport *t, double still_s, cpa_error *err) {
    CPA_TRY(failure(t, err));
    cpa_error own;
    cpa_status status = t->ops->check ? t->ops->check(t, &own) : CPA_OK;
    if (status == CPA_OK) status = cpa_comm_check(t->control->comm, -1, &own);
    if (status == CPA_OK) status = check_progress(t, &own);
    if (status == CPA_OK) status = check_graphs(t, still_s, &own);
    if (status != CPA_OK) give_up(t, &own);
    return failure(t, err);
}

/* ---- one exchange ---- */

cpa_status cpa_lane_begin(cpa_device_transport *t, cpa_exchange *exchange, int32_t lane, cpa_error *err) {
    if (!exchange->ready_recorded) {
        CPA_TRY(cpa_runtime_check(cudaEventRecord(exchange->ready, exchange->stream), "cudaEventRecord", err));
        exchange->ready_recorded = 1;
    }
    return cpa_runtime_check(cudaStreamWaitEvent(t->lanes[lane], exchange->ready, 0), "cudaStreamWaitEvent", err);
}

static cpa_status record_done(cpa_device_transport *t, const cpa_exchange *exchange, int32_t lane, cpa_error *err) {
    return cpa_runtime_check(cudaEventRecord(exchange->done[lane], t->lanes[lane]), "cudaEventRecord", err);
}

cpa_status cpa_lane_end(cpa_device_transport *t, cpa_exchange *exchange, int32_t lane, uint64_t peers, cpa_mem_op *ops,
                        int n_ops, cpa_error *err) {
    exchange->lanes |= (uint64_t)1 << lane;
    if (exchange->captured) {
        /* What follows `done` would not belong to the graph, and a count would come again with each launch of it. */
        t->captured_peers |= peers;
        if (n_ops > 0) CPA_TRY(cpa_driver_enqueue(&t->driver, t->lanes[lane], ops, n_ops, err));
        return record_done(t, exchange, lane, err);
    }
    ops[n_ops++] = cpa_lane_counts_add(&t->counts, lane, exchange->number, peers);
    CPA_TRY(record_done(t, exchange, lane, err));
    return cpa_driver_enqueue(&t->driver, t->lanes[lane], ops, n_ops, err);
}

static cpa_exchange *free_exchange(cpa_device_transport *t) {
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        if (!t->exchanges[i].in_flight) return &t->exchanges[i];
    }
    return NULL;
}

static cpa_status begin(cpa_device_transport *t, cpa_exchange *exchange, cudaStream_t ready, cpa_error *err) {
    enum cudaStreamCaptureStatus capture;
    CPA_TRY(cpa_runtime_check(cudaSetDevice(t->device), "cudaSetDevice", err));
    CPA_TRY(cpa_runtime_check(cudaStreamIsCapturing(ready, &capture), "cudaStreamIsCapturing", err));
    exchange->stream = ready;
    exchange->ready_recorded = 0;
    exchange->captured = capture != cudaStreamCaptureStatusNone;
    exchange->number = t->started++;
    exchange->lanes = 0;
    return CPA_OK;
}

cpa_status cpa_device_transport_start(cpa_transport *transport, const cpa_message *msgs, int32_t n_msgs, void *ready,
                                      cpa_exchange **out, cpa_error *err) {
    cpa_device_transport *t = (cpa_device_transport *)transport;
    CPA_TRY(failure(t, err));
    CPA_TRY(cpa_messages_check(t->control, msgs, n_msgs, err));
    cpa_exchange *exchange = free_exchange(t);
    if (!exchange) {
        return cpa_fail(err, CPA_INVALID, "%d exchanges are in flight already; finish one first",
                        CPA_TRANSPORT_MAX_IN_FLIGHT);
    }
    /* A part of an exchange cannot be taken back: whatever fails from here on ends the transport. */
    cpa_error own;
    cpa_status status = begin(t, exchange, ready, &own);
    if (status == CPA_OK) status = t->ops->enqueue(t, exchange, msgs, n_msgs, &own);
    if (status != CPA_OK) {
        give_up(t, &own);
        return failure(t, err);
    }
    exchange->in_flight = 1;
    *out = exchange;
    return CPA_OK;
}

void cpa_device_transport_poll(cpa_transport *transport) {
    watch((cpa_device_transport *)transport, 0, NULL);
}

cpa_status cpa_device_transport_finish(cpa_transport *transport, cpa_exchange *exchange, void *waiter, double *waited_s,
                                       cpa_error *err) {
    cpa_device_transport *t = (cpa_device_transport *)transport;
    if (exchange < t->exchanges || exchange >= t->exchanges + CPA_TRANSPORT_MAX_IN_FLIGHT || !exchange->in_flight) {
        return cpa_fail(err, CPA_INVALID, "finish of an exchange that is not in flight");
    }
    exchange->in_flight = 0;
    if (waited_s) *waited_s = 0;
    CPA_TRY(failure(t, err));
    CPA_TRY(cpa_runtime_check(cudaSetDevice(t->device), "cudaSetDevice", err));
    for (int32_t lane = 0; lane < t->n_lanes; lane++) {
        if (!(exchange->lanes >> lane & 1)) continue;
        cudaError_t error = cudaStreamWaitEvent(waiter, exchange->done[lane], 0);
        CPA_TRY(cpa_runtime_check(error, "cudaStreamWaitEvent", err));
    }
    if (!t->ops->finish) return CPA_OK;
    cpa_error own;
    if (t->ops->finish(t, exchange, waiter, &own) != CPA_OK) give_up(t, &own);
    return failure(t, err);
}

cpa_status cpa_device_transport_drain(cpa_transport *transport, void *stream, const cpa_progress *beside,
                                      cpa_error *err) {
    cpa_device_transport *t = (cpa_device_transport *)transport;
    CPA_TRY(cpa_runtime_check(cudaSetDevice(t->device), "cudaSetDevice", err));
    double since = cpa_clock_now();
    for (uint32_t done = cpa_lane_counts_done(&t->counts), before = done;; before = done) {
        cudaError_t state = cudaStreamQuery(stream);
        done = cpa_lane_counts_done(&t->counts);
        if (done != before) since = cpa_clock_now();
        cpa_status status = watch(t, state == cudaSuccess ? 0 : cpa_clock_now() - since, err);
        if (status != CPA_OK) {
            abort_stream(t, stream);
            return status;
        }
        if (state != cudaErrorNotReady) return cpa_runtime_check(state, "cudaStreamQuery", err);
        if (beside) cpa_progress_idle(beside);
        sched_yield();
    }
}
