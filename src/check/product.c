#include "src/check/product.h"

#include <math.h>
#include <string.h>

#include "src/check/reference.h"
#include "src/check/vector_loops.h"

enum { LANES = 4, SUMS = 2, AT_ONCE = 4 };
typedef float narrow_lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef double wide_lanes __attribute__((vector_size(LANES * sizeof(double))));

/* AT_ONCE vectors, as doubles, share each row of w, which is widened once for them. A sum has SUMS * LANES partial
 * sums. */
CPA_VECTOR_LOOPS static void multiply(const float *w, int32_t rows, int32_t dim, const double *x, double *out) {
    const int32_t whole = dim / (SUMS * LANES) * (SUMS * LANES);
    for (int32_t i = 0; i < rows; i++, w += dim) {
        wide_lanes sums[AT_ONCE][SUMS] = {{{0}}};
        for (int32_t d = 0; d < whole; d += SUMS * LANES) {
            for (int j = 0; j < SUMS; j++) {
                narrow_lanes narrow;
                memcpy(&narrow, w + d + j * LANES, sizeof narrow);
                const wide_lanes a = __builtin_convertvector(narrow, wide_lanes);
                for (int t = 0; t < AT_ONCE; t++) {
                    wide_lanes b;
                    memcpy(&b, x + t * dim + d + j * LANES, sizeof b);
                    sums[t][j] += a * b;
                }
            }
        }
        for (int t = 0; t < AT_ONCE; t++) {
            const wide_lanes all = sums[t][0] + sums[t][1];
            double sum = (all[0] + all[1]) + (all[2] + all[3]);
            for (int32_t d = whole; d < dim; d++) sum += (double)w[d] * x[t * dim + d];
            out[i * AT_ONCE + t] = sum;
        }
    }
}

void cpa_reference_multiply(const float *w, int32_t rows, int32_t dim, int64_t n, const float *x, int64_t x_stride,
                            cpa_dtype dtype, float *out, int64_t out_stride) {
    double wide[AT_ONCE * CPA_MAX_HEAD_DIM] = {0}, sums[AT_ONCE * CPA_MAX_HEAD_DIM];
    for (int64_t first = 0; first < n; first += AT_ONCE) {
        const int64_t count = n - first < AT_ONCE ? n - first : AT_ONCE;
        for (int64_t t = 0; t < count; t++)
            for (int32_t d = 0; d < dim; d++) wide[t * dim + d] = (double)x[(first + t) * x_stride + d];
        multiply(w, rows, dim, wide, sums);
        for (int64_t t = 0; t < count; t++)
            for (int32_t i = 0; i < rows; i++)
                out[(first + t) * out_stride + i] = cpa_reference_round((float)sums[i * AT_ONCE + t], dtype);
    }
}

void cpa_reference_apply_matrix(const float *matrix, int32_t v_dim, int32_t out_dim, cpa_dtype dtype, double *o,
                                double *tolerance) {
    double result[CPA_MAX_HEAD_DIM], allowed = 0;
    for (int32_t i = 0; i < out_dim; i++) {
        double sum = 0, size = 0, weight = 0;
        for (int32_t d = 0; d < v_dim; d++) {
            const double factor = (double)matrix[d * out_dim + i];
            sum += o[d] * factor;
            size += fabs(o[d] * factor);
            weight += fabs(factor);
        }
        result[i] = sum;
        /* Sums of fp32 are off by a unit in the last place of their terms for each of them, at most. */
        const double rounding = 2 * cpa_reference_unit_roundoff(dtype) * fabs(sum);
        allowed = fmax(allowed, weight * *tolerance + rounding + v_dim * 0x1p-24 * size);
    }
    memcpy(o, result, (size_t)out_dim * sizeof *o);
    *tolerance = allowed;
}
