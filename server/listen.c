#include "server/listen.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"

/* A socket at the address, or -1 with errno. */
static int listen_at(const struct addrinfo *at) {
    int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol);
    if (fd < 0) return -1;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* a port that was left a moment ago is free */
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
    const int why = errno;
    close(fd);
    errno = why;
    return -1;
}

static int port_of(int fd) {
    struct sockaddr_storage at;
    socklen_t bytes = sizeof at;
    if (getsockname(fd, (struct sockaddr *)&at, &bytes)) return -1;
    if (at.ss_family == AF_INET6) return ntohs(((struct sockaddr_in6 *)&at)->sin6_port);
    return ntohs(((struct sockaddr_in *)&at)->sin_port);
}

cpa_status cpa_listen(const char *host, int port, int *out, int *bound, cpa_error *err) {
    if (port < 0 || port > 65535) return cpa_fail(err, CPA_INVALID, "port %d: expected 0 to 65535", port);
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    const struct addrinfo wanted = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found;
    const int failed = getaddrinfo(host, service, &wanted, &found);
    if (failed) {
        return cpa_fail(err, CPA_INVALID, "cannot listen on %s port %d: %s", host, port,
                        failed == EAI_SYSTEM ? strerror(errno) : gai_strerror(failed));
    }
    int fd = -1;
    for (const struct addrinfo *at = found; at && fd < 0; at = at->ai_next) fd = listen_at(at);
    const int why = errno;
    freeaddrinfo(found);
    if (fd < 0) return cpa_fail(err, CPA_INVALID, "cannot listen on %s port %d: %s", host, port, strerror(why));
    *out = fd;
    *bound = port_of(fd);
    return CPA_OK;
}
