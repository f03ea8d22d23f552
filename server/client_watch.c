#include "server/client_watch.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/check.h"

static void *watch_clients(void *ctx) {
    cpa_client_watch *watch = ctx;
    struct epoll_event events[64];
    for (;;) {
        const int n = epoll_wait(watch->epoll_fd, events, 64, watch->tick_ms);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == 0) return NULL; /* stop_fd */
            const int is_gone = (events[i].events & (EPOLLERR | EPOLLHUP)) != 0;
            (is_gone ? watch->on_gone : watch->on_silent)(watch->ctx, events[i].data.u64);
        }
        watch->on_tick(watch->ctx);
    }
}

cpa_status cpa_client_watch_start(cpa_client_watch *watch, cpa_error *err) {
    watch->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    watch->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event stop = {.events = EPOLLIN};
    if (watch->epoll_fd >= 0 && watch->stop_fd >= 0 &&
        epoll_ctl(watch->epoll_fd, EPOLL_CTL_ADD, watch->stop_fd, &stop) == 0 &&
        pthread_create(&watch->thread, NULL, watch_clients, watch) == 0) {
        return CPA_OK;
    }
    cpa_fail(err, CPA_NO_MEMORY, "the server cannot watch its clients: %s", strerror(errno));
    if (watch->epoll_fd >= 0) close(watch->epoll_fd);
    if (watch->stop_fd >= 0) close(watch->stop_fd);
    return CPA_NO_MEMORY;
}

void cpa_client_watch_stop(cpa_client_watch *watch) {
    eventfd_write(watch->stop_fd, 1);
    pthread_join(watch->thread, NULL);
    close(watch->epoll_fd);
    close(watch->stop_fd);
}

void cpa_client_watch_add(cpa_client_watch *watch, int socket, uint64_t key) {
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLET, .data.u64 = key};
    if (epoll_ctl(watch->epoll_fd, EPOLL_CTL_ADD, socket, &event)) {
        cpa_log(CPA_LOG_WARN, "server: a client that leaves will not be noticed: %s", strerror(errno));
    }
}

void cpa_client_watch_remove(cpa_client_watch *watch, int socket) {
    epoll_ctl(watch->epoll_fd, EPOLL_CTL_DEL, socket, NULL);
}
