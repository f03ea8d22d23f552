/* Scales and codes of rmsnorm (cpa_norm_codes of cpattn/nn.h), for every back end. The divisions are those of fp32. */
#ifndef CPA_KERNELS_NORM_CODES_H
#define CPA_KERNELS_NORM_CODES_H

#include <math.h>
#include <string.h>

#include <cpattn/nn.h>

/* The least power of two that is not below a normal number above 0. */
CPA_HOST_DEVICE static inline float cpa_pow2_above(float number) {
    const uint32_t mantissa = 0x7fffff, exponent_step = 0x800000;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (bits & mantissa) bits = (bits & ~mantissa) + exponent_step;
    memcpy(&number, &bits, sizeof bits);
    return number;
}

/* The scale of elements of which the largest has that magnitude. */
CPA_HOST_DEVICE static inline float cpa_norm_scale(const cpa_rmsnorm_args *a, float largest) {
    const float most_e4m3 = 448, most_int8 = 127, least_token = 1.0f / (448.0f * 512.0f), least_group = 1e-10f;
    if (a->codes == CPA_NORM_FP8_STATIC) return *a->static_scale;
    if (a->codes == CPA_NORM_INT8_TOKEN) return largest / most_int8;
    if (a->codes == CPA_NORM_FP8_TOKEN) {
        const float bounded = a->scale_bound && *a->scale_bound < largest ? *a->scale_bound : largest;
        const float scale = bounded / most_e4m3;
        return scale > least_token ? scale : least_token;
    }
    const float scale = (largest > least_group ? largest : least_group) / most_e4m3;
    return a->scales_pow2 ? cpa_pow2_above(scale) : scale;
}

/* The int8 code of x / scale. */
CPA_HOST_DEVICE static inline uint8_t cpa_norm_int8(float x, float scale) {
    const float quotient = x / scale, code = quotient == quotient ? rintf(quotient) : 0;
    return (uint8_t)(int8_t)(code < -127 ? -127 : code > 127 ? 127 : code);
}

/* The elements that a scale serves, and where that of a row's `group`-th such run lies. */
CPA_HOST_DEVICE static inline int32_t cpa_norm_group(const cpa_rmsnorm_args *a) {
    return a->codes == CPA_NORM_FP8_GROUP ? a->group : a->width;
}
CPA_HOST_DEVICE static inline int64_t cpa_norm_scale_at(const cpa_rmsnorm_args *a, int64_t row, int64_t group) {
    const int64_t size = cpa_norm_group(a), groups = (a->width + size - 1) / size, padded = (a->rows + 3) / 4 * 4;
    return a->scales_by_column ? group * padded + row : row * groups + group;
}

#endif
