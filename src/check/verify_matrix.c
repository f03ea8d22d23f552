#include "src/check/verify_matrix.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "src/check/reference.h"

cpa_status cpa_verify_matrix_take(cpa_verify_matrix *matrix, const cpa_worker *worker, int32_t form, int32_t layer,
                                  int32_t head, cpa_error *err) {
    const cpa_form *of = &worker->forms.list[form];
    matrix->out_dim = 0;
    if (!of->has_matrix) return CPA_OK;
    const int64_t n = (int64_t)of->shape.v_dim * of->out_dim, bytes = n * cpa_dtype_bytes(of->shape.dtype);
    const char *from = cpa_model_form_matrix(&worker->options.model, form, layer);
    CPA_TRY(cpa_verify_tensor_take(&matrix->tensor, worker, from + head * bytes, of->shape.dtype, n, err));
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
            const double factor = (double)matrix->tensor.values[d * matrix->out_dim + i];
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
    cpa_verify_tensor_free(&matrix->tensor);
}
