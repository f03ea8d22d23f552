/* A pool of threads that works through numbered items; the calling thread takes part. */
#ifndef CPA_HOST_THREADS_H
#define CPA_HOST_THREADS_H

#include "kernels/device.h"

typedef struct cpa_host_threads cpa_host_threads;

/* One item of work. `thread` is 0 for the calling thread, below the count of the pool for the others. */
typedef void (*cpa_host_work)(void *ctx, int64_t item, int32_t thread);

/* Starts count - 1 threads. With cpus, binds the threads to them in turn, the calling thread to the first. */
cpa_status cpa_host_threads_create(int32_t count, const int32_t *cpus, int32_t n_cpus, cpa_host_threads **out,
                                   cpa_error *err);
void cpa_host_threads_destroy(cpa_host_threads *threads);

/* Runs the items [0, items), handed out in order, and returns when all are done. Between its items the calling thread
 * polls the stream. Callable from several threads, one run at a time. */
void cpa_host_threads_run(cpa_host_threads *threads, int64_t items, cpa_host_work work, void *ctx,
                          const cpa_stream *stream);

/* Moves the messages of the stream's owner. An item that runs for long on thread 0 calls it every millisecond or so. */
static inline void cpa_host_poll(const cpa_stream *stream) {
    if (stream->poll) stream->poll(stream->poll_ctx);
}

#endif
