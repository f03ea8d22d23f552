/* The transport over NCCL: every exchange is one group of sends and receives on one lane.
 *
 * The communicator is a blocking one: of one that is not, NCCL enqueues every group in a thread made for it, which
 * takes 60 us where 11 us do (two H200, NCCL 2.28). Nothing blocks for long all the same. open makes every pair
 * exchange one byte, because NCCL connects two ranks when they first meet: afterwards a group only enqueues. A kernel
 * that waits for a rank ends when the communicator is aborted. Only the end of a communicator may take long, because it
 * waits for other ranks or for the graphs that use it: it has a thread of its own. */
#include <pthread.h>
#include <stdlib.h>

#include "base/clock.h"
#include "comm/device/exchange.h"
#include "comm/device_transport.h"
#include "comm/nccl/library.h"

typedef struct nccl_transport {
    cpa_device_transport head;
    cpa_nccl nccl;
    ncclComm_t comm; /* NULL with one rank, and once it is ending */
    ncclComm_t ending;
    ncclResult_t (*end)(ncclComm_t comm);
    pthread_t ender; /* if `ending` is set */
} nccl_transport;

static cpa_status check_result(const nccl_transport *t, ncclResult_t result, const char *call, cpa_error *err) {
    if (result == ncclSuccess || result == ncclInProgress) return CPA_OK;
    const char *detail = t->nccl.ncclGetLastError(t->comm);
    return cpa_fail(err, CPA_COMM, "%s: %s%s%.300s", call, t->nccl.ncclGetErrorString(result),
                    detail && detail[0] ? ": " : "", detail ? detail : "");
}

/* ---- one exchange ---- */

/* The messages between GroupStart and GroupEnd. */
static cpa_status add_messages(nccl_transport *t, const cpa_message *msgs, int32_t n_msgs, cpa_error *err) {
    for (int32_t i = 0; i < n_msgs; i++) {
        const cpa_message *m = &msgs[i];
        cudaStream_t lane = t->head.lanes[0];
        if (m->send_bytes > 0) {
            ncclResult_t result = t->nccl.ncclSend(m->send, (size_t)m->send_bytes, ncclInt8, m->peer, t->comm, lane);
            CPA_TRY(check_result(t, result, "ncclSend", err));
        }
        if (m->recv_bytes > 0) {
            ncclResult_t result = t->nccl.ncclRecv(m->recv, (size_t)m->recv_bytes, ncclInt8, m->peer, t->comm, lane);
            CPA_TRY(check_result(t, result, "ncclRecv", err));
        }
    }
    return CPA_OK;
}

static cpa_status enqueue(cpa_device_transport *head, cpa_exchange *exchange, const cpa_message *msgs, int32_t n_msgs,
                          cpa_error *err) {
    nccl_transport *t = (nccl_transport *)head;
    uint64_t peers = 0;
    for (int32_t i = 0; i < n_msgs; i++) {
        if (msgs[i].send_bytes > 0 || msgs[i].recv_bytes > 0) peers |= (uint64_t)1 << msgs[i].peer;
    }
    if (!peers) return CPA_OK;
    cpa_mem_op end[1];
    CPA_TRY(cpa_lane_begin(head, exchange, 0, err));
    CPA_TRY(check_result(t, t->nccl.ncclGroupStart(), "ncclGroupStart", err));
    cpa_status status = add_messages(t, msgs, n_msgs, err);
    ncclResult_t result = t->nccl.ncclGroupEnd(); /* a group that was opened is closed whatever is in it */
    CPA_TRY(status);
    CPA_TRY(check_result(t, result, "ncclGroupEnd", err));
    return cpa_lane_end(head, exchange, 0, peers, end, 0, err);
}

static cpa_status check(cpa_device_transport *head, cpa_error *err) {
    nccl_transport *t = (nccl_transport *)head;
    if (!t->comm) return CPA_OK;
    ncclResult_t state = ncclSuccess;
    CPA_TRY(check_result(t, t->nccl.ncclCommGetAsyncError(t->comm, &state), "ncclCommGetAsyncError", err));
    return check_result(t, state, "NCCL", err);
}

/* ---- the end of a communicator ---- */

static void *run_end(void *transport) {
    const nccl_transport *t = transport;
    cudaSetDevice(t->head.device);
    t->end(t->ending);
    return NULL;
}

/* Begins to end the communicator by ncclCommDestroy or ncclCommAbort. */
static void begin_end(nccl_transport *t, ncclResult_t (*end)(ncclComm_t)) {
    if (!t->comm) return;
    t->end = end;
    t->ending = t->comm;
    t->comm = NULL;
    if (pthread_create(&t->ender, NULL, run_end, t) != 0) {
        run_end(t);
        t->ending = NULL;
    }
}

/* Whether it has ended, or there was none. */
static int await_end(nccl_transport *t) {
    enum { END_TIMEOUT_S = 10 };
    if (!t->ending) return 1;
    const struct timespec deadline = cpa_clock_after(END_TIMEOUT_S);
    return pthread_clockjoin_np(t->ender, NULL, CLOCK_MONOTONIC, &deadline) == 0;
}

static void abort_communicator(cpa_device_transport *head) {
    nccl_transport *t = (nccl_transport *)head;
    begin_end(t, t->nccl.ncclCommAbort);
}

static const cpa_device_ops OPS = {.enqueue = enqueue, .check = check, .abort = abort_communicator};

/* ---- life ---- */

/* Loads the library; rank 0 makes the identity of the communicator. */
static cpa_status open_local(nccl_transport *t, cpa_control *control, ncclUniqueId *id, cpa_error *err) {
    CPA_TRY(cpa_nccl_load(CPA_NCCL_SONAME, &t->nccl, err));
    if (control->rank != 0) return CPA_OK;
    return check_result(t, t->nccl.ncclGetUniqueId(id), "ncclGetUniqueId", err);
}

static cpa_status init_communicator(nccl_transport *t, ncclUniqueId id, cpa_error *err) {
    const cpa_control *control = t->head.control;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    ncclResult_t result = t->nccl.ncclCommInitRankConfig(&t->comm, control->size, id, control->rank, &config);
    return check_result(t, result, "ncclCommInitRankConfig", err);
}

/* One byte to and from every rank. */
static cpa_status connect_all(nccl_transport *t, cpa_error *err) {
    cpa_transport *base = &t->head.base;
    int32_t size = t->head.control->size, n = 0;
    cpa_message *msgs = calloc((size_t)size, sizeof *msgs);
    char *bytes = NULL; /* sent, and received from each */
    cpa_exchange *exchange;
    cpa_status status = CPA_OK;
    if (!msgs) return cpa_fail(err, CPA_NO_MEMORY, "no memory for %d messages", size);
    CPA_TRY_GOTO(cpa_runtime_check(cudaMalloc((void **)&bytes, 2 * (size_t)size), "cudaMalloc", err), done);
    for (int32_t peer = 0; peer < size; peer++) {
        if (peer == t->head.control->rank) continue;
        msgs[n++] = (cpa_message){peer, bytes + peer, 1, bytes + size + peer, 1};
    }
    CPA_TRY_GOTO(cpa_device_transport_start(base, msgs, n, NULL, &exchange, err), done);
    CPA_TRY_GOTO(cpa_device_transport_finish(base, exchange, NULL, NULL, err), done);
    status = cpa_device_transport_drain(base, t->head.lanes[0], NULL, err);
done:
    cudaFree(bytes);
    free(msgs);
    return status;
}

static void transport_close(cpa_transport *transport) {
    nccl_transport *t = (nccl_transport *)transport;
    if (!t) return;
    cudaSetDevice(t->head.device);
    cpa_device_transport_settle(&t->head);
    begin_end(t, t->nccl.ncclCommDestroy);
    if (!await_end(t)) {
        cpa_log(CPA_LOG_WARN, "rank %d: NCCL does not end its communicator, which is left to the end of the process",
                t->head.control->rank);
        return;
    }
    cpa_device_transport_close(&t->head);
    free(t);
}

static cpa_status transport_open(cpa_control *control, cpa_transport **out, cpa_error *err) {
    nccl_transport *t = calloc(1, sizeof *t);
    cpa_status status = t ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no memory for a transport");
    if (t) status = cpa_device_transport_open(&t->head, &cpa_transport_nccl, &OPS, control, 1, err);
    int opened = t && status == CPA_OK;
    ncclUniqueId id;
    if (opened && control->size > 1) status = open_local(t, control, &id, err);
    CPA_TRY_GOTO(cpa_control_agree(control, status, err), failed);
    if (control->size > 1) {
        CPA_TRY_GOTO(cpa_control_bcast(control, &id, sizeof id, 0, err), failed);
        status = init_communicator(t, id, err);
        CPA_TRY_GOTO(cpa_control_agree(control, status, err), failed);
        status = connect_all(t, err);
        CPA_TRY_GOTO(cpa_control_agree(control, status, err), failed);
    }
    *out = &t->head.base;
    return CPA_OK;

failed:
    if (opened) {
        begin_end(t, t->nccl.ncclCommAbort);
        if (!await_end(t)) return status;
        cpa_device_transport_close(&t->head);
    }
    free(t);
    return status;
}

const cpa_transport_table cpa_transport_nccl = {
    .name = "nccl",
    .open = transport_open,
    .close = transport_close,
    .start = cpa_device_transport_start,
    .poll = cpa_device_transport_poll,
    .finish = cpa_device_transport_finish,
    .drain = cpa_device_transport_drain,
};
