/* Communicators: their life, waits, and the calls that programs may make on one. */
#include "comm/communicator.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "comm/comm.h"
#include "comm/store/watch.h"

/* Tags of the program's own calls; channels take theirs from those behind. */
enum { TAG_COLLECTIVE = 0, TAG_MESSAGE, TAG_FIRST_FREE, TAGS = 32768 };

#define DEFAULT_TIMEOUT_S 10.0
#define DEFAULT_JOIN_S 60.0

/* ---- messages ---- */

int32_t cpa_comm_take_tags(cpa_comm *comm, int32_t n) {
    if (comm->tags_taken + n > TAGS) comm->tags_taken = TAG_FIRST_FREE; /* those of long ago are free again */
    int32_t first = comm->tags_taken;
    comm->tags_taken += n;
    return first;
}

cpa_status cpa_comm_start_send(cpa_comm *comm, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                               cpa_comm_request **request, cpa_error *err) {
    *request = NULL;
    return comm->ops.send(comm->state, peer, tag, data, bytes, request, err);
}

cpa_status cpa_comm_start_receive(cpa_comm *comm, int32_t peer, int32_t tag, void *data, int64_t bytes,
                                  cpa_comm_request **request, cpa_error *err) {
    *request = NULL;
    return comm->ops.receive(comm->state, peer, tag, data, bytes, request, err);
}

cpa_status cpa_comm_test(cpa_comm *comm, cpa_comm_request **request, int *done, cpa_error *err) {
    *done = *request == NULL;
    if (*done) return CPA_OK;
    cpa_status status = comm->ops.test(comm->state, *request, done, err);
    if (status != CPA_OK || *done) *request = NULL;
    return status;
}

cpa_status cpa_comm_check(cpa_comm *comm, int32_t peer, cpa_error *err) {
    if (!cpa_watch_has_news(comm->watch)) return CPA_OK;
    return cpa_watch_check(comm->watch, peer, comm->channel, comm->call, err);
}

cpa_status cpa_comm_wait(cpa_comm *comm, cpa_comm_request **request, int32_t peer, cpa_error *err) {
    enum { LONG_WAIT = 10000 }; /* looks: others need not hear of shorter ones */
    cpa_status status = CPA_OK;
    int done = 0, looks = 0;
    for (;; sched_yield()) { /* ranks may outnumber cores: the one we wait for needs this one */
        status = cpa_comm_test(comm, request, &done, err);
        if (status == CPA_OK && !done) status = cpa_comm_check(comm, peer, err);
        if (status != CPA_OK || done) break;
        if (looks <= LONG_WAIT && looks++ == LONG_WAIT && comm->watch) cpa_watch_note_wait(comm->watch, peer);
    }
    if (looks > LONG_WAIT && comm->watch) cpa_watch_note_wait(comm->watch, -1);
    return status;
}

void cpa_comm_begin_call(cpa_comm *comm, int32_t channel, int64_t call) {
    comm->channel = channel;
    comm->call = call;
}

void cpa_comm_end_call(cpa_comm *comm) {
    comm->channel = -1;
}

void cpa_comm_refuse(cpa_comm *comm, int32_t channel, int64_t call, int and_later, const cpa_error *why) {
    const cpa_refusal refusal = {.channel = channel, .and_later = and_later, .call = call};
    if (comm->watch) cpa_watch_refuse(comm->watch, &refusal, why->status, why->message);
}

void cpa_comm_abort(cpa_comm *comm, cpa_status status, const char *message) {
    const cpa_refusal all = {.channel = -1};
    if (!comm || !comm->watch || status == CPA_OK || cpa_comm_check(comm, -1, NULL) != CPA_OK) return;
    cpa_watch_refuse(comm->watch, &all, status, message ? message : cpa_status_name(status));
}

void cpa_comm_set_timeout(cpa_comm *comm, double seconds) {
    if (comm && comm->watch && seconds > 0) cpa_watch_set_timeout(comm->watch, seconds);
}

void cpa_comm_cancel(cpa_comm *comm, cpa_comm_request **request) {
    if (*request) comm->ops.cancel(comm->state, *request);
    *request = NULL;
}

/* ---- life ---- */

cpa_status cpa_comm_take_options(const cpa_comm_options *given, cpa_comm_options *out, cpa_error *err) {
    *out = (cpa_comm_options){.size = sizeof *out};
    if (given) {
        if (given->size < sizeof given->size || given->size > sizeof *given) {
            return cpa_fail(err, CPA_INVALID, "cpa_comm_options.size: found %zu, expected %zu", given->size,
                            sizeof *given);
        }
        memcpy(out, given, given->size);
    }
    if (!(out->timeout_s >= 0) || !(out->join_s >= 0)) {
        return cpa_fail(err, CPA_INVALID, "communicator: time-outs of %g s and %g s, expected 0 (default) or more",
                        out->timeout_s, out->join_s);
    }
    if (out->timeout_s == 0) out->timeout_s = DEFAULT_TIMEOUT_S;
    if (out->join_s == 0) out->join_s = DEFAULT_JOIN_S;
    return CPA_OK;
}

cpa_status cpa_comm_create(const cpa_comm_ops *ops, void *state, int32_t rank, int32_t size,
                           const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    cpa_comm_options own;
    if (!out) return cpa_fail(err, CPA_INVALID, "communicator: out is NULL");
    if (size < 1 || size > CPA_COMM_MAX_RANKS || rank < 0 || rank >= size) {
        return cpa_fail(err, CPA_INVALID, "communicator: rank %d of %d, expected 0..size-1 of at most %d", rank, size,
                        CPA_COMM_MAX_RANKS);
    }
    if (!ops || ops->size != sizeof *ops || !ops->send || !ops->receive || !ops->test || !ops->cancel) {
        return cpa_fail(err, CPA_INVALID, "communicator: a table of functions of %zu bytes, expected %zu, all filled",
                        ops ? ops->size : 0, sizeof *ops);
    }
    CPA_TRY(cpa_comm_take_options(options, &own, err));
    cpa_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a communicator");
    *comm = (cpa_comm){
        .ops = *ops, .state = state, .rank = rank, .size = size, .channel = -1, .tags_taken = TAG_FIRST_FREE};
    cpa_control control = {.comm = comm, .rank = rank, .size = size, .tag = TAG_COLLECTIVE};
    cpa_status status = size > 1 ? cpa_watch_start(&control, own.timeout_s, &comm->watch, err) : CPA_OK;
    if (status != CPA_OK) {
        free(comm);
        return status;
    }
    *out = comm;
    return CPA_OK;
}

void cpa_comm_destroy(cpa_comm *comm) {
    if (!comm) return;
    cpa_watch_stop(comm->watch);
    if (comm->ops.close) comm->ops.close(comm->state);
    free(comm->remembered);
    free(comm);
}

/* One rank sends nothing. */
static cpa_status no_message(cpa_error *err) {
    return cpa_fail(err, CPA_INTERNAL, "a message between ranks, of which there is one");
}

static cpa_status alone_send(void *state, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                             cpa_comm_request **out, cpa_error *err) {
    (void)state, (void)peer, (void)tag, (void)data, (void)bytes, (void)out;
    return no_message(err);
}

static cpa_status alone_receive(void *state, int32_t peer, int32_t tag, void *data, int64_t bytes,
                                cpa_comm_request **out, cpa_error *err) {
    (void)state, (void)peer, (void)tag, (void)data, (void)bytes, (void)out;
    return no_message(err);
}

static cpa_status alone_test(void *state, cpa_comm_request *request, int *done, cpa_error *err) {
    (void)state, (void)request, (void)done;
    return no_message(err);
}

static void alone_cancel(void *state, cpa_comm_request *request) {
    (void)state, (void)request;
}

cpa_status cpa_comm_alone(cpa_comm **out, cpa_error *err) {
    const cpa_comm_ops ops = {sizeof ops, "alone", alone_send, alone_receive, alone_test, alone_cancel, NULL};
    return cpa_comm_create(&ops, NULL, 0, 1, NULL, out, err);
}

/* ---- calls of programs ---- */

int32_t cpa_comm_rank(const cpa_comm *comm) {
    return comm ? comm->rank : -1;
}

int32_t cpa_comm_size(const cpa_comm *comm) {
    return comm ? comm->size : 0;
}

/* The channel of a program's own calls. */
static cpa_status open_own(cpa_comm *comm, int64_t bytes, const void *data, cpa_control *out, cpa_error *err) {
    if (!comm || bytes < 0 || (bytes > 0 && !data)) {
        return cpa_fail(err, CPA_INVALID, "communicator %p: %lld bytes at %p", (void *)comm, (long long)bytes, data);
    }
    *out = (cpa_control){.comm = comm, .rank = comm->rank, .size = comm->size, .tag = TAG_COLLECTIVE};
    return CPA_OK;
}

cpa_status cpa_comm_all_gather(cpa_comm *comm, const void *mine, int64_t bytes, void *all, cpa_error *err) {
    cpa_control control;
    CPA_TRY(open_own(comm, bytes, mine, &control, err));
    if (bytes > 0 && !all) return cpa_fail(err, CPA_INVALID, "all-gather: `all` is NULL");
    return cpa_control_all_gather(&control, mine, bytes, all, err);
}

cpa_status cpa_comm_broadcast(cpa_comm *comm, void *data, int64_t bytes, int32_t root, cpa_error *err) {
    cpa_control control;
    CPA_TRY(open_own(comm, bytes, data, &control, err));
    if (root < 0 || root >= comm->size) {
        return cpa_fail(err, CPA_INVALID, "broadcast: from rank %d of %d", root, comm->size);
    }
    return cpa_control_bcast(&control, data, bytes, root, err);
}

cpa_status cpa_comm_barrier(cpa_comm *comm, cpa_error *err) {
    return cpa_comm_agree(comm, CPA_OK, err);
}

cpa_status cpa_comm_agree(cpa_comm *comm, cpa_status mine, cpa_error *err) {
    cpa_control control;
    CPA_TRY(open_own(comm, 0, NULL, &control, err));
    return cpa_control_agree(&control, mine, err);
}

static cpa_status check_peer(const cpa_comm *comm, int32_t peer, int64_t bytes, const void *data, cpa_error *err) {
    if (!comm || peer < 0 || peer >= comm->size || peer == comm->rank || bytes < 0 || (bytes > 0 && !data)) {
        return cpa_fail(err, CPA_INVALID, "message of rank %d: %lld bytes at %p, peer %d, expected another rank of %d",
                        cpa_comm_rank(comm), (long long)bytes, data, peer, cpa_comm_size(comm));
    }
    return CPA_OK;
}

/* Waits for a message, and gives it up if that fails: its buffer is the caller's. */
static cpa_status complete(cpa_comm *comm, cpa_comm_request *request, int32_t peer, cpa_error *err) {
    cpa_status status = cpa_comm_wait(comm, &request, peer, err);
    cpa_comm_cancel(comm, &request);
    return status;
}

cpa_status cpa_comm_send(cpa_comm *comm, int32_t peer, const void *data, int64_t bytes, cpa_error *err) {
    cpa_comm_request *request;
    CPA_TRY(check_peer(comm, peer, bytes, data, err));
    CPA_TRY(cpa_comm_start_send(comm, peer, TAG_MESSAGE, data, bytes, &request, err));
    return complete(comm, request, peer, err);
}

cpa_status cpa_comm_receive(cpa_comm *comm, int32_t peer, void *data, int64_t bytes, cpa_error *err) {
    cpa_comm_request *request;
    CPA_TRY(check_peer(comm, peer, bytes, data, err));
    CPA_TRY(cpa_comm_start_receive(comm, peer, TAG_MESSAGE, data, bytes, &request, err));
    return complete(comm, request, peer, err);
}
