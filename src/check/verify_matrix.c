#include "src/check/verify_matrix.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "kernels/device.h"
#include "src/check/reference.h"

/* Room for so many elements, as they lie on the device and as floats. */
static cpa_status reserve(cpa_verify_matrix *matrix, int64_t n, cpa_error *err) {
    if (matrix->values && n <= matrix->capacity) return CPA_OK;
    cpa_verify_matrix_free(matrix);
    matrix->values = malloc((size_t)n * sizeof *matrix->values);
    matrix->raw = malloc((size_t)n * sizeof *matrix->values);
    matrix->capacity = n;
    return matrix->values && matrix->raw ? CPA_OK : cpa_fail(err, CPA_NO_MEMORY, "verify: no memory for a matrix");
}

cpa_status cpa_verify_matrix_take(cpa_verify_matrix *matrix, const cpa_worker *worker, int32_t form, int32_t layer,
                                  int32_t head, cpa_error *err) {
    const cpa_form *of = &worker->forms.list[form];
    const cpa_device_table *table = worker->device->table;
    const int is_held = matrix->out_dim > 0 && matrix->form == form && matrix->layer == layer && matrix->head == head;
    if (is_held) return CPA_OK;
    matrix->out_dim = 0;
    if (!of->has_matrix) return CPA_OK;
    const int64_t n = (int64_t)of->shape.v_dim * of->out_dim, bytes = n * cpa_dtype_bytes(of->shape.dtype);
    const char *from = cpa_model_form_matrix(&worker->options.model, form, layer);
    CPA_TRY(reserve(matrix, n, err));
    cpa_status status = table->copy(matrix->raw, from + head * bytes, bytes, worker->stream);
    if (status == CPA_OK) status = table->stream_sync(worker->stream);
    if (status != CPA_OK) return cpa_fail(err, status, "verify: %s", worker->stream->error.message);
    cpa_reference_widen(matrix->raw, of->shape.dtype, n, matrix->values);
    matrix->form = form;
    matrix->layer = layer;
    matrix->head = head;
    matrix->dtype = of->shape.dtype;
    matrix->v_dim = of->shape.v_dim;
    matrix->out_dim = of->out_dim;
    return CPA_OK;
}

void cpa_verify_matrix_apply(const cpa_verify_matrix *matrix, double *o, double *tolerance) {
    double result[CPA_MAX_HEAD_DIM], allowed = 0;
    if (matrix->out_dim == 0) return;
    for (int32_t i = 0; i < matrix->out_dim; i++) {
        double sum = 0, size = 0, weight = 0;
        for (int32_t d = 0; d < matrix->v_dim; d++) {
            const double factor = (double)matrix->values[d * matrix->out_dim + i];
            sum += o[d] * factor;
            size += fabs(o[d] * factor);
            weight += fabs(factor);
        }
        result[i] = sum;
        /* Sums of fp32 are off by a unit in the last place of their terms for each of them, at most. */
        const double rounding = 2 * cpa_reference_unit_roundoff(matrix->dtype) * fabs(sum);
        allowed = fmax(allowed, weight * *tolerance + rounding + matrix->v_dim * 0x1p-24 * size);
    }
    memcpy(o, result, (size_t)matrix->out_dim * sizeof *o);
    *tolerance = allowed;
}

void cpa_verify_matrix_free(cpa_verify_matrix *matrix) {
    free(matrix->values);
    free(matrix->raw);
    *matrix = (cpa_verify_matrix){.values = NULL};
}
