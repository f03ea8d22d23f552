/* A product in float64 whose result is rounded to a dtype, as the elements of keys and values that are expanded are. */
#ifndef CPA_CHECK_PRODUCT_H
#define CPA_CHECK_PRODUCT_H

#include <cpattn/shape.h>

/* out[i] = w[i] . x for the rows of w [rows, dim]. */
void cpa_reference_multiply(const float *w, int32_t rows, int32_t dim, const float *x, cpa_dtype dtype, float *out);

#endif
