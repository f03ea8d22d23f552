#include "src/check/verify_matrix.h"

#include "base/check.h"
#include "src/check/product.h"

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
    if (matrix->out_dim == 0) return;
    cpa_reference_apply_matrix(matrix->tensor.values, matrix->v_dim, matrix->out_dim, matrix->dtype, o, tolerance);
}

void cpa_verify_matrix_free(cpa_verify_matrix *matrix) {
    cpa_verify_tensor_free(&matrix->tensor);
}
