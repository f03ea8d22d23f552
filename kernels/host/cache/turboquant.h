/* Rows of the CPA_TQ_ dtypes, as cpattn/shape.h defines them. Sums of a row are those of 32 lanes that have neighbouring
 * elements each, joined by halves, as a warp adds them: kernels/cuda/cache/turboquant.cuh gives the same bits. */
#ifndef CPA_HOST_TURBOQUANT_H
#define CPA_HOST_TURBOQUANT_H

#include <math.h>

#include "kernels/codebook.h"
#include "kernels/host/cache/quantise.h"

enum { CPA_TQ_LANES = 32 };

/* The centroids of so many bits, ascending. */
static inline void cpa_tq_centroids(int32_t bits, float *to) {
    static const float three[] = {CPA_CODEBOOK_3BIT}, four[] = {CPA_CODEBOOK_4BIT};
    const float *positive = bits == 3 ? three : four;
    const int32_t half = 1 << (bits - 1);
    for (int32_t i = 0; i < half; i++) to[half + i] = positive[i], to[half - 1 - i] = -positive[i];
}

/* x = H x, without the factor 1 / sqrt(n). */
static inline void cpa_tq_rotate(float *x, int32_t n) {
    for (int32_t step = 1; step < n; step *= 2)
        for (int32_t first = 0; first < n; first += 2 * step)
            for (int32_t i = first; i < first + step; i++) {
                const float a = x[i], b = x[i + step];
                x[i] = a + b;
                x[i + step] = a - b;
            }
}

static inline float cpa_tq_sum_of_squares(const float *x, int32_t n) {
    float lanes[CPA_TQ_LANES] = {0};
    const int32_t width = n / CPA_TQ_LANES;
    for (int32_t lane = 0; lane < CPA_TQ_LANES; lane++)
        for (int32_t i = 0; i < width; i++) {
            const float square = x[lane * width + i] * x[lane * width + i];
            lanes[lane] = lanes[lane] + square;
        }
    for (int32_t half = CPA_TQ_LANES / 2; half > 0; half /= 2)
        for (int32_t lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Codes of 3 or 4 bits to and from where they lie. */
static inline void cpa_tq_put_codes(uint8_t *to, const uint8_t *codes, int32_t bits, int32_t n) {
    memset(to, 0, (size_t)((int64_t)n * bits + 7) / 8);
    for (int32_t i = 0; i < n; i++) {
        const int32_t at = i * bits, shift = at % 8;
        const uint32_t placed = (uint32_t)codes[i] << shift;
        to[at / 8] = (uint8_t)(to[at / 8] | placed);
        if (shift + bits > 8) to[at / 8 + 1] = (uint8_t)(placed >> 8);
    }
}
static inline int32_t cpa_tq_code(const uint8_t *codes, int32_t bits, int32_t i) {
    const int32_t at = i * bits, shift = at % 8;
    const uint32_t upper = shift + bits > 8 ? codes[at / 8 + 1] : 0;
    return (int32_t)((codes[at / 8] | upper << 8) >> shift & ((1u << bits) - 1));
}

static inline void cpa_tq_put_half(uint8_t *to, float value) {
    const float most = 65504; /* what is finite stays so */
    const uint16_t half = cpa_to_f16(value > most ? most : value < -most ? -most : value);
    memcpy(to, &half, sizeof half);
}
static inline float cpa_tq_half(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, sizeof half);
    return cpa_from_f16(half);
}

static inline void cpa_tq_quantise_key(uint8_t *row, const float *x, int32_t bits, int32_t n) {
    float y[CPA_MAX_HEAD_DIM], centroids[CPA_MOST_LEVELS];
    uint8_t codes[CPA_MAX_HEAD_DIM];
    cpa_tq_centroids(bits, centroids);
    const float length = sqrtf(cpa_tq_sum_of_squares(x, n)), divisor = length + 1e-8f;
    for (int32_t i = 0; i < n; i++) y[i] = x[i] / divisor;
    cpa_tq_rotate(y, n);
    for (int32_t i = 0; i < n; i++) {
        codes[i] = 0;
        for (int32_t level = 1; level < 1 << bits; level++)
            codes[i] = (uint8_t)(codes[i] + ((centroids[level - 1] + centroids[level]) / 2 <= y[i]));
    }
    cpa_tq_put_codes(row, codes, bits, n);
    cpa_tq_put_half(row + n * bits / 8, length);
}

static inline void cpa_tq_quantise_value(uint8_t *row, const float *x, int32_t bits, int32_t n) {
    float least = INFINITY, most = -INFINITY;
    uint8_t codes[CPA_MAX_HEAD_DIM];
    for (int32_t i = 0; i < n; i++) {
        least = x[i] < least ? x[i] : least;
        most = x[i] > most ? x[i] : most;
    }
    const float levels = (float)((1 << bits) - 1), range = most - least;
    const float scale = fmaxf(range / levels, 1e-8f);
    for (int32_t i = 0; i < n; i++) {
        const float code = floorf((x[i] - least) / scale + 0.5f);
        codes[i] = (uint8_t)(code < 0 ? 0 : code > levels ? levels : code);
    }
    cpa_tq_put_codes(row, codes, bits, n);
    cpa_tq_put_half(row + n * bits / 8, scale);
    cpa_tq_put_half(row + n * bits / 8 + 2, least);
}

/* A key, or a value, of n elements. */
static inline void cpa_tq_quantise(void *row, const float *from, cpa_dtype dtype, cpa_kv_part part, int32_t n) {
    const int32_t bits = cpa_dtype_traits_of(dtype)->rows[part].element_bits;
    float x[CPA_MAX_HEAD_DIM];
    if (bits == 8) {
        for (int32_t i = 0; i < n; i++) ((uint8_t *)row)[i] = cpa_to_e4m3(from[i]);
        return;
    }
    for (int32_t i = 0; i < n; i++) x[i] = cpa_finite_or_zero(from[i]);
    if (part == CPA_KEYS)
        cpa_tq_quantise_key(row, x, bits, n);
    else
        cpa_tq_quantise_value(row, x, bits, n);
}

static inline void cpa_tq_dequantise(float *x, const void *row, cpa_dtype dtype, cpa_kv_part part, int32_t n) {
    const int32_t bits = cpa_dtype_traits_of(dtype)->rows[part].element_bits;
    const uint8_t *codes = row, *behind = codes + n * bits / 8;
    float centroids[CPA_MOST_LEVELS];
    if (bits == 8) {
        for (int32_t i = 0; i < n; i++) x[i] = cpa_from_e4m3(codes[i]);
    } else if (part == CPA_KEYS) {
        cpa_tq_centroids(bits, centroids);
        for (int32_t i = 0; i < n; i++) x[i] = centroids[cpa_tq_code(codes, bits, i)];
        const float factor = cpa_tq_half(behind) / sqrtf(cpa_tq_sum_of_squares(x, n) * (float)n);
        cpa_tq_rotate(x, n);
        for (int32_t i = 0; i < n; i++) x[i] *= factor;
    } else {
        const float scale = cpa_tq_half(behind), least = cpa_tq_half(behind + 2);
        for (int32_t i = 0; i < n; i++) x[i] = scale * (float)cpa_tq_code(codes, bits, i) + least;
    }
}

#endif
