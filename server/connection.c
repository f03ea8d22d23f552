#include "server/connection.h"

#include <linux/tcp.h>
#include <math.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <utlist.h>

#include "base/check.h"
#include "base/clock.h"
#include "server/request_head.h"
#include "server/server_internal.h"

typedef struct cpa_connection_state {
    int is_crowded;
    int has_spoken;  /* at least the first line of a request has come */
    const char *uri; /* URI of the request, uri_bytes long; owned by the connection's thread */
    size_t uri_bytes;
    int has_odd_uri;
    int socket;
    cpa_connections *all;
    /* Since when a request is being read, seconds; 0: one has come and is not answered yet. Guarded by all->lock. */
    double reading_since;
    struct cpa_connection_state *prev, *next;
} state;

static state *state_of(struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info ? info->socket_context : NULL;
}

int cpa_connection_is_crowded(struct MHD_Connection *connection) {
    const state *s = state_of(connection);
    return s && s->is_crowded;
}

void *cpa_connection_speaks(void *server, const char *uri, struct MHD_Connection *connection) {
    (void)server;
    state *s = state_of(connection);
    if (!s) return NULL;
    s->has_spoken = 1;
    s->uri = uri;
    s->uri_bytes = uri ? strlen(uri) : 0;
    const char *nul = uri ? strstr(uri, "%00") : NULL; /* of which libmicrohttpd makes the end of the path */
    s->has_odd_uri = !uri || strchr(uri, ' ') || (nul && nul < uri + strcspn(uri, "?"));
    return NULL;
}

int cpa_connection_check_head(struct MHD_Connection *connection, const char *method, const char *version,
                              cpa_refusal *refusal) {
    const state *s = state_of(connection);
    if (!s) return cpa_refuse(refusal, MHD_HTTP_INTERNAL_SERVER_ERROR, NULL, NULL, "no memory for the connection");
    return cpa_request_head_check(connection, method, s->uri, s->uri_bytes, s->has_odd_uri, version, refusal);
}

static void set_reading_since(struct MHD_Connection *connection, double when) {
    state *s = state_of(connection);
    if (!s) return;
    pthread_mutex_lock(&s->all->lock);
    s->reading_since = when;
    pthread_mutex_unlock(&s->all->lock);
}

void cpa_connection_has_read(struct MHD_Connection *connection) {
    set_reading_since(connection, 0);
}

void cpa_connection_reads(struct MHD_Connection *connection) {
    set_reading_since(connection, cpa_clock_now());
}

void cpa_connection_end_slow(cpa_connections *connections, double seconds) {
    const double since = cpa_clock_now() - seconds;
    pthread_mutex_lock(&connections->lock);
    for (state *s = connections->first; s; s = s->next) {
        if (s->reading_since == 0 || s->reading_since > since) continue;
        cpa_log(CPA_LOG_WARN, "server: a connection ends whose request has not come whole in %g s", seconds);
        s->reading_since = 0;
        shutdown(s->socket, SHUT_RDWR); /* which libmicrohttpd sees, and closes */
    }
    pthread_mutex_unlock(&connections->lock);
}

/* Of the crowded ones, the oldest whose request has not come. By the lock. */
static void make_room(cpa_connections *connections) {
    state *s = connections->first;
    while (s && !(s->is_crowded && s->reading_since > 0)) s = s->next;
    if (!s) return;
    s->reading_since = 0;
    shutdown(s->socket, SHUT_RDWR);
}

static state *open_state(cpa_server *server, struct MHD_Connection *connection, int is_crowded) {
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    state *s = info ? calloc(1, sizeof *s) : NULL;
    if (!s) return NULL;
    *s = (state){
        .is_crowded = is_crowded, .socket = info->connect_fd, .all = &server->open, .reading_since = cpa_clock_now()};
    /* What a client does not take, its system does not either, once its buffers are full. */
    const unsigned ms = (unsigned)fmin(1000 * server->options.idle_timeout_s, 1e9);
    setsockopt(s->socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
    pthread_mutex_lock(&s->all->lock);
    s->all->n_crowded += is_crowded;
    if (is_crowded && s->all->n_crowded > CPA_TOLD_CONNECTIONS / 2) make_room(s->all);
    DL_APPEND(s->all->first, s);
    pthread_mutex_unlock(&s->all->lock);
    return s;
}

/* The socket is closed after this. */
static void close_state(state *s) {
    pthread_mutex_lock(&s->all->lock);
    DL_DELETE(s->all->first, s);
    s->all->n_crowded -= s->is_crowded;
    pthread_mutex_unlock(&s->all->lock);
    free(s);
}

/* libmicrohttpd closes connections whose first bytes are no request without a word, and so it does where a client
 * leaves; ports that are tried out send nothing. A line that is too long for it has been told of, and so has what was
 * answered; what a client had sent that has reset the connection since, nobody has read. */
static void log_what_was_no_request(struct MHD_Connection *connection) {
    enum { LONG_LINE = 8192, CLOSED = 7 /* TCP_CLOSE in <netinet/tcp.h>, whose tcp_info is shorter */ };
    struct tcp_info tcp = {0};
    socklen_t bytes = sizeof tcp;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (!info || getsockopt(info->connect_fd, IPPROTO_TCP, TCP_INFO, &tcp, &bytes)) return;
    if (tcp.tcpi_bytes_received == 0 || tcp.tcpi_bytes_received > LONG_LINE) return;
    const int is_reset = tcp.tcpi_state == CLOSED && tcp.tcpi_bytes_acked == 0; /* not even our end of it */
    if (tcp.tcpi_bytes_sent > 0 || is_reset) return;
    cpa_log(CPA_LOG_WARN, "server: a connection ends on which %llu bytes came that are no request of HTTP",
            (unsigned long long)tcp.tcpi_bytes_received);
}

void cpa_connection_notify(void *ctx, struct MHD_Connection *connection, void **kept,
                           enum MHD_ConnectionNotificationCode what) {
    cpa_server *server = ctx;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        const long long others = atomic_fetch_add(&server->connections, 1);
        *kept = open_state(server, connection, others >= server->options.max_connections);
        return;
    }
    state *s = *kept;
    if (s && !s->has_spoken) log_what_was_no_request(connection);
    if (s) close_state(s);
    atomic_fetch_sub(&server->connections, 1);
}
