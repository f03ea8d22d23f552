/* Marks on a CUDA device: an event each. */
#include <stdlib.h>

#include "base/check.h"
#include "kernels/cuda/device/cuda.h"

struct cpa_marks {
    cpa_device *device;
    cudaEvent_t *events;
    int32_t count, capacity;
};

cpa_status cpa_cuda_marks_create(cpa_device *device, cpa_marks **out, cpa_error *err) {
    cpa_marks *marks = calloc(1, sizeof *marks);
    if (!marks) return cpa_fail(err, CPA_NO_MEMORY, "marks: no memory");
    marks->device = device;
    *out = marks;
    return CPA_OK;
}

void cpa_cuda_marks_destroy(cpa_marks *marks) {
    if (!marks) return;
    (void)cpa_cuda_select(marks->device, NULL);
    for (int32_t i = 0; i < marks->count; i++) (void)cudaEventDestroy(marks->events[i]);
    free(marks->events);
    free(marks);
}

/* Makes the events up to the index. */
static cpa_status reserve(cpa_marks *marks, int32_t index, cpa_error *err) {
    if (index >= marks->capacity) {
        int32_t grown = index < 2 * marks->capacity ? 2 * marks->capacity : index + 1;
        cudaEvent_t *events = realloc(marks->events, (size_t)grown * sizeof(cudaEvent_t));
        if (!events) return cpa_fail(err, CPA_NO_MEMORY, "marks: no memory for %d", grown);
        marks->events = events;
        marks->capacity = grown;
    }
    for (; marks->count <= index; marks->count++)
        CPA_TRY(cpa_cuda_check(err, cudaEventCreate(&marks->events[marks->count]), "mark"));
    return CPA_OK;
}

cpa_status cpa_cuda_mark(cpa_marks *marks, int32_t index, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    if (index >= marks->count) CPA_TRY(reserve(marks, index, &stream->error));
    /* In a graph an event is otherwise only an edge between nodes. */
    unsigned flags = ((const cpa_cuda_stream *)stream)->capturing ? cudaEventRecordExternal : cudaEventRecordDefault;
    return cpa_cuda_check(&stream->error,
                          cudaEventRecordWithFlags(marks->events[index], cpa_cuda_handle(stream), flags), "mark");
}

int cpa_cuda_mark_reached(const cpa_marks *marks, int32_t index) {
    if (index >= marks->count || cudaEventQuery(marks->events[index]) != cudaErrorNotReady) return 1;
    (void)cudaGetLastError();
    return 0;
}

cpa_status cpa_cuda_mark_seconds(const cpa_marks *marks, int32_t from, int32_t to, double *seconds, cpa_error *err) {
    const double milli = 1e-3;
    float ms = 0;
    if (from >= marks->count || to >= marks->count)
        return cpa_fail(err, CPA_INVALID, "marks: %d and %d of %d, expected two that were set", from, to, marks->count);
    CPA_TRY(cpa_cuda_check(err, cudaEventElapsedTime(&ms, marks->events[from], marks->events[to]), "mark"));
    *seconds = ms * milli;
    return CPA_OK;
}
