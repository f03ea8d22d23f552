/* Rows of a cache: what they stand for, and whether they are what was to be written. Nothing here knows how kernels read
 * or write them. */
#ifndef CPA_REFERENCE_ROWS_H
#define CPA_REFERENCE_ROWS_H

#include <cpattn/shape.h>

/* n rows of a cache, of dim elements each, one behind the other, as floats; words [n]: their scales, read only where rows
 * have any behind those of their block (cpattn/shape.h). */
void cpa_reference_read_rows(const void *rows, const void *words, cpa_dtype dtype, cpa_kv_part part, float tensor_scale,
                             int64_t n, int32_t dim, float *out);
/* Whether `have` may be what a cache of that dtype holds for the row `want`: want rounded, or off by no more than half
 * a step of the codes that the row's range, or the tensor's scale, calls for. */
int cpa_reference_may_hold(const float *have, const float *want, cpa_dtype dtype, cpa_kv_part part, float tensor_scale,
                           int32_t dim);

#endif
