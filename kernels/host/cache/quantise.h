/* Rows of a quantised cache: codes and scale words as cpattn/shape.h defines them. The loops have no branches, so that
 * the compiler turns them into vector code for whatever target the including file is compiled for.
 * kernels/cuda/cache/quant.cuh gives the same bits. */
#ifndef CPA_HOST_QUANTISE_H
#define CPA_HOST_QUANTISE_H

#include <float.h>
#include <math.h>

#include "base/convert.h"

#define CPA_E4M3_MAX 448.0f
#define CPA_E5M2_MAX 57344.0f

/* The nearest code with so many bits of mantissa and that bias of the exponent; saturates at `most`, NaN becomes 0. The
 * sum with `shift` leaves a rounded subnormal in the low bits, since the spacing of floats there is that of the
 * subnormals. The arguments but the value are constants, and gone from what is compiled. */
static inline uint8_t cpa_to_fp8(float value, float most, int mantissa, uint32_t bias) {
    const uint32_t least_normal = (128 - bias) << 23, shift = (127 + 24 - bias - (uint32_t)mantissa) << 23;
    const int dropped = 23 - mantissa;
    uint32_t sign = cpa_float_bits(value) >> 24 & 0x80;
    float magnitude = cpa_bits_float(cpa_float_bits(value) & 0x7fffffff);
    magnitude = magnitude > most ? most : magnitude;
    uint32_t bits = cpa_float_bits(magnitude);
    uint32_t half = (1u << (dropped - 1)) - 1;
    uint32_t normal = ((bits + half + (bits >> dropped & 1)) >> dropped) - ((127 - bias) << mantissa);
    uint32_t subnormal = cpa_float_bits(magnitude + cpa_bits_float(shift)) - shift;
    uint32_t code = sign | (bits < least_normal ? subnormal : normal);
    return (uint8_t)(bits > 0x7f800000 ? 0 : code);
}
static inline uint8_t cpa_to_e4m3(float value) {
    return cpa_to_fp8(value, CPA_E4M3_MAX, 3, 7);
}
static inline uint8_t cpa_to_e5m2(float value) {
    return cpa_to_fp8(value, CPA_E5M2_MAX, 2, 15);
}

/* What takes part in the scale of a row: 0 in place of infinities and NaN. */
static inline float cpa_finite_or_zero(float value) {
    return (cpa_float_bits(value) & 0x7f800000) == 0x7f800000 ? 0 : value;
}

/* The scale of a row whose largest code is `most`: that of the tensor if there is one. */
static inline float cpa_fp8_scale(const float *x, float tensor_scale, float most, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; tensor_scale == 0 && i < n; i++) {
        float magnitude = fabsf(cpa_finite_or_zero(x[i]));
        largest = magnitude > largest ? magnitude : largest;
    }
    return tensor_scale != 0 ? tensor_scale : largest / most;
}

static inline uint32_t cpa_quantise_e5m2(uint8_t *codes, const float *x, float tensor_scale, int64_t n) {
    const float scale = cpa_fp8_scale(x, tensor_scale, CPA_E5M2_MAX, n);
    for (int64_t i = 0; i < n; i++) codes[i] = cpa_to_e5m2(x[i] / scale); /* 0 / 0 is NaN, and so 0 */
    return cpa_float_bits(scale);
}

static inline uint32_t cpa_quantise_e4m3(uint8_t *codes, const float *x, float tensor_scale, int64_t n) {
    const float scale = cpa_fp8_scale(x, tensor_scale, CPA_E4M3_MAX, n);
    for (int64_t i = 0; i < n; i++) codes[i] = cpa_to_e4m3(x[i] / scale); /* 0 / 0 is NaN, and so 0 */
    return cpa_float_bits(scale);
}

/* Codes of results, by one scale: multiplied by its inverse, as those who take such codes have them. */
static inline void cpa_quantise_scaled(uint8_t *codes, const float *x, float scale, int64_t n) {
    const float inverse = 1 / scale;
    for (int64_t i = 0; i < n; i++) codes[i] = cpa_to_e4m3(x[i] * inverse);
}

/* The scale is rounded up to the 24 high bits of its word, so that the range still fits. */
static inline uint32_t cpa_quantise_int8(int8_t *codes, const float *x, int64_t n) {
    float low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        float value = cpa_finite_or_zero(x[i]);
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    uint32_t bits = (cpa_float_bits(high / 255 - low / 255) + 0xff) & ~0xffu;
    float scale = cpa_bits_float(bits);
    float zero = bits ? rintf(-low / scale) - 128 : 0;
    zero = zero > 127 ? 127 : zero;
    for (int64_t i = 0; i < n; i++) {
        float quotient = x[i] / scale;
        float code = (quotient == quotient ? rintf(quotient) : 0) + zero;
        code = code < -128 ? -128 : code > 127 ? 127 : code;
        codes[i] = (int8_t)code;
    }
    return bits | (uint8_t)(int8_t)zero;
}

/* The parts of a row of `dim` elements whose tiles have scales: codes, the scales if they lie in it, and the tail. */
typedef struct cpa_tiled_row {
    int32_t coded, tile, tail; /* elements that are codes, those that share a scale, and those behind all tiles */
    int32_t scale_in_row;      /* 1: scales are fp32, behind the codes; 0: bytes of exponents, behind all rows */
    int64_t tail_at;           /* bytes from the start of the row */
} cpa_tiled_row;

static inline cpa_tiled_row cpa_tiled_row_of(cpa_dtype dtype, int32_t dim) {
    const cpa_row_traits *row = &cpa_dtype_traits_of(dtype)->rows[CPA_KEYS];
    const int32_t coded = dim - row->tail;
    const int64_t scales = row->scale_in_row ? coded / row->tile * row->scale_bytes : 0;
    return (cpa_tiled_row){coded, row->tile, row->tail, row->scale_in_row, coded + scales};
}

/* The largest finite magnitude of n elements. */
static inline float cpa_largest_of(const float *x, int64_t n) {
    float largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const float magnitude = fabsf(cpa_finite_or_zero(x[i]));
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* The exponent of the least power of two that is no less than a positive normal number, as a byte with the bias of fp32
 * (UE8M0), and the power of a byte. */
static inline uint8_t cpa_to_e8m0(float ratio) {
    const uint32_t bits = cpa_float_bits(ratio), up = (bits >> 23) + ((bits & 0x7fffff) != 0);
    return (uint8_t)(up < 254 ? up : 254);
}
static inline float cpa_from_e8m0(uint8_t exponent) {
    return exponent ? exponent == 255 ? NAN : cpa_bits_float((uint32_t)exponent << 23) : 0x1p-127f;
}

/* The scale of elements whose largest magnitude is that, as a power of two: the byte of CPA_FP8_T64. */
#define CPA_LEAST_LARGEST 1e-4f
static inline uint8_t cpa_power_scale(float largest) {
    return cpa_to_e8m0(fmaxf(largest, CPA_LEAST_LARGEST) / CPA_E4M3_MAX);
}

/* `words`: the scales of the row that lie behind the rows of its block; not looked at where they lie in it. */
static inline void cpa_quantise_tiles(void *row, void *words, const float *x, cpa_dtype dtype, int32_t dim) {
    const cpa_tiled_row parts = cpa_tiled_row_of(dtype, dim);
    uint8_t *codes = row, exponents[8] = {0};
    for (int32_t t = 0, first = 0; first < parts.coded; t++, first += parts.tile) {
        float tile[CPA_MAX_HEAD_DIM], scale;
        memcpy(tile, x + first, (size_t)parts.tile * sizeof *tile);
        if (parts.scale_in_row) {
            scale = fmaxf(cpa_largest_of(tile, parts.tile) / CPA_E4M3_MAX, FLT_MIN);
            memcpy((char *)row + parts.coded + t * (int64_t)sizeof scale, &scale, sizeof scale);
        } else {
            for (int32_t i = 0; i < parts.tile; i++) tile[i] = cpa_from_bf16(cpa_to_bf16(tile[i]));
            exponents[t] = cpa_power_scale(cpa_largest_of(tile, parts.tile));
            scale = cpa_from_e8m0(exponents[t]);
        }
        for (int32_t i = 0; i < parts.tile; i++) codes[first + i] = cpa_to_e4m3(tile[i] / scale);
    }
    if (!parts.scale_in_row) memcpy(words, exponents, sizeof exponents);
    cpa_narrow((char *)row + parts.tail_at, x + parts.coded, CPA_BF16, parts.tail);
}

/* dst[0..n) = the first n elements of such a row: what codes and scales give, rounded to bf16. */
static inline void cpa_dequantise_tiles(float *dst, const void *row, const void *words, cpa_dtype dtype, int32_t dim,
                                        int32_t n) {
    const cpa_tiled_row parts = cpa_tiled_row_of(dtype, dim);
    const uint8_t *codes = row;
    for (int32_t t = 0, first = 0; first < parts.coded && first < n; t++, first += parts.tile) {
        const int32_t end = first + parts.tile < n ? first + parts.tile : n;
        float scale;
        if (parts.scale_in_row)
            memcpy(&scale, (const char *)row + parts.coded + t * (int64_t)sizeof scale, sizeof scale);
        else
            scale = cpa_from_e8m0(((const uint8_t *)words)[t]);
        for (int32_t i = first; i < end; i++) dst[i] = cpa_from_bf16(cpa_to_bf16(scale * cpa_from_e4m3(codes[i])));
    }
    if (n > parts.coded) cpa_widen(dst + parts.coded, (const char *)row + parts.tail_at, CPA_BF16, n - parts.coded);
}

/* codes[0..n) and the scale word of a row. */
static inline uint32_t cpa_quantise(void *codes, const float *x, cpa_dtype dtype, float tensor_scale, int64_t n) {
    if (dtype == CPA_INT8) return cpa_quantise_int8(codes, x, n);
    return dtype == CPA_FP8_E5M2 ? cpa_quantise_e5m2(codes, x, tensor_scale, n)
                                 : cpa_quantise_e4m3(codes, x, tensor_scale, n);
}

/* dst[0..n) = the row of these codes. `word` is read only if rows have scales. */
static inline void cpa_dequantise(float *dst, const void *codes, cpa_dtype dtype, float tensor_scale, uint32_t word,
                                  int64_t n) {
    if (dtype == CPA_INT8) {
        const int8_t *code = codes;
        const int32_t zero = (int8_t)(word & 0xff);
        const float scale = cpa_bits_float(word & ~0xffu);
        for (int64_t i = 0; i < n; i++) dst[i] = scale * (float)(code[i] - zero);
    } else {
        const uint8_t *code = codes;
        const float scale = tensor_scale != 0 ? tensor_scale : cpa_bits_float(word);
        for (int64_t i = 0; dtype == CPA_FP8_E5M2 && i < n; i++) dst[i] = scale * cpa_from_e5m2(code[i]);
        if (dtype == CPA_FP8_E5M2) return;
        for (int64_t i = 0; i < n; i++) dst[i] = scale * cpa_from_e4m3(code[i]);
    }
}

#endif
