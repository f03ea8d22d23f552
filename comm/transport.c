/* The transport for host memory: messages of the communicator, whatever carries them.
 *
 * Every rank starts the same exchanges in the same order, and messages between two ranks keep theirs: one tag is
 * enough. */
#include <sched.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/comm.h"
#include "comm/messages.h"

/* One message in flight. */
typedef struct flight {
    cpa_comm_request *request;
    int32_t peer;
} flight;

struct cpa_exchange {
    int in_flight;
    int32_t n; /* sends and receives, of which the first are done */
    int32_t n_done;
    cpa_error error; /* why it failed, if it did */
    flight flights[2 * CPA_COMM_MAX_RANKS];
};

typedef struct host_transport {
    cpa_transport base;
    cpa_control *control;
    int32_t tag;
    cpa_exchange exchanges[CPA_TRANSPORT_MAX_IN_FLIGHT];
} host_transport;

static cpa_status transport_open(cpa_control *control, cpa_transport **out, cpa_error *err) {
    int32_t tag;
    CPA_TRY(cpa_comm_take_tags(control->comm, 1, &tag, err)); /* on every rank, whatever fails */
    host_transport *t = calloc(1, sizeof *t);
    if (!t) {
        cpa_comm_give_back_tags(control->comm, tag, 1);
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for a transport");
    }
    t->base.table = &cpa_transport_host;
    t->control = control;
    t->tag = tag;
    *out = &t->base;
    return CPA_OK;
}

/* Gives up what a failure left in flight: nothing is received into the caller's buffers from now on. */
static void abandon(const host_transport *t, cpa_exchange *exchange) {
    for (int32_t i = 0; i < exchange->n; i++) cpa_comm_cancel(t->control->comm, &exchange->flights[i].request);
    exchange->n = exchange->n_done = 0;
}

static void transport_close(cpa_transport *transport) {
    host_transport *t = (host_transport *)transport;
    if (!t) return;
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) abandon(t, &t->exchanges[i]);
    cpa_comm_give_back_tags(t->control->comm, t->tag, 1);
    free(t);
}

static cpa_status start_receive(const host_transport *t, cpa_exchange *exchange, const cpa_message *m, cpa_error *err) {
    flight *next = &exchange->flights[exchange->n];
    if (m->recv_bytes == 0) return CPA_OK;
    next->peer = m->peer;
    CPA_TRY(cpa_comm_start_receive(t->control->comm, m->peer, t->tag, m->recv, m->recv_bytes, &next->request, err));
    exchange->n++;
    return CPA_OK;
}

static cpa_status start_send(const host_transport *t, cpa_exchange *exchange, const cpa_message *m, cpa_error *err) {
    flight *next = &exchange->flights[exchange->n];
    if (m->send_bytes == 0) return CPA_OK;
    next->peer = m->peer;
    CPA_TRY(cpa_comm_start_send(t->control->comm, m->peer, t->tag, m->send, m->send_bytes, &next->request, err));
    exchange->n++;
    return CPA_OK;
}

static cpa_status transport_start(cpa_transport *transport, const cpa_message *msgs, int32_t n_msgs, void *ready,
                                  cpa_exchange **out, cpa_error *err) {
    (void)ready;
    host_transport *t = (host_transport *)transport;
    CPA_TRY(cpa_messages_check(t->control, msgs, n_msgs, err));
    int slot = 0;
    while (slot < CPA_TRANSPORT_MAX_IN_FLIGHT && t->exchanges[slot].in_flight) slot++;
    if (slot == CPA_TRANSPORT_MAX_IN_FLIGHT) {
        return cpa_fail(err, CPA_INVALID, "%d exchanges are in flight already; finish one first",
                        CPA_TRANSPORT_MAX_IN_FLIGHT);
    }
    cpa_exchange *exchange = &t->exchanges[slot];
    exchange->in_flight = 1;
    exchange->n = exchange->n_done = 0;
    exchange->error = (cpa_error){.status = CPA_OK};
    /* Receives first, so that no message arrives unexpected and is copied twice. A failure shows at finish: the
     * messages posted before it are still in flight. */
    cpa_error *failure = &exchange->error;
    for (int32_t i = 0; i < n_msgs && failure->status == CPA_OK; i++) start_receive(t, exchange, &msgs[i], failure);
    for (int32_t i = 0; i < n_msgs && failure->status == CPA_OK; i++) start_send(t, exchange, &msgs[i], failure);
    *out = exchange;
    return CPA_OK;
}

/* Whether all messages are done, or one has failed. */
static int is_over(const host_transport *t, cpa_exchange *exchange) {
    while (exchange->n_done < exchange->n && exchange->error.status == CPA_OK) {
        int done = 0;
        cpa_comm_test(t->control->comm, &exchange->flights[exchange->n_done].request, &done, &exchange->error);
        if (!done) break;
        exchange->n_done++;
    }
    return exchange->n_done == exchange->n || exchange->error.status != CPA_OK;
}

static void transport_poll(cpa_transport *transport) {
    host_transport *t = (host_transport *)transport;
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        if (t->exchanges[i].in_flight) is_over(t, &t->exchanges[i]);
    }
}

static cpa_status transport_finish(cpa_transport *transport, cpa_exchange *exchange, void *waiter, double *waited_s,
                                   cpa_error *err) {
    (void)waiter;
    host_transport *t = (host_transport *)transport;
    if (exchange < t->exchanges || exchange >= t->exchanges + CPA_TRANSPORT_MAX_IN_FLIGHT || !exchange->in_flight) {
        return cpa_fail(err, CPA_INVALID, "finish of an exchange that is not in flight");
    }
    const double begin = cpa_clock_now();
    while (!is_over(t, exchange)) {
        flight *awaited = &exchange->flights[exchange->n_done];
        cpa_comm_wait(t->control->comm, &awaited->request, awaited->peer, &exchange->error);
    }
    exchange->in_flight = 0;
    if (waited_s) *waited_s = cpa_clock_now() - begin;
    if (exchange->error.status == CPA_OK) return CPA_OK;
    abandon(t, exchange);
    return cpa_fail(err, exchange->error.status, "%s", exchange->error.message);
}

const cpa_transport_table cpa_transport_host = {
    .name = "host",
    .open = transport_open,
    .close = transport_close,
    .start = transport_start,
    .poll = transport_poll,
    .finish = transport_finish,
};
