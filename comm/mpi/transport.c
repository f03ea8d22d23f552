/* The transport for host memory: non-blocking MPI point-to-point messages.
 *
 * The n-th exchange of every rank is the same one, so its number, modulo the tags that MPI guarantees, is the tag.
 * Pieces of a long message share the tag: MPI keeps the order of the messages of one pair. */
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>

#include "base/clock.h"
#include "comm/comm.h"
#include "comm/messages.h"
#include "comm/mpi/mpi_error.h"

#define TAGS 32768 /* 0 .. the least MPI_TAG_UB that the standard allows */

struct cpa_exchange {
    int in_flight;
    int done;
    cpa_error error; /* why it failed, if it did */
    MPI_Request *requests;
    MPI_Status *statuses;
    int *recv_counts; /* bytes expected by a receive, -1 for a send */
    int n_requests, capacity;
};

typedef struct mpi_transport {
    cpa_transport base;
    MPI_Comm comm;
    int32_t rank, size;
    int64_t started;
    cpa_exchange exchanges[CPA_TRANSPORT_MAX_IN_FLIGHT];
} mpi_transport;

static cpa_status transport_open(cpa_control *control, cpa_transport **out, cpa_error *err) {
    mpi_transport *t = calloc(1, sizeof *t);
    if (!t) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a transport");
    cpa_status status = cpa_mpi_dup(control->comm, &t->comm, err);
    if (status != CPA_OK) {
        free(t);
        return status;
    }
    t->base.table = &cpa_transport_mpi;
    t->rank = control->rank;
    t->size = control->size;
    *out = &t->base;
    return CPA_OK;
}

/* Gives up what a failure left in flight: nothing is received into the caller's buffers from now on. */
static void abandon(cpa_exchange *exchange) {
    for (int i = 0; i < exchange->n_requests; i++) {
        MPI_Request *request = &exchange->requests[i];
        if (*request == MPI_REQUEST_NULL) continue;
        if (exchange->recv_counts[i] < 0) {
            MPI_Request_free(request);
        } else {
            MPI_Cancel(request);
            MPI_Wait(request, MPI_STATUS_IGNORE);
        }
    }
}

static void transport_close(cpa_transport *transport) {
    mpi_transport *t = (mpi_transport *)transport;
    if (!t) return;
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        abandon(&t->exchanges[i]);
        free(t->exchanges[i].requests);
        free(t->exchanges[i].statuses);
        free(t->exchanges[i].recv_counts);
    }
    MPI_Comm_free(&t->comm);
    free(t);
}

static int64_t pieces(int64_t bytes) {
    return (bytes + CPA_MPI_PIECE_BYTES - 1) / CPA_MPI_PIECE_BYTES;
}

static cpa_status reserve(cpa_exchange *exchange, int64_t n, cpa_error *err) {
    if (n <= exchange->capacity) return CPA_OK;
    MPI_Request *requests = realloc(exchange->requests, (size_t)n * sizeof *requests);
    if (requests) exchange->requests = requests;
    MPI_Status *statuses = realloc(exchange->statuses, (size_t)n * sizeof *statuses);
    if (statuses) exchange->statuses = statuses;
    int *counts = realloc(exchange->recv_counts, (size_t)n * sizeof *counts);
    if (counts) exchange->recv_counts = counts;
    if (!requests || !statuses || !counts) {
        return cpa_fail(err, CPA_NO_MEMORY, "no memory for %" PRId64 " messages of an exchange", n);
    }
    exchange->capacity = (int)n;
    return CPA_OK;
}

static cpa_status post_receives(mpi_transport *t, cpa_exchange *exchange, const cpa_message *m, int tag,
                                cpa_error *err) {
    for (int64_t at = 0; at < m->recv_bytes; at += CPA_MPI_PIECE_BYTES) {
        int64_t left = m->recv_bytes - at;
        int count = (int)(left < CPA_MPI_PIECE_BYTES ? left : CPA_MPI_PIECE_BYTES);
        MPI_Request *request = &exchange->requests[exchange->n_requests];
        int code = MPI_Irecv((char *)m->recv + at, count, MPI_BYTE, m->peer, tag, t->comm, request);
        CPA_TRY(cpa_mpi_check(code, "MPI_Irecv", err));
        exchange->recv_counts[exchange->n_requests++] = count;
    }
    return CPA_OK;
}

static cpa_status post_sends(mpi_transport *t, cpa_exchange *exchange, const cpa_message *m, int tag, cpa_error *err) {
    for (int64_t at = 0; at < m->send_bytes; at += CPA_MPI_PIECE_BYTES) {
        int64_t left = m->send_bytes - at;
        int count = (int)(left < CPA_MPI_PIECE_BYTES ? left : CPA_MPI_PIECE_BYTES);
        MPI_Request *request = &exchange->requests[exchange->n_requests];
        int code = MPI_Isend((const char *)m->send + at, count, MPI_BYTE, m->peer, tag, t->comm, request);
        CPA_TRY(cpa_mpi_check(code, "MPI_Isend", err));
        exchange->recv_counts[exchange->n_requests++] = -1;
    }
    return CPA_OK;
}

static cpa_status transport_start(cpa_transport *transport, const cpa_message *msgs, int32_t n_msgs, void *ready,
                                  cpa_exchange **out, cpa_error *err) {
    (void)ready;
    mpi_transport *t = (mpi_transport *)transport;
    const cpa_control group = {.rank = t->rank, .size = t->size};
    CPA_TRY(cpa_messages_check(&group, msgs, n_msgs, err));
    int slot = 0;
    while (slot < CPA_TRANSPORT_MAX_IN_FLIGHT && t->exchanges[slot].in_flight) slot++;
    if (slot == CPA_TRANSPORT_MAX_IN_FLIGHT) {
        return cpa_fail(err, CPA_INVALID, "%d exchanges are in flight already; finish one first",
                        CPA_TRANSPORT_MAX_IN_FLIGHT);
    }
    cpa_exchange *exchange = &t->exchanges[slot];
    int64_t n = 0;
    for (int32_t i = 0; i < n_msgs; i++) n += pieces(msgs[i].send_bytes) + pieces(msgs[i].recv_bytes);
    CPA_TRY(reserve(exchange, n, err));

    exchange->in_flight = 1;
    exchange->done = 0;
    exchange->error = (cpa_error){.status = CPA_OK};
    exchange->n_requests = 0;
    int tag = (int)(t->started++ % TAGS);
    /* Receives first, so that no message arrives unexpected and is copied twice. A failure shows at finish: the
     * messages posted before it are still in flight. */
    cpa_error *failure = &exchange->error;
    for (int32_t i = 0; i < n_msgs && failure->status == CPA_OK; i++) {
        post_receives(t, exchange, &msgs[i], tag, failure);
    }
    for (int32_t i = 0; i < n_msgs && failure->status == CPA_OK; i++) post_sends(t, exchange, &msgs[i], tag, failure);
    *out = exchange;
    return CPA_OK;
}

/* Notes a failed or short message of an exchange whose requests are complete. */
static void check_completion(const mpi_transport *t, cpa_exchange *exchange) {
    for (int i = 0; i < exchange->n_requests && exchange->error.status == CPA_OK; i++) {
        if (exchange->recv_counts[i] < 0) continue;
        int got = 0;
        MPI_Get_count(&exchange->statuses[i], MPI_BYTE, &got);
        if (got != exchange->recv_counts[i]) {
            cpa_fail(&exchange->error, CPA_COMM, "rank %d received %d bytes from rank %d, expected %d", t->rank, got,
                     exchange->statuses[i].MPI_SOURCE, exchange->recv_counts[i]);
        }
    }
}

/* The first error among the requests after a test that failed as a whole. */
static int request_error(const cpa_exchange *exchange, int code) {
    if (code != MPI_ERR_IN_STATUS) return code;
    for (int i = 0; i < exchange->n_requests; i++) {
        int each = exchange->statuses[i].MPI_ERROR;
        if (each != MPI_SUCCESS && each != MPI_ERR_PENDING) return each;
    }
    return code;
}

static void test_exchange(const mpi_transport *t, cpa_exchange *exchange) {
    if (exchange->done) return;
    int done = 0;
    int code = MPI_Testall(exchange->n_requests, exchange->requests, &done, exchange->statuses);
    if (code != MPI_SUCCESS) {
        cpa_mpi_check(request_error(exchange, code), "MPI_Testall", &exchange->error);
        exchange->done = 1;
    } else if (done) {
        check_completion(t, exchange);
        exchange->done = 1;
    }
}

static void transport_poll(cpa_transport *transport) {
    mpi_transport *t = (mpi_transport *)transport;
    for (int i = 0; i < CPA_TRANSPORT_MAX_IN_FLIGHT; i++) {
        if (t->exchanges[i].in_flight) test_exchange(t, &t->exchanges[i]);
    }
}

static cpa_status transport_finish(cpa_transport *transport, cpa_exchange *exchange, void *waiter, double *waited_s,
                                   cpa_error *err) {
    (void)waiter;
    mpi_transport *t = (mpi_transport *)transport;
    if (exchange < t->exchanges || exchange >= t->exchanges + CPA_TRANSPORT_MAX_IN_FLIGHT || !exchange->in_flight) {
        return cpa_fail(err, CPA_INVALID, "finish of an exchange that is not in flight");
    }
    double begin = cpa_clock_now();
    test_exchange(t, exchange);
    while (!exchange->done && exchange->error.status == CPA_OK) {
        sched_yield(); /* ranks may outnumber cores: the one we wait for needs this one */
        test_exchange(t, exchange);
    }
    exchange->in_flight = 0;
    if (waited_s) *waited_s = cpa_clock_now() - begin;
    if (exchange->error.status == CPA_OK) return CPA_OK;
    return cpa_fail(err, exchange->error.status, "%s", exchange->error.message);
}

const cpa_transport_table cpa_transport_mpi = {
    .name = "mpi",
    .open = transport_open,
    .close = transport_close,
    .start = transport_start,
    .poll = transport_poll,
    .finish = transport_finish,
};
