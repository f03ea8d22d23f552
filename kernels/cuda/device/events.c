/* Events of a CUDA device, by number. */
#include <stdlib.h>

#include "base/array.h"
#include "base/check.h"
#include "kernels/cuda/device/cuda.h"
#include "kernels/event_order.h"

struct cpa_events {
    cpa_device *device;
    cudaEvent_t *list;
    int32_t count;
    int64_t capacity;
};

cpa_status cpa_cuda_events_create(cpa_device *device, cpa_events **out, cpa_error *err) {
    cpa_events *events = calloc(1, sizeof *events);
    if (!events) return cpa_fail(err, CPA_NO_MEMORY, "events: no memory");
    events->device = device;
    *out = events;
    return CPA_OK;
}

void cpa_cuda_events_destroy(cpa_events *events) {
    if (!events) return;
    (void)cpa_cuda_select(events->device, NULL);
    for (int32_t i = 0; i < events->count; i++) (void)cudaEventDestroy(events->list[i]);
    free(events->list);
    free(events);
}

/* Makes the events up to the index. */
static cpa_status reserve(cpa_events *events, int32_t index, cpa_error *err) {
    const int64_t n = (int64_t)index + 1;
    if (!cpa_array_reserve(&events->list, &events->capacity, n, sizeof(cudaEvent_t)))
        return cpa_fail(err, CPA_NO_MEMORY, "events: no memory for %lld", (long long)n);
    for (; events->count <= index; events->count++)
        CPA_TRY(cpa_cuda_check(err, cudaEventCreate(&events->list[events->count]), "event"));
    return CPA_OK;
}

cpa_status cpa_cuda_event_record(cpa_events *events, int32_t index, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    if (index >= events->count) CPA_TRY(reserve(events, index, &stream->error));
    /* In a graph an event is otherwise only an edge between nodes. */
    unsigned flags = ((const cpa_cuda_stream *)stream)->capturing ? cudaEventRecordExternal : cudaEventRecordDefault;
    return cpa_cuda_check(&stream->error, cudaEventRecordWithFlags(events->list[index], cpa_cuda_handle(stream), flags),
                          "event");
}

int cpa_cuda_event_reached(const cpa_events *events, int32_t index) {
    if (index >= events->count || cudaEventQuery(events->list[index]) != cudaErrorNotReady) return 1;
    (void)cudaGetLastError();
    return 0;
}

static cpa_status event_await(const cpa_events *events, int32_t index, cpa_stream *stream) {
    if (index >= events->count) return CPA_OK;
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_check(&stream->error, cudaStreamWaitEvent(cpa_cuda_handle(stream), events->list[index], 0),
                          "event");
}

cpa_status cpa_cuda_event_seconds(const cpa_events *events, int32_t from, int32_t to, double *seconds, cpa_error *err) {
    const double milli = 1e-3;
    float ms = 0;
    if (from >= events->count || to >= events->count)
        return cpa_fail(err, CPA_INVALID, "events: %d and %d of %d, expected two that were set", from, to,
                        events->count);
    CPA_TRY(cpa_cuda_check(err, cudaEventElapsedTime(&ms, events->list[from], events->list[to]), "event"));
    *seconds = ms * milli;
    return CPA_OK;
}

const cpa_event_order_table cpa_cuda_event_order = {event_await};
