/* A product in float64 whose result is rounded to a dtype, as the elements of keys and values that are expanded are. */
#ifndef CPA_CHECK_PRODUCT_H
#define CPA_CHECK_PRODUCT_H

#include <cpattn/shape.h>

/* out[t][i] = w[i] . x[t] for the rows of w [rows, dim] and n vectors x, which begin x_stride elements from each other as
 * those of `out` do out_stride. Each has the same bits whatever is beside it. */
void cpa_reference_multiply(const float *w, int32_t rows, int32_t dim, int64_t n, const float *x, int64_t x_stride,
                            cpa_dtype dtype, float *out, int64_t out_stride);

#endif
