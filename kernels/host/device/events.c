/* Events on the host: an operation has run when its call returns, so an event is the time of the call. */
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "kernels/host/device/host.h"

struct cpa_events {
    double *times; /* 0: not set */
    int32_t count;
};

cpa_status cpa_host_events_create(cpa_device *device, cpa_events **out, cpa_error *err) {
    (void)device;
    cpa_events *events = calloc(1, sizeof *events);
    if (!events) return cpa_fail(err, CPA_NO_MEMORY, "events: no memory");
    *out = events;
    return CPA_OK;
}

void cpa_host_events_destroy(cpa_events *events) {
    if (!events) return;
    free(events->times);
    free(events);
}

cpa_status cpa_host_event_record(cpa_events *events, int32_t index, cpa_stream *stream) {
    if (index >= events->count) {
        int32_t grown = index < 2 * events->count ? 2 * events->count : index + 1;
        double *times = realloc(events->times, (size_t)grown * sizeof *times);
        if (!times) return cpa_fail(&stream->error, CPA_NO_MEMORY, "events: no memory for %d", grown);
        for (int32_t i = events->count; i < grown; i++) times[i] = 0;
        events->times = times;
        events->count = grown;
    }
    events->times[index] = cpa_clock_now();
    return CPA_OK;
}

int cpa_host_event_reached(const cpa_events *events, int32_t index) {
    (void)events, (void)index;
    return 1;
}

cpa_status cpa_host_event_seconds(const cpa_events *events, int32_t from, int32_t to, double *seconds, cpa_error *err) {
    if (from >= events->count || to >= events->count || events->times[from] == 0 || events->times[to] == 0) {
        return cpa_fail(err, CPA_INVALID, "events: %d and %d of %d, expected two that were set", from, to,
                        events->count);
    }
    *seconds = events->times[to] - events->times[from];
    return CPA_OK;
}
