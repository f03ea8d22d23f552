#include "src/check/verify_tensor.h"

#include <stdlib.h>

#include "base/check.h"
#include "kernels/device.h"
#include "src/check/reference.h"

/* Room for so many elements, as they lie on the device and as floats. */
static cpa_status reserve(cpa_verify_tensor *tensor, int64_t n, cpa_error *err) {
    if (tensor->values && tensor->raw && n <= tensor->capacity) return CPA_OK;
    cpa_verify_tensor_free(tensor);
    tensor->values = malloc((size_t)n * sizeof *tensor->values);
    tensor->raw = malloc((size_t)n * sizeof *tensor->values);
    tensor->capacity = n;
    return tensor->values && tensor->raw ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for a matrix");
}

cpa_status cpa_verify_tensor_take(cpa_verify_tensor *tensor, const cpa_worker *worker, const void *from,
                                  cpa_dtype dtype, int64_t n, cpa_error *err) {
    const cpa_device_table *table = worker->device->table;
    if (tensor->from == from) return CPA_OK;
    tensor->from = NULL;
    CPA_TRY(reserve(tensor, n, err));
    cpa_status status = table->copy(tensor->raw, from, n * cpa_dtype_bytes(dtype), worker->stream);
    if (status == CPA_OK) status = table->stream_sync(worker->stream);
    if (status != CPA_OK) return cpa_fail(err, status, "verify: %s", worker->stream->error.message);
    cpa_reference_widen(tensor->raw, dtype, n, tensor->values);
    tensor->from = from;
    return CPA_OK;
}

void cpa_verify_tensor_free(cpa_verify_tensor *tensor) {
    free(tensor->values);
    free(tensor->raw);
    *tensor = (cpa_verify_tensor){.from = NULL};
}
