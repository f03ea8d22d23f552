/* A row of a cache of any quantised dtype, to and from floats. */
#ifndef CPA_HOST_ROW_CODES_H
#define CPA_HOST_ROW_CODES_H

#include "kernels/host/cache/quantise.h"
#include "kernels/host/cache/turboquant.h"
#include "kernels/kv_view.h"

/* A row of `dim` elements. words: where its scales lie behind the rows of its block; written where they do
 * (scale_bytes not 0). */
static inline void cpa_quantise_row(void *row, void *words, int64_t scale_bytes, const float *x, cpa_dtype dtype,
                                    cpa_kv_part part, float tensor_scale, int32_t dim) {
    if (cpa_dtype_has_tiles(dtype)) {
        cpa_quantise_tiles(row, words, x, dtype, dim);
    } else if (cpa_dtype_is_turboquant(dtype)) {
        cpa_tq_quantise(row, x, dtype, part, dim);
    } else {
        const uint32_t word = cpa_quantise(row, x, dtype, tensor_scale, dim);
        if (scale_bytes) memcpy(words, &word, sizeof word);
    }
}

/* dst[0..n) = the first n elements of a row of `dim`; words NULL: the row has none. */
static inline void cpa_dequantise_row(float *dst, const void *row, const void *words, cpa_dtype dtype, cpa_kv_part part,
                                      float tensor_scale, int32_t dim, int32_t n) {
    if (cpa_dtype_has_tiles(dtype)) {
        cpa_dequantise_tiles(dst, row, words, dtype, dim, n);
    } else if (cpa_dtype_is_turboquant(dtype)) {
        cpa_tq_dequantise(dst, row, dtype, part, n);
    } else {
        uint32_t word = 0;
        if (words) memcpy(&word, words, sizeof word);
        cpa_dequantise(dst, row, dtype, tensor_scale, word, n);
    }
}

#endif
