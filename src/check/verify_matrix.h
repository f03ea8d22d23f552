/* Results of rows whose form has a matrix (cpa_row_form.out_dim): O of float64 times the matrix of layer and head. */
#ifndef CPA_VERIFY_MATRIX_H
#define CPA_VERIFY_MATRIX_H

#include "src/check/verify_tensor.h"

/* The matrix of a form, layer and head that was asked for last. */
typedef struct cpa_verify_matrix {
    cpa_verify_tensor tensor; /* [v_dim, out_dim] */
    cpa_dtype dtype;
    int32_t v_dim, out_dim; /* out_dim 0: the form that was asked for has none */
} cpa_verify_matrix;

/* Brings the matrix of a head from the device, if the form has one. Waits for the stream. */
cpa_status cpa_verify_matrix_take(cpa_verify_matrix *matrix, const cpa_worker *worker, int32_t form, int32_t layer,
                                  int32_t head, cpa_error *err);
/* O [v_dim] becomes the result [out_dim]; a tolerance of its elements grows by what sums of so many of them may be off,
 * and the rounding of the result. Does nothing where the form has none. */
void cpa_verify_matrix_apply(const cpa_verify_matrix *matrix, double *o, double *tolerance);
void cpa_verify_matrix_free(cpa_verify_matrix *matrix);

#endif
