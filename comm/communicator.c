/* Messages on a communicator, and waiting for them. */
#include "comm/communicator.h"

#include <sched.h>

#include "base/check.h"

enum { TAGS = 32768 };

int32_t cpa_comm_take_tags(cpa_comm *comm, int32_t n) {
    if (comm->tags_taken + n > TAGS) comm->tags_taken = CPA_COMM_TAG_FIRST_FREE; /* those of long ago are free again */
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
    return cpa_watch_check(comm->watch, peer, comm->calls, err);
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

void cpa_comm_begin_wait(cpa_comm *comm, cpa_calls calls) {
    comm->calls = calls;
}

void cpa_comm_end_wait(cpa_comm *comm) {
    comm->calls.channel = -1;
}

void cpa_comm_refuse(cpa_comm *comm, int32_t channel, int64_t call, int and_later, const cpa_error *why) {
    const cpa_refusal refusal = {.channel = channel, .and_later = and_later, .call = call};
    if (comm->watch) cpa_watch_refuse(comm->watch, &refusal, why->status, why->message);
}

void cpa_comm_cancel(cpa_comm *comm, cpa_comm_request **request) {
    if (*request) comm->ops.cancel(comm->state, *request);
    *request = NULL;
}
