/* Products in float64: those whose result is rounded to a dtype, as the elements of keys and values that are
 * expanded are, and the one by which a result is made of an O. */
#ifndef CPA_CHECK_PRODUCT_H
#define CPA_CHECK_PRODUCT_H

#include <cpattn/shape.h>

/* out[t][i] = w[i] . x[t] for the rows of w [rows, dim] and n vectors x, which begin x_stride elements from each other as
 * those of `out` do out_stride. Each has the same bits whatever is beside it. */
void cpa_reference_multiply(const float *w, int32_t rows, int32_t dim, int64_t n, const float *x, int64_t x_stride,
                            cpa_dtype dtype, float *out, int64_t out_stride);

/* O [v_dim] becomes O times a matrix [v_dim, out_dim]. A tolerance of its elements grows by what sums of so many of
 * them may be off, and by the rounding of the result to the dtype. */
void cpa_reference_apply_matrix(const float *matrix, int32_t v_dim, int32_t out_dim, cpa_dtype dtype, double *o,
                                double *tolerance);

#endif
