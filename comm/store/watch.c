#include "comm/store/watch.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "comm/limits.h"
#include "comm/store/losses.h"
#include "comm/store/reception.h"

/* How often a rank sends a heartbeat; what is too short to tell silence from one that is late; how late its own thread
 * may be before it mistrusts its own count. */
#define HEARTBEAT_S 0.5
#define LEAST_SILENCE_S (4 * HEARTBEAT_S)
#define STOPPED_S 2.0
/* All ranks wait for each other when all have waited for this many time-outs, alive as they are. */
#define DEADLOCK_TIMEOUTS 6
/* How long ranks may take to connect to rank 0, which are all in the same call. */
#define CONNECT_S 10.0

/* A connection: of rank 0 to each rank, of the others to rank 0. */
typedef struct connection {
    int fd;
    double received_s; /* when something last came */
    int left;          /* the other end has said that it leaves */
    char in[sizeof(cpa_notice)];
    size_t n_in;
    cpa_notice out[16]; /* not sent yet */
    size_t n_out, out_at;
} connection;

struct cpa_watch {
    int32_t rank, size;
    pthread_t thread;
    int started; /* not 0: the thread was started */
    int wake;    /* an eventfd */
    atomic_int ending;
    atomic_int has_notice;
    _Atomic double timeout_s;
    _Atomic double waits_since; /* 0: does not wait */
    atomic_int waits_for;
    _Atomic(const char *) difference;           /* what to say where works differ, up to the other rank's name */
    connection connections[CPA_COMM_MAX_RANKS]; /* connections of the thread to each rank; fd -1: none */
    cpa_notice heartbeats[CPA_COMM_MAX_RANKS];  /* rank 0: the last heartbeat of each rank */
    pthread_mutex_t lock;                       /* guards what follows */
    cpa_loss losses[CPA_COMM_MAX_RANKS];
    cpa_notice queued[8]; /* what this rank has to say, until the thread has taken it */
    int n_queued;
    int gave_up; /* not 0: this rank has said that it takes part in nothing any more */
    cpa_works works;
};

/* ---- what is known ---- */

static void note_loss(cpa_watch *w, const cpa_notice *n) {
    if (n->rank < 0 || n->rank >= w->size || n->rank == w->rank) return;
    pthread_mutex_lock(&w->lock);
    cpa_loss_note(&w->losses[n->rank], n);
    pthread_mutex_unlock(&w->lock);
    atomic_store(&w->has_notice, 1);
}

int cpa_watch_has_notice(const cpa_watch *watch) {
    return watch && atomic_load_explicit(&watch->has_notice, memory_order_relaxed);
}

cpa_status cpa_watch_check(cpa_watch *w, int32_t peer, cpa_calls calls, cpa_error *err) {
    pthread_mutex_lock(&w->lock);
    const cpa_status status = cpa_losses_check(w->losses, w->size, peer, calls, err);
    pthread_mutex_unlock(&w->lock);
    return status;
}

int32_t cpa_watch_who_gave_up(cpa_watch *w, cpa_error *why) {
    pthread_mutex_lock(&w->lock);
    const int32_t who = w->gave_up ? -1 : cpa_losses_who_gave_up(w->losses, w->size, why);
    pthread_mutex_unlock(&w->lock);
    return who;
}

/* ---- connections ---- */

static void flush_connection(connection *l) {
    const size_t bytes = l->n_out * sizeof l->out[0];
    while (l->fd >= 0 && l->out_at < bytes) {
        ssize_t n = send(l->fd, (const char *)l->out + l->out_at, bytes - l->out_at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0) return; /* an end shows when it is read */
        l->out_at += (size_t)n;
    }
    l->n_out = l->out_at = 0;
}

/* Where there is no room the other end has not read for long: it is about to be found silent. */
static void send_notice(connection *l, const cpa_notice *n) {
    const size_t room = sizeof l->out / sizeof l->out[0];
    if (l->fd < 0 || l->n_out == room || (n->kind == CPA_NOTICE_HEARTBEAT && l->n_out > 0)) return;
    l->out[l->n_out++] = *n;
    flush_connection(l);
}

static void send_to_all(cpa_watch *w, const cpa_notice *n) {
    for (int32_t rank = 0; rank < w->size; rank++) {
        if (rank != n->rank) send_notice(&w->connections[rank], n);
    }
}

/* Something has happened to another rank: it is noted, and rank 0 tells the others. */
static void report(cpa_watch *w, const cpa_notice *n) {
    note_loss(w, n);
    if (w->rank == 0) send_to_all(w, n);
}

static void end_connection(cpa_watch *w, int32_t peer) {
    const cpa_notice ended = {.kind = CPA_NOTICE_ENDED, .rank = peer};
    connection *l = &w->connections[peer];
    cpa_socket_close(&l->fd);
    if (!l->left) report(w, &ended);
}

/* Others speak of themselves to rank 0, which speaks of all. */
static int is_sound(const cpa_watch *w, int32_t peer, const cpa_notice *n) {
    const int64_t call = n->refusal.call;
    return n->kind >= 0 && n->kind <= CPA_NOTICE_REFUSED && n->rank >= 0 && n->rank < w->size &&
           (peer == 0 || n->rank == peer) && n->waits_for >= -1 && n->waits_for < w->size && call >= 0 &&
           call < INT64_MAX && (n->kind != CPA_NOTICE_REFUSED || n->status != CPA_OK);
}

static void receive_notice(cpa_watch *w, int32_t peer, cpa_notice *n) {
    connection *l = &w->connections[peer];
    if (!is_sound(w, peer, n)) {
        end_connection(w, peer);
        return;
    }
    n->status = cpa_status_from(n->status);
    n->message[sizeof n->message - 1] = 0;
    l->received_s = cpa_clock_now();
    if (n->kind == CPA_NOTICE_HEARTBEAT) {
        w->heartbeats[peer] = *n;
        return;
    }
    if (n->kind == CPA_NOTICE_LEFT && n->rank == peer) l->left = 1;
    report(w, n);
}

static void read_connection(cpa_watch *w, int32_t peer) {
    connection *l = &w->connections[peer];
    while (l->fd >= 0) {
        ssize_t n = recv(l->fd, l->in + l->n_in, sizeof l->in - l->n_in, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            end_connection(w, peer);
            return;
        }
        l->n_in += (size_t)n;
        if (l->n_in < sizeof l->in) continue;
        cpa_notice arrived;
        memcpy(&arrived, l->in, sizeof arrived);
        l->n_in = 0;
        receive_notice(w, peer, &arrived);
    }
}

/* ---- the thread ---- */

static void send_queued(cpa_watch *w) {
    cpa_notice queued[sizeof w->queued / sizeof w->queued[0]];
    pthread_mutex_lock(&w->lock);
    const int n = w->n_queued;
    memcpy(queued, w->queued, (size_t)n * sizeof queued[0]);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < n; i++) send_to_all(w, &queued[i]);
    /* Now only: who has told it may end the process. */
    pthread_mutex_lock(&w->lock);
    w->n_queued -= n;
    memmove(w->queued, w->queued + n, (size_t)w->n_queued * sizeof w->queued[0]);
    pthread_mutex_unlock(&w->lock);
}

static void send_heartbeat(cpa_watch *w, double now) {
    const double since = atomic_load(&w->waits_since);
    cpa_notice own = {.kind = CPA_NOTICE_HEARTBEAT, .rank = w->rank, .waits_for = -1};
    pthread_mutex_lock(&w->lock);
    own.works = w->works;
    pthread_mutex_unlock(&w->lock);
    if (since > 0) {
        own.waits_for = atomic_load(&w->waits_for);
        own.waited_s = (float)(now - since);
    }
    w->heartbeats[w->rank] = own;
    send_to_all(w, &own);
}

static void find_silent(cpa_watch *w, double now) {
    const double timeout_s = atomic_load(&w->timeout_s);
    for (int32_t peer = 0; peer < w->size; peer++) {
        connection *l = &w->connections[peer];
        if (l->fd < 0 || l->left || now - l->received_s <= timeout_s) continue;
        cpa_notice silent = {.kind = CPA_NOTICE_SILENT, .rank = peer};
        snprintf(silent.message, sizeof silent.message, "has not been heard of for %.1f s: it is stopped, or cut off",
                 now - l->received_s);
        cpa_socket_close(&l->fd);
        report(w, &silent);
    }
}

/* Rank 0: two ranks wait, and have not done the same. */
static void end_difference(cpa_watch *w, int32_t rank, int32_t other) {
    const char *difference = atomic_load(&w->difference);
    cpa_notice to_all = {.kind = CPA_NOTICE_SILENT, .rank = other},
               to_other = {.kind = CPA_NOTICE_SILENT, .rank = rank};
    snprintf(to_all.message, sizeof to_all.message, "%s rank %d, and both wait", difference, rank);
    snprintf(to_other.message, sizeof to_other.message, "%s rank %d, and both wait", difference, other);
    report(w, &to_all);
    send_notice(&w->connections[other], &to_other);
    w->heartbeats[rank].waited_s = 0;
}

/* Rank 0: whether ranks wait for each other since they do not do the same. */
static void find_difference(cpa_watch *w) {
    const double limit = atomic_load(&w->timeout_s);
    for (int32_t other = 1; other < w->size; other++) {
        for (int32_t rank = 0; rank < other; rank++) {
            const cpa_notice *a = &w->heartbeats[rank], *b = &w->heartbeats[other];
            const int wait = a->waits_for >= 0 && b->waits_for >= 0 && a->waited_s >= limit && b->waited_s >= limit;
            if (!wait || w->connections[other].fd < 0 || !cpa_works_differ(&a->works, &b->works)) continue;
            end_difference(w, rank, other);
            return;
        }
    }
}

/* Rank 0: whether all ranks wait, and have for long. */
static void find_deadlock(cpa_watch *w) {
    const double limit = DEADLOCK_TIMEOUTS * atomic_load(&w->timeout_s);
    const int32_t last = w->size - 1;
    for (int32_t rank = 0; rank < w->size; rank++) {
        const cpa_notice *b = &w->heartbeats[rank];
        if ((rank > 0 && w->connections[rank].fd < 0) || b->waits_for < 0 || b->waited_s < limit) return;
    }
    cpa_notice all = {.kind = CPA_NOTICE_SILENT, .rank = last}, to_last = {.kind = CPA_NOTICE_SILENT, .rank = 0};
    snprintf(all.message, sizeof all.message, "waits for rank %d and rank 0 for rank %d, as all ranks do, for %.0f s",
             w->heartbeats[last].waits_for, w->heartbeats[0].waits_for, limit);
    report(w, &all);
    snprintf(to_last.message, sizeof to_last.message,
             "waits for rank %d and rank %d for rank %d, as all ranks do, for %.0f s", w->heartbeats[0].waits_for, last,
             w->heartbeats[last].waits_for, limit);
    send_notice(&w->connections[last], &to_last);
    w->heartbeats[0].waited_s = 0;
}

static void wait_for_events(cpa_watch *w) {
    struct pollfd pollers[CPA_COMM_MAX_RANKS + 1] = {{.fd = w->wake, .events = POLLIN}};
    int32_t ranks[CPA_COMM_MAX_RANKS + 1];
    nfds_t n = 1;
    for (int32_t peer = 0; peer < w->size; peer++) {
        const connection *l = &w->connections[peer];
        if (l->fd < 0) continue;
        ranks[n] = peer;
        pollers[n++] = (struct pollfd){.fd = l->fd, .events = (short)(POLLIN | (l->n_out ? POLLOUT : 0))};
    }
    if (poll(pollers, n, (int)(HEARTBEAT_S * 1e3)) <= 0) return;
    uint64_t count;
    if (pollers[0].revents) (void)!read(w->wake, &count, sizeof count);
    for (nfds_t i = 1; i < n; i++) {
        if (pollers[i].revents & POLLOUT) flush_connection(&w->connections[ranks[i]]);
        if (pollers[i].revents & ~POLLOUT) read_connection(w, ranks[i]);
    }
}

static void *run(void *watch) {
    cpa_watch *w = watch;
    double last = cpa_clock_now(), last_heartbeat = 0;
    while (!atomic_load(&w->ending)) {
        wait_for_events(w);
        send_queued(w);
        const double now = cpa_clock_now();
        if (now - last > STOPPED_S) { /* this rank was stopped itself: what others have said is only read now */
            for (int32_t peer = 0; peer < w->size; peer++) w->connections[peer].received_s = now;
        }
        last = now;
        find_silent(w, now);
        if (now - last_heartbeat < HEARTBEAT_S) continue;
        last_heartbeat = now;
        send_heartbeat(w, now);
        if (w->rank > 0) continue;
        find_difference(w);
        find_deadlock(w);
    }
    send_queued(w);
    return NULL;
}

/* ---- what this rank says ---- */

/* Of one who has given up the first reason is told: what fails after that follows from it. */
static void queue_notice(cpa_watch *w, const cpa_notice *n) {
    const uint64_t one = 1;
    pthread_mutex_lock(&w->lock);
    const int follows = w->gave_up && n->kind == CPA_NOTICE_REFUSED;
    if (!follows && w->n_queued < (int)(sizeof w->queued / sizeof w->queued[0])) w->queued[w->n_queued++] = *n;
    w->gave_up |= n->refusal.channel < 0;
    pthread_mutex_unlock(&w->lock);
    (void)!write(w->wake, &one, sizeof one);
}

void cpa_watch_refuse(cpa_watch *w, const cpa_call_refusal *refusal, cpa_status status, const char *message) {
    enum { MOST_MS = 100 }; /* the process may end next */
    cpa_notice n = {.kind = CPA_NOTICE_REFUSED, .rank = w->rank, .refusal = *refusal, .status = status};
    snprintf(n.message, sizeof n.message, "%s", message);
    queue_notice(w, &n);
    for (int i = 0; i < MOST_MS; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        pthread_mutex_lock(&w->lock);
        const int left = w->n_queued;
        pthread_mutex_unlock(&w->lock);
        if (left == 0) return;
    }
}

void cpa_watch_note_wait(cpa_watch *w, int32_t peer) {
    atomic_store(&w->waits_for, peer);
    atomic_store(&w->waits_since, peer < 0 ? 0 : cpa_clock_now());
}

void cpa_watch_note_work(cpa_watch *w, cpa_work work, const char *difference) {
    atomic_store(&w->difference, difference);
    pthread_mutex_lock(&w->lock);
    cpa_works_add(&w->works, work);
    pthread_mutex_unlock(&w->lock);
}

void cpa_watch_set_timeout(cpa_watch *w, double seconds) {
    atomic_store(&w->timeout_s, fmax(seconds, LEAST_SILENCE_S));
}

/* ---- life ---- */

/* Rank 0: takes the ranks that connect, for so long. */
static void admit(cpa_watch *w, int listener, const cpa_job_key *key) {
    const double deadline = cpa_clock_now() + CONNECT_S;
    cpa_reception reception;
    cpa_error why = {CPA_OK, "they have not connected to rank 0"};
    int32_t missing = w->size - 1;
    cpa_reception_open(listener, CPA_PURPOSE_WATCH, w->rank, w->size, key, &reception);
    while (missing > 0) {
        cpa_hello who;
        int fd;
        if (cpa_reception_next(&reception, deadline, &fd, &who, &why) != CPA_OK || fd < 0) break;
        if (who.size != w->size || who.rank <= 0 || who.rank >= w->size || w->connections[who.rank].fd >= 0) {
            cpa_socket_close(&fd);
            continue;
        }
        w->connections[who.rank].fd = fd;
        missing--;
    }
    cpa_reception_close(&reception);
    if (missing > 0) cpa_log(CPA_LOG_WARN, "%d of %d ranks are not watched: %s", missing, w->size, why.message);
}

static void connect_to_first(cpa_watch *w, const cpa_endpoint *meeting, const cpa_job_key *key) {
    const cpa_caller caller = {.hello = {.purpose = CPA_PURPOSE_WATCH, .rank = w->rank, .to = 0, .size = w->size},
                               .key = key};
    cpa_error why = {CPA_OK, "rank 0 cannot listen"};
    if (meeting->n_addresses > 0 &&
        cpa_handshake_connect(&caller, meeting, cpa_clock_now() + CONNECT_S, &w->connections[0].fd, &why) == CPA_OK)
        return;
    cpa_log(CPA_LOG_WARN, "rank %d is not watched: %s", w->rank, why.message);
}

/* The thread takes no signals: they are the program's. */
cpa_status cpa_watch_start(cpa_watch *w, cpa_error *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(&w->thread, NULL, run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    w->started = code == 0;
    return code == 0 ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "no thread that watches the ranks: %s", strerror(code));
}

static void release(cpa_watch *w) {
    for (int32_t rank = 0; rank < w->size; rank++) cpa_socket_close(&w->connections[rank].fd);
    cpa_socket_close(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

cpa_watch *cpa_watch_create(int32_t rank, int32_t size, double timeout_s) {
    cpa_watch *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->rank = rank;
    w->size = size;
    w->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    atomic_init(&w->timeout_s, fmax(timeout_s, LEAST_SILENCE_S));
    atomic_init(&w->difference, "does something else than");
    pthread_mutex_init(&w->lock, NULL);
    for (int32_t r = 0; r < w->size; r++) w->connections[r].fd = w->heartbeats[r].waits_for = -1;
    cpa_works_forget(&w->works);
    if (w->wake >= 0) return w;
    release(w);
    return NULL;
}

void cpa_watch_listen(const char *host, cpa_endpoint *out, int *listener) {
    cpa_error why;
    *out = (cpa_endpoint){.n_addresses = 0};
    *listener = -1;
    if (cpa_socket_listen(host, 0, listener, &why) == CPA_OK && cpa_endpoint_of(*listener, out, &why) == CPA_OK) return;
    cpa_log(CPA_LOG_WARN, "no rank is watched: %s", why.message);
    cpa_socket_close(listener);
    out->n_addresses = 0;
}

void cpa_watch_join(cpa_watch *w, const cpa_endpoint *meeting, const cpa_job_key *key, int listener) {
    if (w->rank == 0 && listener >= 0) admit(w, listener, key);
    if (w->rank != 0) connect_to_first(w, meeting, key);
    for (int32_t rank = 0; rank < w->size; rank++) w->connections[rank].received_s = cpa_clock_now();
}

void cpa_watch_stop(cpa_watch *w) {
    if (!w) return;
    if (w->started) {
        const cpa_notice leaving = {.kind = CPA_NOTICE_LEFT, .rank = w->rank};
        atomic_store(&w->ending, 1);
        queue_notice(w, &leaving);
        pthread_join(w->thread, NULL);
    }
    release(w);
}
