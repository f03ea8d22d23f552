#include "comm/store/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"

/* How long one address may take to answer, and how long to wait before all are tried again. */
#define ADDRESS_S 2.0
#define RETRY_NS 50000000L

static cpa_status fail_errno(const char *call, cpa_error *err) {
    return cpa_fail(err, CPA_COMM, "%s: %s", call, strerror(errno));
}

void cpa_socket_close(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static void tune(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

/* ---- where ---- */

/* A listening socket; -1 with errno if that fails. */
static int listen_at(const struct addrinfo *at) {
    const int on = 1, off = 0;
    int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    tune(fd);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    const int why = errno;
    close(fd);
    errno = why;
    return -1;
}

/* The addresses of a name, as a list for freeaddrinfo; NULL with a reason where there are none. */
static struct addrinfo *resolve(const char *host, int32_t port, char why[128]) {
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *all = NULL;
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    const int code = getaddrinfo(host, service, &hints, &all);
    if (code == 0) return all;
    snprintf(why, 128, "%s", gai_strerror(code));
    return NULL;
}

static int listen_at_name(const char *host, int32_t port, char why[128]) {
    struct addrinfo *all = resolve(host, port, why);
    int fd = -1;
    for (const struct addrinfo *i = all; i && fd < 0; i = i->ai_next) {
        fd = listen_at(i);
        if (fd < 0) snprintf(why, 128, "%s", strerror(errno));
    }
    if (all) freeaddrinfo(all);
    return fd;
}

cpa_status cpa_socket_listen(const char *host, int32_t port, int *fd, cpa_error *err) {
    char why[128] = "";
    int listener = listen_at_name(host ? host : "::", port, why); /* "::" is IPv4 too */
    if (listener < 0 && !host) listener = listen_at_name("0.0.0.0", port, why);
    if (listener < 0)
        return cpa_fail(err, CPA_COMM, "cannot listen at %s port %d: %s", host ? host : "every address", port, why);
    *fd = listener;
    return CPA_OK;
}

static int to_text(const struct sockaddr *address, char out[CPA_ADDRESS_BYTES]) {
    const socklen_t length = address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    return getnameinfo(address, length, out, CPA_ADDRESS_BYTES, NULL, 0, NI_NUMERICHOST) == 0;
}

/* All addresses of this host, loopback last. */
static void list_addresses(cpa_endpoint *out) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0) all = NULL;
    for (int loopback = 0; loopback < 2; loopback++) {
        for (const struct ifaddrs *i = all; i && out->n_addresses < CPA_ENDPOINT_ADDRESSES; i = i->ifa_next) {
            if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || !(i->ifa_flags & IFF_LOOPBACK) != !loopback) continue;
            if (i->ifa_addr->sa_family != AF_INET && i->ifa_addr->sa_family != AF_INET6) continue;
            out->n_addresses += to_text(i->ifa_addr, out->addresses[out->n_addresses]);
        }
    }
    if (all) freeifaddrs(all);
}

cpa_status cpa_endpoint_of(int fd, cpa_endpoint *out, cpa_error *err) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage room;
    } own;
    socklen_t length = sizeof own;
    if (getsockname(fd, &own.any, &length) != 0) return fail_errno("getsockname", err);
    const int is_v6 = own.any.sa_family == AF_INET6;
    *out = (cpa_endpoint){.port = ntohs(is_v6 ? own.v6.sin6_port : own.v4.sin_port)};
    if (is_v6 ? IN6_IS_ADDR_UNSPECIFIED(&own.v6.sin6_addr) : own.v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
        list_addresses(out);
    } else {
        out->n_addresses = to_text(&own.any, out->addresses[0]);
    }
    if (out->n_addresses > 0) return CPA_OK;
    return cpa_fail(err, CPA_COMM, "this host has no address that others could reach");
}

void cpa_socket_peer(int fd, char address[CPA_ADDRESS_BYTES]) {
    struct sockaddr_storage peer;
    socklen_t length = sizeof peer;
    snprintf(address, CPA_ADDRESS_BYTES, "?");
    if (getpeername(fd, (struct sockaddr *)&peer, &length) == 0) to_text((struct sockaddr *)&peer, address);
}

/* ---- connections ---- */

/* Whether the socket is ready before the deadline. */
static int await(int fd, short events, double deadline) {
    struct pollfd poller = {.fd = fd, .events = events};
    for (;;) {
        double left = deadline - cpa_clock_now();
        int ready = poll(&poller, 1, left > 0 ? (int)(left * 1e3) + 1 : 0);
        if (ready > 0) return 1;
        if (ready < 0 && errno != EINTR) return 0;
        if (left <= 0) return 0;
    }
}

/* Whether a socket has met itself, as may happen on a port of this host that nobody listens at. */
static int is_own(int fd) {
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t here_bytes = sizeof here, there_bytes = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &here_bytes) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &there_bytes) == 0 && here_bytes == there_bytes &&
           memcmp(&here, &there, here_bytes) == 0;
}

/* A connection to one address of a name; -1 with errno if that fails. */
static int connect_one(const struct addrinfo *to, double deadline) {
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), code = 0;
    socklen_t length = sizeof code;
    if (fd < 0) return -1;
    tune(fd);
    if (connect(fd, to->ai_addr, to->ai_addrlen) != 0) code = errno;
    if (code == EINPROGRESS) {
        code = ETIMEDOUT;
        if (await(fd, POLLOUT, deadline)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &length);
    }
    if (code == 0 && is_own(fd)) code = ECONNREFUSED;
    if (code == 0) return fd;
    close(fd);
    errno = code;
    return -1;
}

static int connect_address(const char *host, int32_t port, double deadline, char why[128]) {
    struct addrinfo *all = resolve(host, port, why);
    int fd = -1;
    for (const struct addrinfo *i = all; i && fd < 0; i = i->ai_next) {
        double limit = cpa_clock_now() + ADDRESS_S;
        fd = connect_one(i, limit < deadline ? limit : deadline);
        if (fd < 0) snprintf(why, 128, "%s", strerror(errno));
    }
    if (all) freeaddrinfo(all);
    return fd;
}

cpa_status cpa_socket_connect(const cpa_endpoint *to, double deadline, int *fd, cpa_error *err) {
    const struct timespec pause = {.tv_nsec = RETRY_NS};
    char why[128] = "no address";
    do {
        for (int32_t i = 0; i < to->n_addresses; i++) {
            *fd = connect_address(to->addresses[i], to->port, deadline, why);
            if (*fd >= 0) return CPA_OK;
        }
        nanosleep(&pause, NULL);
    } while (cpa_clock_now() < deadline);
    return cpa_fail(err, CPA_COMM, "nobody answers at %s port %d: %s", to->n_addresses ? to->addresses[0] : "?",
                    to->port, why);
}

cpa_status cpa_socket_take(int listener, int *fd, cpa_error *err) {
    *fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (*fd >= 0) {
        tune(*fd);
        return CPA_OK;
    }
    switch (errno) {
        case EMFILE:
        case ENFILE:
        case ENOBUFS:
        case ENOMEM: return cpa_fail(err, CPA_NO_MEMORY, "accept: %s", strerror(errno));
        case EBADF:
        case EINVAL:
        case ENOTSOCK: return fail_errno("accept", err);
        default: return CPA_OK; /* nobody, or who has gone again */
    }
}

cpa_status cpa_socket_send(int fd, const void *data, int64_t bytes, double deadline, cpa_error *err) {
    for (int64_t at = 0; at < bytes;) {
        ssize_t n = send(fd, (const char *)data + at, (size_t)(bytes - at), MSG_NOSIGNAL);
        if (n > 0) at += n;
        if (n < 0 && errno != EAGAIN && errno != EINTR) return fail_errno("send", err);
        if (n < 0 && !await(fd, POLLOUT, deadline)) return cpa_fail(err, CPA_COMM, "send: timed out");
    }
    return CPA_OK;
}

cpa_status cpa_socket_receive(int fd, void *data, int64_t bytes, double deadline, cpa_error *err) {
    for (int64_t at = 0; at < bytes;) {
        ssize_t n = recv(fd, (char *)data + at, (size_t)(bytes - at), 0);
        if (n > 0) at += n;
        if (n == 0) return cpa_fail(err, CPA_COMM, "the other end has closed the connection");
        if (n < 0 && errno != EAGAIN && errno != EINTR) return fail_errno("recv", err);
        if (n < 0 && !await(fd, POLLIN, deadline)) return cpa_fail(err, CPA_COMM, "recv: timed out");
    }
    return CPA_OK;
}
