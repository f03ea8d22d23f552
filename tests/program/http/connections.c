#include "tests/program/http/connections.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

enum { PIECE = 1 << 16, WAIT_MS = 5, SMALL_WINDOW = 4096, LARGE_WINDOW = 1 << 20 };

static int open_connection(int port, http_connection *c) {
    const struct sockaddr_in server = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int window = SMALL_WINDOW;
    c->began_s = cpa_clock_now();
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0) return 0;
    if (c->reads_nothing) setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &window, sizeof window);
    if (connect(c->fd, (const struct sockaddr *)&server, sizeof server) != 0) return 0;
    return fcntl(c->fd, F_SETFL, O_NONBLOCK) == 0;
}

static void end(http_connection *c, int left) {
    const struct linger hard = {.l_onoff = 1};
    if (left && c->leaves_hard) setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    close(c->fd);
    c->has_ended = 1;
    c->has_left = left;
    c->ended_s = cpa_clock_now();
}

static void write_on(http_connection *c) {
    const ssize_t n = send(c->fd, c->request + c->sent, c->request_bytes - c->sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) c->sent = c->request_bytes; /* the server has heard enough */
    if (n > 0) c->sent += (size_t)n;
    if (c->sent == c->request_bytes && c->says_end) shutdown(c->fd, SHUT_WR);
}

static void read_on(http_connection *c) {
    if (c->bytes + PIECE + 1 > c->capacity) {
        c->capacity = 2 * c->capacity + PIECE + 1;
        c->reply = realloc(c->reply, c->capacity);
        if (!c->reply) abort();
    }
    const ssize_t n = recv(c->fd, c->reply + c->bytes, PIECE, 0);
    if (n > 0) c->bytes += (size_t)n;
    c->reply[c->bytes] = 0;
    if (n == 0 || (n < 0 && errno != EAGAIN)) end(c, 0);
}

static void leave_if_it_is_time(http_connection *c) {
    const int enough = c->leaves_at > 0 && c->bytes >= c->leaves_at;
    const int late = c->leaves_after_s > 0 && cpa_clock_now() - c->began_s >= c->leaves_after_s;
    if (!c->has_ended && (enough || late)) end(c, 1);
}

int64_t http_run(int port, http_connection *connections, int64_t n, double limit_s) {
    struct pollfd *polled = calloc((size_t)n, sizeof *polled);
    const double begin = cpa_clock_now();
    int64_t left = n;
    if (!polled) abort();
    for (int64_t i = 0; i < n; i++) {
        if (connections[i].fd == 0 && !open_connection(port, &connections[i])) left = -1;
    }
    while (left > 0 && cpa_clock_now() - begin < limit_s) {
        for (int64_t i = 0; i < n; i++) {
            const http_connection *c = &connections[i];
            const int writes = c->sent < c->request_bytes ? POLLOUT : 0, reads = c->reads_nothing ? 0 : POLLIN;
            polled[i] = (struct pollfd){.fd = c->has_ended ? -1 : c->fd, .events = (short)(writes | reads)};
        }
        poll(polled, (nfds_t)n, WAIT_MS);
        left = 0;
        for (int64_t i = 0; i < n; i++) {
            http_connection *c = &connections[i];
            if (!c->has_ended && (polled[i].revents & POLLOUT)) write_on(c);
            if (!c->has_ended && !c->reads_nothing && (polled[i].revents & (POLLIN | POLLHUP | POLLERR))) read_on(c);
            leave_if_it_is_time(c);
            left += !c->has_ended && (!c->reads_nothing || c->sent < c->request_bytes);
        }
    }
    free(polled);
    return left;
}

void http_reads_again(http_connection *c) {
    const int window = LARGE_WINDOW; /* a small one would open by timers of TCP, 200 ms each */
    c->reads_nothing = 0;
    setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &window, sizeof window);
}

void http_release(http_connection *connections, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (connections[i].fd > 0 && !connections[i].has_ended) end(&connections[i], 1);
        free(connections[i].reply);
        connections[i].reply = NULL;
    }
}

int http_status(const http_connection *c) {
    int status;
    return c->bytes > 0 && sscanf(c->reply, "HTTP/1.%*d %d", &status) == 1 ? status : 0;
}

/* The chunks one after another, written over where they stand; NULL without the last one. */
static char *join_chunks(char *text, size_t bytes) {
    char *from = text, *to = text, *end = text + bytes;
    while (from < end) {
        char *line;
        const size_t chunk = strtoul(from, &line, 16);
        if (line == from || line + 2 > end || (size_t)(end - line) < chunk + 4) break;
        if (chunk == 0) {
            *to = 0;
            return text;
        }
        memmove(to, line + 2, chunk);
        to += chunk;
        from = line + 2 + chunk + 2;
    }
    free(text);
    return NULL;
}

char *http_body(const http_connection *c) {
    const char *head_end = c->bytes > 0 ? strstr(c->reply, "\r\n\r\n") : NULL;
    if (!head_end) return NULL;
    const char *chunked = strcasestr(c->reply, "\r\nTransfer-Encoding: chunked");
    const char *body = head_end + 4, *length = strcasestr(c->reply, "\r\nContent-Length:");
    const size_t bytes = c->bytes - (size_t)(body - c->reply);
    char *text = malloc(bytes + 1);
    if (!text) abort();
    memcpy(text, body, bytes + 1);
    if (chunked && chunked < head_end) return join_chunks(text, bytes);
    if (!length || length > head_end || strtoul(length + 17, NULL, 10) == bytes) return text;
    free(text);
    return NULL;
}

char *http_get(int port, const char *path) {
    char text[256];
    const int bytes =
        snprintf(text, sizeof text, "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
    http_connection c = {.request = text, .request_bytes = (size_t)bytes};
    const int64_t left = http_run(port, &c, 1, 10);
    char *body = left == 0 && http_status(&c) == 200 ? http_body(&c) : NULL;
    http_release(&c, 1);
    return body;
}

char *http_post_text(const char *path, const char *body) {
    char *text = NULL;
    if (asprintf(&text,
                 "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
                 "Content-Length: %zu\r\n\r\n%s",
                 path, strlen(body), body) < 0)
        abort();
    return text;
}
