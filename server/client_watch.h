/* Tells when clients leave whose connections are suspended: libmicrohttpd does not look at those. */
#ifndef CPA_SERVER_CLIENT_WATCH_H
#define CPA_SERVER_CLIENT_WATCH_H

#include <pthread.h>
#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_client_watch {
    /* Set by the caller; called by the thread of the watch. */
    /* The peer of `key` sends no more: it has closed, or shut down that side alone. */
    void (*on_silent)(void *ctx, uint64_t key);
    /* The peer of `key` takes nothing any more either; may come more than once. */
    void (*on_gone)(void *ctx, uint64_t key);
    void (*on_tick)(void *ctx); /* every tick_ms milliseconds, or more often */
    int tick_ms;
    void *ctx;
    /* The watch's own. */
    int epoll_fd, stop_fd;
    pthread_t thread;
} cpa_client_watch;

cpa_status cpa_client_watch_start(cpa_client_watch *watch, cpa_error *err);
void cpa_client_watch_stop(cpa_client_watch *watch);

/* Any thread. A call that was about to come may still come after the removal. */
void cpa_client_watch_add(cpa_client_watch *watch, int socket, uint64_t key);
void cpa_client_watch_remove(cpa_client_watch *watch, int socket);

#endif
