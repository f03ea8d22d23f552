#include "src/ops/stream_drain.h"

void cpa_stream_detach(cpa_stream_drain *drain) {
    if (!drain->stream) return;
    cpa_stream_drain **link = &drain->stream->drains;
    while (*link != drain) link = &(*link)->next;
    *link = drain->next;
    drain->stream = NULL;
}

void cpa_stream_attach(cpa_stream_drain *drain, cpa_stream *stream) {
    if (drain->stream == stream) return;
    cpa_stream_detach(drain);
    drain->next = stream->drains;
    drain->stream = stream;
    stream->drains = drain;
}
