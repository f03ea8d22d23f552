#include "comm/store/reception.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/min_max.h"

/* How many are taken from the listener before those that are here are looked at again. */
enum { BURST = 32 };
/* How long to wait where this process, or the host, has no room for another connection. */
#define NO_ROOM_NS 10000000L

void cpa_reception_open(int listener, cpa_purpose purpose, int32_t rank, int32_t size, const cpa_job_key *key,
                        cpa_reception *out) {
    out->listener = listener;
    out->rank = (cpa_hello){.purpose = (int32_t)purpose, .to = rank, .size = size};
    out->key = *key;
    out->n = 0;
    out->turned_away = 0;
    out->last[0] = 0;
}

/* Visitor i is here no longer. */
static void leave(cpa_reception *r, int32_t i) {
    r->n--;
    memmove(&r->visitors[i], &r->visitors[i + 1], (size_t)(r->n - i) * sizeof r->visitors[0]);
}

static void turn_away(cpa_reception *r, int32_t i, const char *why) {
    char address[CPA_ADDRESS_BYTES];
    cpa_socket_peer(r->visitors[i].fd, address);
    snprintf(r->last, sizeof r->last, "%s, %s", address, why);
    r->turned_away++;
    cpa_socket_close(&r->visitors[i].fd);
    leave(r, i);
}

/* Makes room for one more. */
static void turn_one_away(cpa_reception *r) {
    int32_t least = 0;
    for (int32_t i = 1; i < r->n; i++) {
        if (r->visitors[i].n_said < r->visitors[least].n_said) least = i;
    }
    turn_away(r, least, "one of too many at once");
}

/* Whether one was taken; fails where the listener itself has. */
static cpa_status take_visitor(cpa_reception *r, int *taken, cpa_error *err) {
    int fd;
    *taken = 0;
    cpa_status status = cpa_socket_take(r->listener, &fd, err);
    if (status == CPA_NO_MEMORY) { /* of descriptors, perhaps */
        if (r->n > 0) turn_one_away(r);
        nanosleep(&(struct timespec){.tv_nsec = NO_ROOM_NS}, NULL);
        return CPA_OK;
    }
    if (status != CPA_OK || fd < 0) return status;
    if (r->n == CPA_RECEPTION_MOST) turn_one_away(r);
    cpa_visitor *v = &r->visitors[r->n++];
    *v = (cpa_visitor){.fd = fd, .until = cpa_clock_now() + CPA_HANDSHAKE_S, .challenge.magic = CPA_HANDSHAKE_MAGIC};
    *taken = 1;
    CPA_TRY(cpa_random_fill(v->challenge.nonce, sizeof v->challenge.nonce, err));
    /* A connection that is new has room for so little. */
    if (cpa_socket_send(fd, &v->challenge, sizeof v->challenge, cpa_clock_now(), NULL) != CPA_OK)
        turn_away(r, r->n - 1, "gone at once");
    return CPA_OK;
}

/* What is wrong with what visitor v has said so far; NULL: nothing. */
static const char *find_fault(const cpa_reception *r, const cpa_visitor *v) {
    const cpa_hello *hello = &v->said.hello;
    const size_t to_magic = sizeof hello->magic;
    if (v->n_said >= to_magic && hello->magic != CPA_HANDSHAKE_MAGIC) return "no rank of a job";
    if (v->n_said < sizeof *hello) return NULL;
    if (hello->purpose != r->rank.purpose || hello->to != r->rank.to) return "who looked for another rank";
    return NULL;
}

/* Visitor i has said everything. Lets it in, or turns it away. */
static cpa_status judge(cpa_reception *r, int32_t i, int *fd, cpa_hello *who, cpa_error *err) {
    const cpa_visitor *v = &r->visitors[i];
    cpa_reply answer = {.verdict = CPA_VERDICT_WELCOME};
    cpa_proof expected;
    CPA_TRY(cpa_proof_make(&r->key, 0, &v->said.hello, &v->challenge, &expected, err));
    CPA_TRY(cpa_proof_make(&r->key, 1, &v->said.hello, &v->challenge, &answer.proof, err));
    const int is_right = cpa_proof_is_equal(&expected, &v->said.proof);
    if (!is_right) answer = (cpa_reply){.verdict = CPA_VERDICT_OTHER_KEY};
    const int answered = cpa_socket_send(v->fd, &answer, sizeof answer, cpa_clock_now(), NULL) == CPA_OK;
    if (is_right && answered) {
        *fd = v->fd;
        *who = v->said.hello;
        leave(r, i);
    } else {
        turn_away(r, i, is_right ? "who hung up" : "who has another secret");
    }
    return CPA_OK;
}

/* Takes what visitor i says. */
static cpa_status hear(cpa_reception *r, int32_t i, int *fd, cpa_hello *who, cpa_error *err) {
    cpa_visitor *v = &r->visitors[i];
    const ssize_t n = recv(v->fd, (char *)&v->said + v->n_said, sizeof v->said - v->n_said, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return CPA_OK;
    if (n > 0) v->n_said += (size_t)n;
    const char *fault = n <= 0 ? "who hung up" : find_fault(r, v);
    if (fault) {
        turn_away(r, i, fault);
        return CPA_OK;
    }
    return v->n_said == sizeof v->said ? judge(r, i, fd, who, err) : CPA_OK;
}

static void expire(cpa_reception *r) {
    const double now = cpa_clock_now();
    while (r->n > 0 && r->visitors[0].until < now) turn_away(r, 0, "who said too little in time");
}

/* Waits until something happens, at the longest until the deadline. */
static void wait_for_events(const cpa_reception *r, double deadline) {
    struct pollfd pollers[CPA_RECEPTION_MOST + 1] = {{.fd = r->listener, .events = POLLIN}};
    for (int32_t i = 0; i < r->n; i++) pollers[i + 1] = (struct pollfd){.fd = r->visitors[i].fd, .events = POLLIN};
    double until = deadline;
    if (r->n > 0 && r->visitors[0].until < until) until = r->visitors[0].until;
    const double left = until - cpa_clock_now();
    (void)poll(pollers, (nfds_t)r->n + 1, left > 0 ? (int)(left * 1e3) + 1 : 0);
}

cpa_status cpa_reception_next(cpa_reception *r, double deadline, int *fd, cpa_hello *who, cpa_error *err) {
    *fd = -1;
    for (int is_late = 0; !is_late;) {
        wait_for_events(r, deadline);
        is_late = cpa_clock_now() >= deadline; /* and what has come until now still counts */
        for (int32_t i = r->n - 1; i >= 0 && *fd < 0; i--) CPA_TRY(hear(r, i, fd, who, err));
        if (*fd >= 0) return CPA_OK;
        expire(r);
        for (int taken = 1, n = 0; taken && n < BURST; n++) {
            CPA_TRY(take_visitor(r, &taken, err));
            if (taken && r->n > 0) CPA_TRY(hear(r, r->n - 1, fd, who, err));
            if (*fd >= 0) return CPA_OK;
        }
    }
    return CPA_OK;
}

void cpa_reception_close(cpa_reception *r) {
    for (int32_t i = 0; i < r->n; i++) cpa_socket_close(&r->visitors[i].fd);
    r->n = 0;
    if (r->turned_away == 0) return;
    cpa_log(CPA_LOG_WARN, "rank %d: %" PRId64 " connections of strangers were turned away; the last from %s",
            r->rank.to, r->turned_away, r->last);
}
