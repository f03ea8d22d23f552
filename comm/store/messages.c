/* Messages over a mesh: frames on the connection of two ranks, moved along by whoever tests for one.
 *
 * A frame is a head (tag, length) and the bytes. What arrives goes straight to where it is expected; what is not
 * expected yet is kept until it is. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/min_max.h"
#include "comm/store/mesh.h"

typedef struct frame_head {
    int64_t bytes;
    int32_t tag;
    uint32_t magic; /* a connection that lost its place is noticed */
} frame_head;

#define FRAME_MAGIC UINT32_C(0x63706631)

/* What a message may have: a head that says more is none. */
#define MOST_BYTES ((int64_t)1 << 40)

/* Room that a message gets which nobody expects yet; from then on twice what has arrived. */
#define LEAST_ROOM ((int64_t)64 << 10)

static const char no_memory[] = "no memory for a message that has arrived";

/* How long a communicator that is closed waits for the others to be closed. */
#define LINGER_S 1.0

/* A message that is sent, expected, or (arrived before it was expected) kept. */
struct cpa_comm_request {
    cpa_comm_request *next;
    int32_t peer, tag;
    int is_send;
    int given_up; /* a send that is through in part: the rest is a copy, and goes on */
    int is_kept;
    int done;
    /* CPA_OK while it goes well; the connection says why a request failed, unless its size was wrong. */
    cpa_status failed;
    frame_head head;
    int64_t head_at, at; /* bytes of the head, and of the message, that are through */
    int64_t bytes;       /* bytes of a receive, as expected */
    char *data;
    int64_t capacity; /* room of `data` in a kept message, which grows with what arrives */
};

typedef struct request_list {
    cpa_comm_request *first, **last;
} request_list;

/* One connection. */
typedef struct link {
    int fd;
    cpa_error failure; /* why it is gone */
    request_list sends, expected, kept;
    frame_head head; /* head of the frame that arrives */
    int64_t head_at;
    /* Request that the frame's bytes go to, expected or kept; NULL with a complete head: they are dropped. */
    cpa_comm_request *into;
    int64_t left; /* bytes of it that are to come */
} link;

typedef struct tcp_state {
    cpa_mesh mesh;
    link links[CPA_COMM_MAX_RANKS];
    cpa_comm_request *free_requests;
} tcp_state;

/* ---- lists ---- */

static void list_init(request_list *list) {
    list->first = NULL;
    list->last = &list->first;
}

static void list_append(request_list *list, cpa_comm_request *r) {
    r->next = NULL;
    *list->last = r;
    list->last = &r->next;
}

static void list_remove(request_list *list, cpa_comm_request *r) {
    cpa_comm_request **at = &list->first;
    while (*at && *at != r) at = &(*at)->next;
    if (!*at) return;
    *at = r->next;
    if (list->last == &r->next) list->last = at;
}

static cpa_comm_request *list_find(const request_list *list, int32_t tag) {
    cpa_comm_request *r = list->first;
    while (r && r->tag != tag) r = r->next;
    return r;
}

static cpa_comm_request *take(tcp_state *s, cpa_error *err) {
    cpa_comm_request *r = s->free_requests;
    if (r) {
        s->free_requests = r->next;
    } else {
        r = malloc(sizeof *r);
        if (!r) cpa_fail(err, CPA_NO_MEMORY, "no memory for a message");
    }
    return r;
}

static void put_back(tcp_state *s, cpa_comm_request *r) {
    *r = (cpa_comm_request){.next = s->free_requests};
    s->free_requests = r;
}

/* ---- bytes ---- */

static void break_link(tcp_state *s, int32_t peer, const char *why) {
    link *l = &s->links[peer];
    if (l->fd < 0) return;
    cpa_fail(&l->failure, CPA_COMM, "the connection to rank %d: %s", peer, why);
    l->fd = -1; /* the mesh closes it */
    shutdown(s->mesh.peers[peer], SHUT_RDWR);
}

/* Moves some bytes; 0 when no more can be moved now, or the connection is gone. */
static int64_t move_out(tcp_state *s, int32_t peer, const void *data, int64_t bytes) {
    ssize_t n = send(s->links[peer].fd, data, (size_t)bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) break_link(s, peer, strerror(errno));
    return n > 0 ? n : 0;
}

static int64_t move_in(tcp_state *s, int32_t peer, void *data, int64_t bytes) {
    ssize_t n = recv(s->links[peer].fd, data, (size_t)bytes, MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR) break_link(s, peer, strerror(errno));
    if (n == 0) break_link(s, peer, "it has ended");
    return n > 0 ? n : 0;
}

/* ---- sending ---- */

/* Whether the message is through. */
static int send_some(tcp_state *s, int32_t peer, cpa_comm_request *r) {
    const int64_t head_bytes = (int64_t)sizeof r->head;
    if (r->head_at < head_bytes) {
        r->head_at += move_out(s, peer, (const char *)&r->head + r->head_at, head_bytes - r->head_at);
        if (r->head_at < head_bytes) return 0;
    }
    while (r->at < r->bytes) {
        int64_t n = move_out(s, peer, r->data + r->at, r->bytes - r->at);
        if (n == 0) return 0;
        r->at += n;
    }
    return 1;
}

static void send_all(tcp_state *s, int32_t peer) {
    link *l = &s->links[peer];
    for (cpa_comm_request *r = l->sends.first; r && l->fd >= 0 && send_some(s, peer, r); r = l->sends.first) {
        r->done = 1;
        list_remove(&l->sends, r);
        if (!r->given_up) continue;
        free(r->data);
        r->given_up = 0;
        put_back(s, r);
    }
}

/* ---- receiving ---- */

/* A whole message has come to where it goes. */
static void complete(link *l) {
    if (l->into) l->into->done = 1;
    l->into = NULL;
    l->head_at = 0;
}

/* Decides where the frame whose head is complete goes. */
static void begin_frame(tcp_state *s, int32_t peer) {
    link *l = &s->links[peer];
    const frame_head *head = &l->head;
    if (head->magic != FRAME_MAGIC || head->bytes < 0 || head->bytes > MOST_BYTES || head->tag < 0 ||
        head->tag >= CPA_COMM_TAGS) {
        break_link(s, peer, "what arrived is no message");
        return;
    }
    l->left = head->bytes;
    l->into = list_find(&l->expected, head->tag);
    if (l->into) {
        list_remove(&l->expected, l->into);
        l->into->head = *head;
        if (l->into->bytes == head->bytes) return;
        l->into->failed = CPA_COMM; /* and its bytes go nowhere */
        l->into = NULL;
        return;
    }
    cpa_comm_request *kept = take(s, NULL);
    if (!kept) {
        break_link(s, peer, no_memory);
        return;
    }
    *kept = (cpa_comm_request){.peer = peer, .tag = head->tag, .is_kept = 1, .head = *head, .bytes = head->bytes};
    list_append(&l->kept, kept);
    l->into = kept;
}

/* Where the next bytes of the frame go, and how many. */
static char *find_room(tcp_state *s, int32_t peer, char *nowhere, int64_t nowhere_bytes, int64_t *bytes) {
    const link *l = &s->links[peer];
    cpa_comm_request *into = l->into;
    *bytes = l->left;
    if (!into) {
        *bytes = cpa_min64(l->left, nowhere_bytes);
        return nowhere;
    }
    if (into->is_kept) {
        const int64_t room = cpa_min64(into->bytes, cpa_max64(LEAST_ROOM, 2 * into->at));
        if (into->at == into->capacity && !cpa_array_reserve(&into->data, &into->capacity, room, 1)) {
            break_link(s, peer, no_memory);
            return NULL;
        }
        *bytes = cpa_min64(l->left, into->capacity - into->at);
    }
    return into->data + into->at;
}

/* Takes bytes of the frame that arrives; whether there may be more. */
static int receive_some(tcp_state *s, int32_t peer) {
    link *l = &s->links[peer];
    const int64_t head_bytes = (int64_t)sizeof l->head;
    char nowhere[4096];
    if (l->head_at < head_bytes) {
        int64_t n = move_in(s, peer, (char *)&l->head + l->head_at, head_bytes - l->head_at);
        l->head_at += n;
        if (l->head_at < head_bytes) return n > 0;
        begin_frame(s, peer);
    }
    if (l->left > 0 && l->fd >= 0) {
        int64_t room;
        char *to = find_room(s, peer, nowhere, (int64_t)sizeof nowhere, &room);
        if (!to) return 0;
        int64_t n = move_in(s, peer, to, room);
        l->left -= n;
        if (l->into) l->into->at += n;
        if (n == 0) return 0;
    }
    if (l->left == 0) complete(l);
    return 1;
}

static void progress(tcp_state *s) {
    struct pollfd pollers[CPA_COMM_MAX_RANKS];
    int32_t ranks[CPA_COMM_MAX_RANKS], n = 0;
    for (int32_t peer = 0; peer < s->mesh.size; peer++) {
        const link *l = &s->links[peer];
        if (l->fd < 0) continue;
        ranks[n] = peer;
        pollers[n++] = (struct pollfd){.fd = l->fd, .events = (short)(POLLIN | (l->sends.first ? POLLOUT : 0))};
    }
    if (poll(pollers, (nfds_t)n, 0) <= 0) return;
    for (int32_t i = 0; i < n; i++) {
        const link *l = &s->links[ranks[i]];
        if (pollers[i].revents & POLLOUT) send_all(s, ranks[i]);
        if (pollers[i].revents & ~POLLOUT) {
            while (l->fd >= 0 && receive_some(s, ranks[i])) continue;
        }
    }
}

/* ---- the table ---- */

static cpa_status tcp_send(void *state, int32_t peer, int32_t tag, const void *data, int64_t bytes,
                           cpa_comm_request **out, cpa_error *err) {
    tcp_state *s = state;
    link *l = &s->links[peer];
    if (bytes > MOST_BYTES)
        return cpa_fail(err, CPA_INVALID, "a message of %" PRId64 " bytes, expected at most %" PRId64, bytes,
                        MOST_BYTES);
    cpa_comm_request *r = take(s, err);
    if (!r) return CPA_NO_MEMORY;
    *r = (cpa_comm_request){.peer = peer,
                            .tag = tag,
                            .is_send = 1,
                            .head = {bytes, tag, FRAME_MAGIC},
                            .bytes = bytes,
                            .data = (char *)(uintptr_t)data};
    list_append(&l->sends, r);
    if (l->sends.first == r && l->fd >= 0) send_all(s, peer);
    *out = r;
    return CPA_OK;
}

static cpa_status tcp_receive(void *state, int32_t peer, int32_t tag, void *data, int64_t bytes, cpa_comm_request **out,
                              cpa_error *err) {
    tcp_state *s = state;
    link *l = &s->links[peer];
    cpa_comm_request *r = take(s, err);
    if (!r) return CPA_NO_MEMORY;
    *r = (cpa_comm_request){.peer = peer, .tag = tag, .bytes = bytes, .data = data};
    cpa_comm_request *kept = list_find(&l->kept, tag);
    if (!kept) {
        list_append(&l->expected, r);
    } else {
        /* What is there moves over; the rest of it, if any, comes here. */
        r->head = kept->head;
        if (kept->bytes == bytes) {
            if (kept->at > 0) memcpy(data, kept->data, (size_t)kept->at);
            r->at = kept->at;
            r->done = kept->done;
        } else {
            r->failed = CPA_COMM;
        }
        if (l->into == kept) l->into = r->failed ? NULL : r;
        list_remove(&l->kept, kept);
        free(kept->data);
        put_back(s, kept);
    }
    *out = r;
    return CPA_OK;
}

/* Takes a request out of wherever it is. */
static void forget(tcp_state *s, cpa_comm_request *r) {
    link *l = &s->links[r->peer];
    if (r->is_send) {
        list_remove(&l->sends, r);
    } else {
        list_remove(&l->expected, r);
        if (l->into == r) l->into = NULL; /* the rest goes nowhere */
    }
    put_back(s, r);
}

static cpa_status tcp_test(void *state, cpa_comm_request *r, int *done, cpa_error *err) {
    tcp_state *s = state;
    const link *l = &s->links[r->peer];
    *done = 0;
    if (!r->done && !r->failed) progress(s);
    if (r->done) {
        *done = 1;
        put_back(s, r);
        return CPA_OK;
    }
    if (!r->failed && l->fd >= 0) return CPA_OK;
    const int32_t peer = r->peer;
    const int64_t got = r->head.bytes, expected = r->bytes;
    const int wrong_size = r->failed != CPA_OK;
    forget(s, r);
    if (!wrong_size) return cpa_fail(err, CPA_COMM, "%s", l->failure.message);
    return cpa_fail(err, CPA_COMM, "rank %d: received %" PRId64 " bytes from rank %d, expected %" PRId64, s->mesh.rank,
                    got, peer, expected);
}

/* Lets go of the caller's buffer of a send; whether it goes on without. */
static int detach(cpa_comm_request *r) {
    char *rest = malloc((size_t)(r->bytes - r->at) + 1);
    if (!rest) return 0;
    if (r->bytes > r->at) memcpy(rest, r->data + r->at, (size_t)(r->bytes - r->at));
    r->data = rest;
    r->bytes -= r->at;
    r->at = 0;
    r->given_up = 1;
    return 1;
}

/* A message that is sent in part cannot be taken back: other messages follow it. */
static void tcp_cancel(void *state, cpa_comm_request *r) {
    tcp_state *s = state;
    if (r->is_send && !r->done && r->head_at > 0 && s->links[r->peer].fd >= 0) {
        if (detach(r)) return;
        break_link(s, r->peer, "a message on it was given up");
    }
    forget(s, r);
}

static void free_list(cpa_comm_request *first, int owns_data) {
    while (first) {
        cpa_comm_request *next = first->next;
        if (owns_data || first->given_up) free(first->data);
        free(first);
        first = next;
    }
}

/* Says that nothing more is sent, and takes what the others still send: what this rank sent last would be lost if its
 * socket were closed before. Waits a second at most. */
static void linger(tcp_state *s) {
    const double end = cpa_clock_now() + LINGER_S;
    for (int32_t peer = 0; peer < s->mesh.size; peer++) {
        if (s->links[peer].fd >= 0) shutdown(s->links[peer].fd, SHUT_WR);
    }
    for (int32_t peer = 0; peer < s->mesh.size; peer++) {
        while (s->links[peer].fd >= 0 && cpa_clock_now() < end) {
            struct pollfd poller = {.fd = s->links[peer].fd, .events = POLLIN};
            char nowhere[4096];
            if (poll(&poller, 1, 10) > 0) move_in(s, peer, nowhere, sizeof nowhere);
        }
    }
}

/* All but the connections. */
static void release(tcp_state *s) {
    for (int32_t peer = 0; peer < s->mesh.size; peer++) {
        free_list(s->links[peer].sends.first, 0);
        free_list(s->links[peer].expected.first, 0);
        free_list(s->links[peer].kept.first, 1);
    }
    free_list(s->free_requests, 0);
    free(s);
}

static void tcp_close(void *state) {
    tcp_state *s = state;
    linger(s);
    cpa_mesh_close(&s->mesh);
    release(s);
}

cpa_status cpa_mesh_messages(const cpa_mesh *mesh, cpa_comm_ops *ops, void **state, cpa_error *err) {
    static const cpa_comm_ops tcp = {sizeof tcp, "tcp", tcp_send, tcp_receive, tcp_test, tcp_cancel, tcp_close};
    tcp_state *s = calloc(1, sizeof *s);
    if (!s) return cpa_fail(err, CPA_NO_MEMORY, "no memory for a communicator");
    s->mesh = *mesh;
    for (int32_t peer = 0; peer < mesh->size; peer++) {
        link *l = &s->links[peer];
        l->fd = mesh->peers[peer];
        list_init(&l->sends);
        list_init(&l->expected);
        list_init(&l->kept);
    }
    *ops = tcp;
    *state = s;
    return CPA_OK;
}

cpa_status cpa_mesh_comm(const cpa_mesh *mesh, const char *host, const cpa_comm_options *options, cpa_comm **out,
                         cpa_error *err) {
    cpa_comm_ops ops;
    void *state;
    CPA_TRY(cpa_mesh_messages(mesh, &ops, &state, err));
    cpa_status status = cpa_comm_create_at(host, &ops, state, mesh->rank, mesh->size, options, out, err);
    if (status != CPA_OK) release(state);
    return status;
}
