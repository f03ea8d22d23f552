/* Resumes connections for which tokens have come, so that the engine's thread need not: each takes a lock of
 * libmicrohttpd and a system call. */
#ifndef CPA_SERVER_WAKER_H
#define CPA_SERVER_WAKER_H

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "server/in_flight.h"

typedef struct cpa_waker {
    cpa_in_flight *in;
    pthread_t thread;
    sem_t calls;
    atomic_int is_stopping;
} cpa_waker;

cpa_status cpa_waker_start(cpa_waker *waker, cpa_in_flight *in, cpa_error *err);
void cpa_waker_stop(cpa_waker *waker);

/* Has its thread wake those that are due (cpa_in_flight_wake_due), if there are any. */
void cpa_waker_call(cpa_waker *waker);

#endif
