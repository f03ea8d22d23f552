/* One row of queries or keys of an indexer as cpattn/indexer.h defines it, in fp32 and in its order. */
#ifndef CPA_HOST_INDEX_ROW_H
#define CPA_HOST_INDEX_ROW_H

#include <math.h>

#include <cpattn/indexer.h>

#include "kernels/host/cache/quantise.h"
#include "kernels/indexer.h"
#include "kernels/rope.h"

/* The sum that folds halves; x is used up. */
static inline float cpa_index_fold(float x[CPA_INDEX_MOST_DIM]) {
    for (int32_t half = CPA_INDEX_MOST_DIM / 2; half > 0; half /= 2) {
        for (int32_t i = 0; i < half; i++) x[i] += x[i + half];
    }
    return x[0];
}

static inline void cpa_index_norm(float *x, int32_t dim, const float *gamma, const float *beta, float eps) {
    float parts[CPA_INDEX_MOST_DIM] = {0};
    for (int32_t i = 0; i < dim; i++) parts[i] = x[i];
    const float mean = cpa_index_fold(parts) / (float)dim;
    for (int32_t i = 0; i < CPA_INDEX_MOST_DIM; i++) {
        const float apart = i < dim ? x[i] - mean : 0;
        parts[i] = apart * apart;
    }
    const float inverse = 1 / sqrtf(cpa_index_fold(parts) / (float)dim + eps);
    for (int32_t i = 0; i < dim; i++) x[i] = (x[i] - mean) * inverse * gamma[i] + beta[i];
}

static inline void cpa_index_rotate(float *x, int32_t dim, const cpa_rope *rope, const int64_t *positions, int64_t rows,
                                    int64_t row) {
    const int32_t half = rope->dim / 2;
    const int inside = cpa_rope_is_in_table(rope, positions, rows, row);
    for (int32_t i = 0; !inside && i < dim; i++) x[i] = NAN;
    for (int32_t i = 0; inside && i < half; i++) {
        const float *cosines = rope->table + positions[cpa_rope_stream_of(rope, i) * rows + row] * rope->dim;
        float *a = &x[rope->first + (rope->interleaved ? 2 * i : i)], *b = a + (rope->interleaved ? 1 : half);
        const float c = cosines[i], s = rope->inverse ? -cosines[half + i] : cosines[half + i];
        const float turned = *a * c - *b * s;
        *b = *b * c + *a * s;
        *a = turned;
    }
}

static inline void cpa_index_round(float *x, int32_t dim) {
    for (int32_t i = 0; i < dim; i++) x[i] = cpa_from_bf16(cpa_to_bf16(x[i]));
}

static inline void cpa_index_hadamard(float *x, int32_t dim) {
    const float scale = (float)(1 / sqrt((double)dim));
    for (int32_t step = 1; step < dim; step *= 2) {
        for (int32_t i = 0; i < dim; i++) {
            if (i & step) continue;
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
        }
    }
    for (int32_t i = 0; i < dim; i++) x[i] *= scale;
}

/* From the rotation to the last rounding to bf16. */
static inline void cpa_index_finish(float *x, int32_t dim, const cpa_rope *rope, const int64_t *positions, int64_t rows,
                                    int64_t row, int hadamard) {
    if (rope->table) cpa_index_rotate(x, dim, rope, positions, rows, row);
    cpa_index_round(x, dim);
    if (!hadamard) return;
    cpa_index_hadamard(x, dim);
    cpa_index_round(x, dim);
}

/* The codes of a row, and their scale. */
static inline float cpa_index_codes(uint8_t *codes, const float *x, int32_t dim, float floor, int pow2) {
    float largest = floor;
    for (int32_t i = 0; i < dim; i++) largest = fmaxf(largest, fabsf(cpa_finite_or_zero(x[i])));
    const float ratio = largest / CPA_E4M3_MAX, scale = pow2 ? cpa_pow2_above(ratio) : ratio;
    for (int32_t i = 0; i < dim; i++) codes[i] = cpa_to_e4m3(x[i] / scale);
    return scale;
}

/* The codes of a row in pairs, and the exponents of the scales of its blocks. */
static inline void cpa_index_mxfp4(uint8_t *codes, uint8_t *scales, const float *x, int32_t dim) {
    for (int32_t first = 0; first < dim; first += CPA_INDEX_MXFP4_BLOCK) {
        float largest = 0;
        for (int32_t i = first; i < first + CPA_INDEX_MXFP4_BLOCK; i++)
            largest = fmaxf(largest, fabsf(cpa_finite_or_zero(x[i])));
        const float scale = cpa_index_mxfp4_scale(largest);
        scales[first / CPA_INDEX_MXFP4_BLOCK] = (uint8_t)(cpa_float_bits(scale) >> 23);
        for (int32_t i = first; i < first + CPA_INDEX_MXFP4_BLOCK; i += 2)
            codes[i / 2] = (uint8_t)(cpa_index_e2m1(x[i] / scale) | cpa_index_e2m1(x[i + 1] / scale) << 4);
    }
}

#endif
