/* A pool of threads that works through numbered items; the calling thread takes part. */
#ifndef CPA_BASE_THREADS_H
#define CPA_BASE_THREADS_H

#include <stdint.h>

#include <cpattn/status.h>

#include "base/progress.h"

typedef struct cpa_threads cpa_threads;

/* One item of work. `thread` is 0 for the calling thread, below the count of the pool for the others. */
typedef void (*cpa_threads_work)(void *ctx, int64_t item, int32_t thread);

/* Starts count - 1 threads. With cpus, binds the threads to them in turn, the calling thread to the first. */
cpa_status cpa_threads_create(int32_t count, const int32_t *cpus, int32_t n_cpus, cpa_threads **out, cpa_error *err);
void cpa_threads_destroy(cpa_threads *threads);

/* Runs the items [0, items), handed out in order, and returns when all are done. The calling thread looks after
 * `progress` between its items, and while it waits for the others; NULL: after nothing. Callable from several threads,
 * one run at a time. */
void cpa_threads_run(cpa_threads *threads, int64_t items, cpa_threads_work work, void *ctx,
                     const cpa_progress *progress);

#endif
