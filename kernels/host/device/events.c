/* Events on the host: an operation has run when its call returns, so an event is the time of the call. */
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "base/clock.h"
#include "kernels/event_order.h"
#include "kernels/host/device/host.h"

struct cpa_events {
    double *times; /* 0: not set */
    int32_t count;
    int64_t capacity;
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
    const int64_t n = (int64_t)index + 1;
    if (!cpa_array_reserve(&events->times, &events->capacity, n, sizeof *events->times))
        return cpa_fail(&stream->error, CPA_NO_MEMORY, "events: no memory for %lld", (long long)n);
    while (events->count < n) events->times[events->count++] = 0;
    events->times[index] = cpa_clock_now();
    return CPA_OK;
}

int cpa_host_event_reached(const cpa_events *events, int32_t index) {
    (void)events, (void)index;
    return 1;
}

/* What was enqueued before the event has run. */
static cpa_status event_await(const cpa_events *events, int32_t index, cpa_stream *stream) {
    (void)events, (void)index, (void)stream;
    return CPA_OK;
}

cpa_status cpa_host_event_seconds(const cpa_events *events, int32_t from, int32_t to, double *seconds, cpa_error *err) {
    if (from >= events->count || to >= events->count || events->times[from] == 0 || events->times[to] == 0) {
        return cpa_fail(err, CPA_INVALID, "events: %d and %d of %d, expected two that were set", from, to,
                        events->count);
    }
    *seconds = events->times[to] - events->times[from];
    return CPA_OK;
}

const cpa_event_order_table cpa_host_event_order = {event_await};
