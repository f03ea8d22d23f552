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

static int bind_to(int family, int32_t port) {
    const int on = 1, off = 0;
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0), bound;
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) {
        struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        bound = bind(fd, (const struct sockaddr *)&any, sizeof any);
    } else {
        struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        bound = bind(fd, (const struct sockaddr *)&any, sizeof any);
    }
    if (bound == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    const int why = errno;
    close(fd);
    errno = why;
    return -1;
}

cpa_status cpa_socket_listen(int32_t port, int *fd, int32_t *bound, cpa_error *err) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    int listener = bind_to(AF_INET6, port); /* IPv4 too */
    if (listener < 0) listener = bind_to(AF_INET, port);
    if (listener < 0) return cpa_fail(err, CPA_COMM, "cannot listen on TCP port %d: %s", port, strerror(errno));
    tune(listener);
    if (getsockname(listener, (struct sockaddr *)&address, &length) != 0) {
        cpa_socket_close(&listener);
        return fail_errno("getsockname", err);
    }
    *bound = ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                                 : ((struct sockaddr_in *)&address)->sin_port);
    *fd = listener;
    return CPA_OK;
}

static int to_text(const struct sockaddr *address, char out[CPA_ADDRESS_BYTES]) {
    const socklen_t length = address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
    return getnameinfo(address, length, out, CPA_ADDRESS_BYTES, NULL, 0, NI_NUMERICHOST) == 0;
}

void cpa_endpoint_here(int32_t port, cpa_endpoint *out) {
    struct ifaddrs *all = NULL;
    *out = (cpa_endpoint){.port = port};
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

void cpa_socket_peer(int fd, char address[CPA_ADDRESS_BYTES]) {
    struct sockaddr_storage peer;
    socklen_t length = sizeof peer;
    address[0] = 0;
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

/* A connection to one address of a name; -1 with errno if that fails. */
static int connect_one(const struct addrinfo *to, double deadline) {
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), code = 0;
    socklen_t length = sizeof code;
    if (fd < 0) return -1;
    tune(fd);
    if (connect(fd, to->ai_addr, to->ai_addrlen) == 0) return fd;
    code = errno;
    if (code == EINPROGRESS) {
        code = ETIMEDOUT;
        if (await(fd, POLLOUT, deadline)) getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &length);
    }
    if (code == 0) return fd;
    close(fd);
    errno = code;
    return -1;
}

static int connect_address(const char *host, int32_t port, double deadline, char why[128]) {
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *all = NULL;
    char service[16];
    int fd = -1;
    snprintf(service, sizeof service, "%d", port);
    int code = getaddrinfo(host, service, &hints, &all);
    if (code != 0) {
        snprintf(why, 128, "%s", gai_strerror(code));
        return -1;
    }
    for (const struct addrinfo *i = all; i && fd < 0; i = i->ai_next) {
        double limit = cpa_clock_now() + ADDRESS_S;
        fd = connect_one(i, limit < deadline ? limit : deadline);
        if (fd < 0) snprintf(why, 128, "%s", strerror(errno));
    }
    freeaddrinfo(all);
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

cpa_status cpa_socket_accept(int listener, double deadline, int *fd, cpa_error *err) {
    *fd = -1;
    while (await(listener, POLLIN, deadline)) {
        *fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (*fd >= 0) {
            tune(*fd);
            return CPA_OK;
        }
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) return fail_errno("accept", err);
    }
    return CPA_OK;
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
