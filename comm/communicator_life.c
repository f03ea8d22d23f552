/* The life of a communicator, and what watches its ranks. */
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/host.h"
#include "base/struct_size.h"
#include "comm/comm.h"
#include "comm/communicator.h"

#define DEFAULT_TIMEOUT_S 10.0
#define DEFAULT_JOIN_S 60.0

/* Of a secret, so that it is not guessed. */
enum { LEAST_SECRET = 16 };

void cpa_comm_abort(cpa_comm *comm, cpa_status status, const char *message) {
    const cpa_call_refusal all = {.channel = -1};
    if (!comm || !comm->watch || status == CPA_OK || cpa_comm_check(comm, -1, NULL) != CPA_OK) return;
    cpa_watch_refuse(comm->watch, &all, status, message ? message : cpa_status_name(status));
}

int32_t cpa_comm_who_gave_up(cpa_comm *comm, cpa_error *why) {
    return comm->watch ? cpa_watch_who_gave_up(comm->watch, why) : -1;
}

void cpa_comm_set_timeout(cpa_comm *comm, double seconds) {
    if (comm && comm->watch && seconds > 0) cpa_watch_set_timeout(comm->watch, seconds);
}

cpa_status cpa_comm_take_options(const cpa_comm_options *given, cpa_comm_options *out, cpa_error *err) {
    *out = (cpa_comm_options){.size = sizeof *out};
    if (given) CPA_TRY(CPA_STRUCT_TAKE("communicator", given, cpa_comm_options, size, out, err));
    if (!(out->timeout_s >= 0) || !(out->join_s >= 0)) {
        return cpa_fail(err, CPA_INVALID, "communicator: time-outs of %g s and %g s, expected 0 (default) or more",
                        out->timeout_s, out->join_s);
    }
    if (out->secret && strlen(out->secret) < LEAST_SECRET) {
        return cpa_fail(err, CPA_INVALID, "communicator: a secret of %zu letters, expected at least %d",
                        strlen(out->secret), LEAST_SECRET);
    }
    if (out->timeout_s == 0) out->timeout_s = DEFAULT_TIMEOUT_S;
    if (out->join_s == 0) out->join_s = DEFAULT_JOIN_S;
    return CPA_OK;
}

cpa_status cpa_comm_key(const cpa_comm_options *options, cpa_job_key *out, cpa_error *err) {
    const char *secret = options->secret ? options->secret : "";
    return cpa_job_key_derive(NULL, secret, (int64_t)strlen(secret), out, err);
}

/* Whether all ranks reach each other by loopback. Collective. */
static cpa_status find_loopback(cpa_control *control, int *out, cpa_error *err) {
    const uint64_t mine = cpa_host_network();
    uint64_t all[CPA_COMM_MAX_RANKS];
    CPA_TRY(cpa_control_all_gather(control, &mine, sizeof mine, all, err));
    *out = mine != 0;
    for (int32_t rank = 0; rank < control->size; rank++) *out = *out && all[rank] == mine;
    return CPA_OK;
}

/* Rank 0: where it listens, and a key for this communicator alone. */
static cpa_status listen_for_watch(const char *host, cpa_watch_meeting *meeting, int *listener, cpa_error *err) {
    CPA_TRY(cpa_random_fill(meeting->nonce, sizeof meeting->nonce, err));
    cpa_watch_listen(host, &meeting->endpoint, listener);
    return CPA_OK;
}

/* Connects the ranks. Collective, over messages of `control`. */
static cpa_status join_watch(cpa_control *control, const char *host, const cpa_comm_options *options, cpa_watch *watch,
                             cpa_error *err) {
    cpa_watch_meeting meeting = {.endpoint = {.n_addresses = 0}};
    cpa_job_key key;
    cpa_error why = {CPA_OK, ""};
    int listener = -1, is_loopback = 0;
    CPA_TRY(find_loopback(control, &is_loopback, err));
    if (!host && is_loopback) host = "127.0.0.1";
    cpa_status status = cpa_comm_key(options, &key, &why);
    if (status == CPA_OK && control->rank == 0) status = listen_for_watch(host, &meeting, &listener, &why);
    status = cpa_control_agree(control, status, &why);
    if (status == CPA_OK) status = cpa_control_bcast(control, &meeting, sizeof meeting, 0, &why);
    if (status == CPA_OK) status = cpa_job_key_derive(&key, meeting.nonce, sizeof meeting.nonce, &key, &why);
    if (status == CPA_OK) cpa_watch_join(watch, &meeting.endpoint, &key, listener);
    cpa_socket_close(&listener);
    return status == CPA_OK ? CPA_OK : cpa_fail(err, status, "%s", why.message);
}

/* Collective, over messages of `control`: fails on no memory and the like, or where a rank has failed before (`mine`,
 * with its line in err), on all ranks. */
static cpa_status start_watch(cpa_control *control, const char *host, const cpa_comm_options *options, cpa_status mine,
                              cpa_watch **out, cpa_error *err) {
    cpa_status status = mine;
    cpa_watch *watch = cpa_watch_create(control->rank, control->size, options->timeout_s);
    if (status == CPA_OK && !watch) status = cpa_fail(err, CPA_NO_MEMORY, "no memory to watch the ranks");
    status = cpa_control_agree(control, status, err);
    if (status == CPA_OK) status = join_watch(control, host, options, watch, err);
    if (status == CPA_OK) status = cpa_control_agree(control, cpa_watch_start(watch, err), err);
    if (status == CPA_OK) {
        *out = watch;
    } else {
        cpa_watch_stop(watch);
    }
    return status;
}

cpa_status cpa_comm_create_at(const char *host, const cpa_comm_ops *ops, void *state, int32_t rank, int32_t size,
                              const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    cpa_comm_options own;
    cpa_comm_ops table;
    cpa_error why = {CPA_OK, ""};
    if (size < 1 || size > CPA_COMM_MAX_RANKS || rank < 0 || rank >= size) {
        return cpa_fail(err, CPA_INVALID, "communicator: rank %d of %d, expected 0..size-1 of at most %d", rank, size,
                        CPA_COMM_MAX_RANKS);
    }
    CPA_TRY(CPA_STRUCT_TAKE("communicator", ops, cpa_comm_ops, cancel, &table, err));
    if (!table.send || !table.receive || !table.test || !table.cancel) {
        return cpa_fail(err, CPA_INVALID, "communicator: a function of the table is NULL, expected all but close");
    }
    /* From here on messages can be sent: what one rank refuses is refused by all. */
    cpa_status status = cpa_comm_take_options(options, &own, &why);
    if (status == CPA_OK && !out) status = cpa_fail(&why, CPA_INVALID, "communicator: out is NULL");
    cpa_comm *comm = calloc(1, sizeof *comm);
    if (status == CPA_OK && !comm) status = cpa_fail(&why, CPA_NO_MEMORY, "no memory for a communicator");
    cpa_comm made = {.ops = table,
                     .state = state,
                     .rank = rank,
                     .size = size,
                     .calls.channel = -1,
                     .deadline = cpa_clock_now() + (status == CPA_OK ? own.join_s : DEFAULT_JOIN_S),
                     .n_tags = CPA_COMM_TAGS,
                     .next_tag = CPA_COMM_TAG_FIRST_FREE};
    cpa_control control = {.comm = &made, .rank = rank, .size = size, .tag = CPA_COMM_TAG_COLLECTIVE};
    if (size > 1) status = start_watch(&control, host, &own, status, &made.watch, &why);
    if (status != CPA_OK) {
        free(comm);
        return cpa_fail(err, status, "%s", why.message);
    }
    *comm = made;
    comm->deadline = 0;
    *out = comm;
    return CPA_OK;
}

cpa_status cpa_comm_create(const cpa_comm_ops *ops, void *state, int32_t rank, int32_t size,
                           const cpa_comm_options *options, cpa_comm **out, cpa_error *err) {
    return cpa_comm_create_at(NULL, ops, state, rank, size, options, out, err);
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

int32_t cpa_comm_rank(const cpa_comm *comm) {
    return comm ? comm->rank : -1;
}

int32_t cpa_comm_size(const cpa_comm *comm) {
    return comm ? comm->size : 0;
}
