#include "server/waker.h"

#include "base/check.h"

static void *wake_on(void *ctx) {
    cpa_waker *waker = ctx;
    for (;;) {
        while (sem_wait(&waker->calls)) {} /* a signal may end it early */
        if (atomic_load(&waker->is_stopping)) return NULL;
        cpa_in_flight_wake_due(waker->in);
    }
}

cpa_status cpa_waker_start(cpa_waker *waker, cpa_in_flight *in, cpa_error *err) {
    *waker = (cpa_waker){.in = in};
    sem_init(&waker->calls, 0, 0);
    if (pthread_create(&waker->thread, NULL, wake_on, waker) == 0) return CPA_OK;
    sem_destroy(&waker->calls);
    return cpa_fail(err, CPA_NO_MEMORY, "the server cannot start its thread that wakes connections");
}

void cpa_waker_stop(cpa_waker *waker) {
    atomic_store(&waker->is_stopping, 1);
    sem_post(&waker->calls);
    pthread_join(waker->thread, NULL);
    sem_destroy(&waker->calls);
}

void cpa_waker_call(cpa_waker *waker) {
    if (cpa_in_flight_has_due(waker->in)) sem_post(&waker->calls);
}
