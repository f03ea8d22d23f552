#include <stddef.h>
#include <sys/epoll.h>

int epoll_wait(int epoll_fd, struct epoll_event *events, int most, int timeout_ms)
    __attribute__((visibility("default")));

/* Stands in for the C library's in a program that this is linked into, so that it is what libmicrohttpd calls.
 *
 * libmicrohttpd (MHD_epoll, as of 0.9.75 and 1.0.1) has room for 128 events, and where as many come it asks for more
 * before it looks at any. Where there are no more, it waits: until something else happens, or the time-out of a
 * connection is over, when all 128 are closed. So it gets one less than it has room for, which any caller of epoll_wait
 * must be ready for, and what is left comes with the next call. */
int epoll_wait(int epoll_fd, struct epoll_event *events, int most, int timeout_ms) {
    return epoll_pwait(epoll_fd, events, most > 1 ? most - 1 : most, timeout_ms, NULL);
}
