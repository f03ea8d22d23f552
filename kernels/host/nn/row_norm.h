/* The norm of one row, in fp64: squares are summed in order, and what a row is multiplied by is one number, so that the
 * result is the float64 one, rounded. */
#ifndef CPA_HOST_ROW_NORM_H
#define CPA_HOST_ROW_NORM_H

#include <math.h>

#include "base/convert.h"
#include "base/min_max.h"

/* Elements that are widened at a time; a multiple of every group of codes. */
enum { CPA_NORM_CHUNK = 512 };

typedef struct cpa_row_norm {
    cpa_dtype dtype, weight_dtype;
    const void *weight;
    double offset, eps;
} cpa_row_norm;

/* What `width` elements are multiplied by. */
static inline double cpa_row_norm_scale(const cpa_row_norm *norm, const void *row, int64_t width) {
    const int64_t bytes = cpa_dtype_bytes(norm->dtype);
    float wide[CPA_NORM_CHUNK];
    double squares = 0;
    for (int64_t at = 0; at < width; at += CPA_NORM_CHUNK) {
        const int64_t n = cpa_min64(CPA_NORM_CHUNK, width - at);
        cpa_widen(wide, (const char *)row + at * bytes, norm->dtype, n);
        for (int64_t i = 0; i < n; i++) squares += (double)wide[i] * (double)wide[i];
    }
    return 1 / sqrt(squares / (double)width + norm->eps);
}

/* out[0..n) = the norm of elements [at, at + n) of a row with that scale; n is at most a chunk. */
static inline void cpa_row_norm_chunk(const cpa_row_norm *norm, const void *row, double scale, int64_t at, int64_t n,
                                      float *out) {
    float weights[CPA_NORM_CHUNK];
    cpa_widen(out, (const char *)row + at * cpa_dtype_bytes(norm->dtype), norm->dtype, n);
    cpa_widen(weights, (const char *)norm->weight + at * cpa_dtype_bytes(norm->weight_dtype), norm->weight_dtype, n);
    for (int64_t i = 0; i < n; i++) out[i] = (float)((double)out[i] * scale * ((double)weights[i] + norm->offset));
}

/* out [width] = the norm of a row, in its dtype. */
static inline void cpa_row_norm_plain(const cpa_row_norm *norm, const void *row, int64_t width, char *out) {
    const double scale = cpa_row_norm_scale(norm, row, width);
    const int64_t bytes = cpa_dtype_bytes(norm->dtype);
    float wide[CPA_NORM_CHUNK];
    for (int64_t at = 0; at < width; at += CPA_NORM_CHUNK) {
        const int64_t n = cpa_min64(CPA_NORM_CHUNK, width - at);
        cpa_row_norm_chunk(norm, row, scale, at, n, wide);
        cpa_narrow(out + at * bytes, wide, norm->dtype, n);
    }
}

#endif
