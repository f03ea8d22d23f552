/* Marks on the host: an operation has run when its call returns, so a mark is the time of the call. */
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "kernels/host/device/host.h"

struct cpa_marks {
    double *times; /* 0: not set */
    int32_t count;
};

cpa_status cpa_host_marks_create(cpa_device *device, cpa_marks **out, cpa_error *err) {
    (void)device;
    cpa_marks *marks = calloc(1, sizeof *marks);
    if (!marks) return cpa_fail(err, CPA_NO_MEMORY, "marks: no memory");
    *out = marks;
    return CPA_OK;
}

void cpa_host_marks_destroy(cpa_marks *marks) {
    if (!marks) return;
    free(marks->times);
    free(marks);
}

cpa_status cpa_host_mark(cpa_marks *marks, int32_t index, cpa_stream *stream) {
    if (index >= marks->count) {
        int32_t grown = index < 2 * marks->count ? 2 * marks->count : index + 1;
        double *times = realloc(marks->times, (size_t)grown * sizeof *times);
        if (!times) return cpa_fail(&stream->error, CPA_NO_MEMORY, "marks: no memory for %d", grown);
        for (int32_t i = marks->count; i < grown; i++) times[i] = 0;
        marks->times = times;
        marks->count = grown;
    }
    marks->times[index] = cpa_clock_now();
    return CPA_OK;
}

int cpa_host_mark_reached(const cpa_marks *marks, int32_t index) {
    (void)marks, (void)index;
    return 1;
}

cpa_status cpa_host_mark_seconds(const cpa_marks *marks, int32_t from, int32_t to, double *seconds, cpa_error *err) {
    if (from >= marks->count || to >= marks->count || marks->times[from] == 0 || marks->times[to] == 0) {
        return cpa_fail(err, CPA_INVALID, "marks: %d and %d of %d, expected two that were set", from, to, marks->count);
    }
    *seconds = marks->times[to] - marks->times[from];
    return CPA_OK;
}
