/* wrong-choice: of the keys that an indexer chose for a row, the first one behind a gap is that of the gap, on every rank. */
#include <stdlib.h>

#include <cpattn/context.h>

#include "base/check.h"
#include "kernels/device.h"
#include "src/context/context_internal.h"
#include "src/context/context_plan.h"
#include "tests/faults/fault.h"

cpa_status __real_cpa_context_select(cpa_context *c, const cpa_context_select_args *args, cpa_key_indices *out,
                                     cpa_stream *stream);
cpa_status __wrap_cpa_context_select(cpa_context *c, const cpa_context_select_args *args, cpa_key_indices *out,
                                     cpa_stream *stream);

static void spoil_list(int32_t *list, int32_t count) {
    for (int32_t i = 0, next = 0; i < count; next = list[i++] + 1) {
        if (list[i] == next) continue;
        list[i] = next;
        return;
    }
}

/* Through the host. */
static cpa_status spoil_lists(const cpa_key_indices *lists, int64_t rows, cpa_stream *stream) {
    const cpa_device_table *table = stream->device->table;
    const int64_t bytes = rows * lists->row_stride * (int64_t)sizeof(int32_t);
    int32_t *copy = malloc((size_t)bytes + 1), *counts = malloc((size_t)rows * sizeof *counts + 1);
    cpa_status status = copy && counts ? CPA_OK : CPA_NO_MEMORY;
    if (status == CPA_OK) status = table->copy(copy, lists->indices, bytes, stream);
    if (status == CPA_OK) status = table->copy(counts, lists->counts, rows * (int64_t)sizeof *counts, stream);
    if (status == CPA_OK) status = table->stream_sync(stream);
    for (int64_t row = 0; status == CPA_OK && row < rows; row++)
        spoil_list(copy + row * lists->row_stride, counts[row]);
    if (status == CPA_OK) status = table->copy((void *)(uintptr_t)lists->indices, copy, bytes, stream);
    if (status == CPA_OK) status = table->stream_sync(stream);
    free(counts);
    free(copy);
    return status;
}

cpa_status __wrap_cpa_context_select(cpa_context *c, const cpa_context_select_args *args, cpa_key_indices *out,
                                     cpa_stream *stream) {
    CPA_TRY(__real_cpa_context_select(c, args, out, stream));
    return cpa_fault_is(CPA_FAULT_WRONG_CHOICE) ? spoil_lists(out, c->choice.rows, stream) : CPA_OK;
}
