/* Elements of the dtypes on the device: fp32, bf16 and fp16, read as floats and rounded to nearest even. */
#ifndef CPA_CUDA_ELEMENT_CUH
#define CPA_CUDA_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <cpattn/types.h>

__device__ inline float to_float(float x) {
    return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ inline float to_float(__half x) {
    return __half2float(x);
}

__device__ inline bool is_nonfinite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

template <typename T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
    return __float2half_rn(x);
}

/* Rounded to another dtype. The same one: the same bits, those of a NaN as well. */
template <typename To, typename From>
__device__ inline To converted(From x) {
    return from_float<To>(to_float(x));
}
template <>
__device__ inline float converted(float x) {
    return x;
}
template <>
__device__ inline __nv_bfloat16 converted(__nv_bfloat16 x) {
    return x;
}
template <>
__device__ inline __half converted(__half x) {
    return x;
}

/* Two floats as a pair of elements, the first in the low half. */
template <typename T>
__device__ inline uint32_t pack_pair(float low, float high);
template <>
__device__ inline uint32_t pack_pair<__nv_bfloat16>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <>
__device__ inline uint32_t pack_pair<__half>(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline int64_t element_bytes(cpa_dtype dtype) {
    return dtype == CPA_F32 ? 4 : 2;
}

__device__ inline float read_element(const void *memory, cpa_dtype dtype, int64_t i) {
    if (dtype == CPA_F32) return ((const float *)memory)[i];
    if (dtype == CPA_BF16) return to_float(((const __nv_bfloat16 *)memory)[i]);
    return to_float(((const __half *)memory)[i]);
}

__device__ inline void write_element(void *memory, cpa_dtype dtype, int64_t i, float value) {
    if (dtype == CPA_F32) {
        ((float *)memory)[i] = value;
    } else if (dtype == CPA_BF16) {
        ((__nv_bfloat16 *)memory)[i] = from_float<__nv_bfloat16>(value);
    } else {
        ((__half *)memory)[i] = from_float<__half>(value);
    }
}

/* UNIT neighbouring elements, read or written at once. */
template <typename Element, int UNIT>
struct alignas(UNIT * sizeof(Element) < 16 ? UNIT * sizeof(Element) : 16) unit_of {
    Element element[UNIT];
};

/* 2 or 4 neighbouring floats, or elements, in one access. */
__device__ inline void load_floats(const float *from, float (&value)[2]) {
    float2 v = *(const float2 *)from;
    value[0] = v.x, value[1] = v.y;
}
__device__ inline void load_floats(const float *from, float (&value)[4]) {
    float4 v = *(const float4 *)from;
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}
__device__ inline void store_floats(float *to, const float (&value)[2]) {
    *(float2 *)to = make_float2(value[0], value[1]);
}
__device__ inline void store_floats(float *to, const float (&value)[4]) {
    *(float4 *)to = make_float4(value[0], value[1], value[2], value[3]);
}
template <typename T>
__device__ inline void store_elements(char *to, int64_t column, const float (&value)[2]) {
    *(uint32_t *)(to + column * 2) = pack_pair<T>(value[0], value[1]);
}
template <typename T>
__device__ inline void store_elements(char *to, int64_t column, const float (&value)[4]) {
    *(uint2 *)(to + column * 2) = make_uint2(pack_pair<T>(value[0], value[1]), pack_pair<T>(value[2], value[3]));
}

/* Whether there is an instruction that rounds to e4m3. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool HAS_CODES = false;
#else
constexpr bool HAS_CODES = true;
#endif

/* Two floats as a pair of codes of e4m3, the first in the low half; saturating, NaN as 0. */
__device__ inline uint32_t pack_codes(float low, float high) {
    uint16_t pair = 0;
    if (HAS_CODES) {
        low = isnan(low) ? 0 : low, high = isnan(high) ? 0 : high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    }
    return pair;
}

/* 2 or 4 neighbouring floats as codes of a scale, given its inverse, in one access. */
__device__ inline void store_codes(char *to, int64_t column, const float (&value)[2], float inverse) {
    *(uint16_t *)(to + column) = (uint16_t)pack_codes(value[0] * inverse, value[1] * inverse);
}
__device__ inline void store_codes(char *to, int64_t column, const float (&value)[4], float inverse) {
    *(uint32_t *)(to + column) = pack_codes(value[0] * inverse, value[1] * inverse) |
                                 pack_codes(value[2] * inverse, value[3] * inverse) << 16;
}

#endif
