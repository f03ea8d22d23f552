/* Messages on a communicator, and waiting for them. */
#include "comm/communicator.h"

#include <math.h>
#include <sched.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"

static int is_taken(const cpa_comm *comm, int32_t tag) {
    return (int)(comm->tags_taken[tag / 64] >> tag % 64 & 1);
}

cpa_status cpa_comm_take_tags(cpa_comm *comm, int32_t n, int32_t *first, cpa_error *err) {
    int32_t n_free = 0, tag = comm->next_tag;
    for (int32_t looked = 0; looked < comm->n_tags + n && n_free < n; looked++, tag++) {
        if (tag >= comm->n_tags) tag = CPA_COMM_TAG_FIRST_FREE, n_free = 0;
        n_free = is_taken(comm, tag) ? 0 : n_free + 1;
    }
    *first = n_free == n ? tag - n : -1;
    if (n_free < n) return cpa_fail(err, CPA_NO_MEMORY, "communicator: all its %d tags are in use", comm->n_tags);
    for (tag = *first; tag < *first + n; tag++) comm->tags_taken[tag / 64] |= (uint64_t)1 << tag % 64;
    comm->next_tag = tag;
    return CPA_OK;
}

void cpa_comm_give_back_tags(cpa_comm *comm, int32_t first, int32_t n) {
    for (int32_t tag = first; first >= 0 && tag < first + n; tag++)
        comm->tags_taken[tag / 64] &= ~((uint64_t)1 << tag % 64);
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
    if (!cpa_watch_has_notice(comm->watch)) return CPA_OK;
    return cpa_watch_check(comm->watch, peer, comm->calls, err);
}

/* Sleeps between two looks for a message that may be long in coming: longer and longer, until a minute of waiting costs
 * a few tenths of a second of the processor. */
static void nap(double *seconds) {
    const double first_s = 50e-6, growth = 1.1, longest_s = 10e-3;
    *seconds = *seconds > 0 ? fmin(*seconds * growth, longest_s) : first_s;
    const struct timespec time = {.tv_nsec = (long)(*seconds * 1e9)};
    nanosleep(&time, NULL);
}

/* While ranks join nobody watches them. */
static cpa_status check_deadline(const cpa_comm *comm, int32_t peer, cpa_error *err) {
    if (cpa_clock_now() < comm->deadline) return CPA_OK;
    return cpa_fail(err, CPA_COMM, "rank %d: rank %d has not joined in time: it is stopped, or cut off", comm->rank,
                    peer);
}

static cpa_status wait_for(cpa_comm *comm, cpa_comm_request **request, int32_t peer, int may_nap, cpa_error *err) {
    enum { LONG_WAIT = 10000 }; /* looks: others need not hear of shorter ones */
    cpa_status status = CPA_OK;
    double nap_s = 0;
    int done = 0, looks = 0;
    for (;;) {
        status = cpa_comm_test(comm, request, &done, err);
        if (status == CPA_OK && !done) status = cpa_comm_check(comm, peer, err);
        if (status == CPA_OK && !done && comm->deadline > 0) status = check_deadline(comm, peer, err);
        if (status != CPA_OK || done) break;
        if (looks <= LONG_WAIT && looks++ == LONG_WAIT && comm->watch) cpa_watch_note_wait(comm->watch, peer);
        if (may_nap && looks > LONG_WAIT) {
            nap(&nap_s);
        } else {
            sched_yield(); /* ranks may outnumber cores: the one we wait for needs this one */
        }
    }
    if (looks > LONG_WAIT && comm->watch) cpa_watch_note_wait(comm->watch, -1);
    return status;
}

cpa_status cpa_comm_wait(cpa_comm *comm, cpa_comm_request **request, int32_t peer, cpa_error *err) {
    return wait_for(comm, request, peer, 0, err);
}

cpa_status cpa_comm_wait_idly(cpa_comm *comm, cpa_comm_request **request, int32_t peer, cpa_error *err) {
    return wait_for(comm, request, peer, 1, err);
}

cpa_calls cpa_comm_begin_wait(cpa_comm *comm, cpa_calls calls) {
    const cpa_calls before = comm->calls;
    comm->calls = calls;
    return before;
}

void cpa_comm_end_wait(cpa_comm *comm) {
    comm->calls.channel = -1;
}

void cpa_comm_note_work(cpa_comm *comm, cpa_work work, const char *difference) {
    if (comm->watch) cpa_watch_note_work(comm->watch, work, difference);
}

void cpa_comm_refuse(cpa_comm *comm, int32_t channel, int64_t call, int and_later, const cpa_error *why) {
    const cpa_call_refusal refusal = {.channel = channel, .and_later = and_later, .call = call};
    if (comm->watch) cpa_watch_refuse(comm->watch, &refusal, why->status, why->message);
}

void cpa_comm_cancel(cpa_comm *comm, cpa_comm_request **request) {
    if (*request) comm->ops.cancel(comm->state, *request);
    *request = NULL;
}
