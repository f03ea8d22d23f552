/* Tells when clients leave whose connections are suspended: libmicrohttpd does not look at those. */
#ifndef CPA_SERVER_WATCH_H
#define CPA_SERVER_WATCH_H

#include <pthread.h>
#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_watch {
    int epoll_fd, stop_fd;
    pthread_t thread;
    void (*on_gone)(void *ctx, uint64_t key);
    void *ctx;
} cpa_watch;

/* Starts a thread, which calls on_gone: once for each socket that is watched, when its peer sends no more. */
cpa_status cpa_watch_start(cpa_watch *watch, void (*on_gone)(void *ctx, uint64_t key), void *ctx, cpa_error *err);
void cpa_watch_stop(cpa_watch *watch);

/* Any thread. A call that was about to come may still come after the removal. */
void cpa_watch_add(cpa_watch *watch, int socket, uint64_t key);
void cpa_watch_remove(cpa_watch *watch, int socket);

#endif
