/* Waiting for a stream whose work waits for more than its device, such as for messages of other ranks: whoever enqueued
 * that says how to wait for it, and how it ends when it is to no end. */
#ifndef CPA_STREAM_DRAIN_H
#define CPA_STREAM_DRAIN_H

#include "kernels/device.h"

/* Owned by whoever attaches it to a stream, one at a time, from the thread of the stream. */
struct cpa_stream_drain {
    /* Blocks until the stream is idle. On failure writes to stream->error; the stream is idle then, or will be. */
    cpa_status (*drain)(void *ctx, cpa_stream *stream);
    void *ctx;
    cpa_stream *stream; /* NULL: attached to none */
    cpa_stream_drain *next;
};

/* Attaches it to this stream and to no other. */
void cpa_stream_attach(cpa_stream_drain *drain, cpa_stream *stream);
/* Detaches it; nothing happens where it is attached to none. */
void cpa_stream_detach(cpa_stream_drain *drain);

#endif
