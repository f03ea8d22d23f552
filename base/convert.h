/* Conversions between fp32 and the narrow dtypes, and from codes of FP8: rounding to nearest even, NaN stays NaN. The
 * loops have no branches, so that the compiler turns them into vector code for whatever target the including file is
 * compiled for. */
#ifndef CPA_BASE_CONVERT_H
#define CPA_BASE_CONVERT_H

#include <string.h>

#include <cpattn/types.h>

static inline uint32_t cpa_float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float cpa_bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float cpa_from_bf16(uint16_t half) {
    return cpa_bits_float((uint32_t)half << 16);
}

static inline uint16_t cpa_to_bf16(float value) {
    uint32_t bits = cpa_float_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uint32_t quiet = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/* Exponent and mantissa shifted into place make a float that is 2^112 too small; the product also normalises what was
 * subnormal. */
static inline float cpa_from_f16(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    uint32_t finite = cpa_float_bits(cpa_bits_float(magnitude << 13) * 0x1p112f);
    uint32_t special = 0x7f800000u | magnitude << 13;
    return cpa_bits_float(sign | (magnitude >= 0x7c00 ? special : finite));
}

/* Below 2^-14 the sum with 0.5 leaves the rounded subnormal in the low bits, since the spacing of floats at 0.5 is that
 * of fp16 subnormals, 2^-24. 65520 is the least value that rounds to infinity. */
static inline uint16_t cpa_to_f16(float value) {
    const uint32_t infinity = 0x7c00, least_normal = 0x38800000, least_overflow = 0x477ff000;
    uint32_t bits = cpa_float_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
    uint32_t subnormal = cpa_float_bits(cpa_bits_float(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x3ff);
    uint32_t result = magnitude < least_normal ? subnormal : normal;
    result = magnitude >= least_overflow ? infinity : result;
    result = magnitude > 0x7f800000 ? nan : result;
    return (uint16_t)(sign | result);
}

/* Exponent and mantissa shifted into place make a float whose exponent is 120 too small; subnormals are multiples of
 * 2^-9. 0x7f and 0xff are NaN. */
static inline float cpa_from_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    uint32_t normal = (magnitude << 20) + (120u << 23);
    uint32_t subnormal = cpa_float_bits((float)(int32_t)magnitude * 0x1p-9f);
    uint32_t bits = magnitude < 8 ? subnormal : normal;
    return cpa_bits_float(sign | (magnitude == 0x7f ? 0x7fc00000u : bits));
}

/* The upper byte of fp16. */
static inline float cpa_from_e5m2(uint8_t code) {
    return cpa_from_f16((uint16_t)(code << 8));
}

/* dst[0..n) = src[0..n) as floats. */
static inline void cpa_widen(float *dst, const void *src, cpa_dtype dtype, int64_t n) {
    const uint16_t *half = src;
    if (dtype == CPA_F32) {
        memcpy(dst, src, (size_t)n * sizeof *dst);
    } else if (dtype == CPA_BF16) {
        for (int64_t i = 0; i < n; i++) dst[i] = cpa_from_bf16(half[i]);
    } else {
        for (int64_t i = 0; i < n; i++) dst[i] = cpa_from_f16(half[i]);
    }
}

/* dst[0..n) = src[0..n) rounded to the dtype. */
static inline void cpa_narrow(void *dst, const float *src, cpa_dtype dtype, int64_t n) {
    uint16_t *half = dst;
    if (dtype == CPA_F32) {
        memcpy(dst, src, (size_t)n * sizeof *src);
    } else if (dtype == CPA_BF16) {
        for (int64_t i = 0; i < n; i++) half[i] = cpa_to_bf16(src[i]);
    } else {
        for (int64_t i = 0; i < n; i++) half[i] = cpa_to_f16(src[i]);
    }
}

/* dst[0..n) = src[0..n), each in its dtype. n is at most CPA_MAX_HEAD_DIM. */
static inline void cpa_convert(void *dst, cpa_dtype dst_dtype, const void *src, cpa_dtype src_dtype, int64_t n) {
    float wide[CPA_MAX_HEAD_DIM];
    if (dst_dtype == src_dtype) {
        memcpy(dst, src, (size_t)(n * cpa_dtype_bytes(src_dtype)));
        return;
    }
    cpa_widen(wide, src, src_dtype, n);
    cpa_narrow(dst, wide, dst_dtype, n);
}

#endif
