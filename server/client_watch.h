/* Tells when clients leave whose connections are suspended: libmicrohttpd does not look at those. */
#ifndef CPA_SERVER_CLIENT_WATCH_H
#define CPA_SERVER_CLIENT_WATCH_H

#include <pthread.h>
#include <stdint.h>

#include <cpattn/status.h>

typedef struct cpa_client_watch {
    int epoll_fd, stop_fd;
    pthread_t thread;
    void (*on_gone)(void *ctx, uint64_t key);
    void (*on_tick)(void *ctx);
    int tick_ms;
    void *ctx;
} cpa_client_watch;

/* Starts a thread, which calls on_gone: once for each socket that is watched, when its peer sends no more; and
 * on_tick every so many milliseconds, or more often. */
cpa_status cpa_client_watch_start(cpa_client_watch *watch, void (*on_gone)(void *ctx, uint64_t key),
                                  void (*on_tick)(void *ctx), int tick_ms, void *ctx, cpa_error *err);
void cpa_client_watch_stop(cpa_client_watch *watch);

/* Any thread. A call that was about to come may still come after the removal. */
void cpa_client_watch_add(cpa_client_watch *watch, int socket, uint64_t key);
void cpa_client_watch_remove(cpa_client_watch *watch, int socket);

#endif
