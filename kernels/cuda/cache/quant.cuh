/* Quantised rows on the device: codes and scale words as cpattn/shape.h defines them, with the bits of
 * kernels/host/cache/quantise.h; and codes as pairs of fp16, in which every code of either dtype is exact. */
#ifndef CPA_CUDA_QUANT_CUH
#define CPA_CUDA_QUANT_CUH

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include "kernels/cuda/device/element.cuh"

__device__ inline uint32_t pair_bits(__half2 pair) {
    return *(const uint32_t *)&pair;
}
__device__ inline __half2 bits_pair(uint32_t bits) {
    return *(const __half2 *)&bits;
}

/* The scale of the rows of a head that have none of their own: that of the tensor, times that of the head if there are
 * such. */
__device__ inline float head_scale(float tensor_scale, const float *scales, int32_t step, int32_t head) {
    return scales ? tensor_scale * __ldg(scales + head * step) : tensor_scale;
}

/* Both kinds of codes:
 *     zero     what widen subtracts from the codes of two rows, or twice from those of one
 *     widen    four codes as two pairs of fp16; those of e4m3 over FACTOR
 *     scale    of a row, for e4m3 times FACTOR: scale * widened is the value
 *     word     that stands for the scale of a whole tensor */
struct e4m3_codes {
    static __device__ uint32_t zero(uint32_t, uint32_t) { return 0; }
    static __device__ uint32_t word(float tensor_scale) { return __float_as_uint(tensor_scale); }
#if __CUDA_ARCH__ >= 890
    static constexpr float FACTOR = 1;
    static __device__ void widen(uint32_t four, uint32_t, uint32_t &low, uint32_t &high) {
        asm("{ .reg .b16 first, last; mov.b32 {first, last}, %2; "
            "cvt.rn.f16x2.e4m3x2 %0, first; cvt.rn.f16x2.e4m3x2 %1, last; }"
            : "=r"(low), "=r"(high)
            : "r"(four));
    }
#else
    static constexpr float FACTOR = 256;
    /* Exponent and mantissa in the place of those of fp16, whose bias is 8 more. */
    static __device__ uint32_t place(uint32_t high_bytes) {
        return (high_bytes & 0x80008000u) | (high_bytes & 0x7f007f00u) >> 1;
    }
    static __device__ void widen(uint32_t four, uint32_t, uint32_t &low, uint32_t &high) {
        low = place(__byte_perm(four, 0, 0x1404));
        high = place(__byte_perm(four, 0, 0x3424));
    }
#endif
    static __device__ float scale(uint32_t word) { return __uint_as_float(word) * FACTOR; }
};

/* The upper bytes of fp16; for what is compiled for them, few kernels. */
struct e5m2_codes {
    static constexpr float FACTOR = 1;
    static __device__ uint32_t zero(uint32_t, uint32_t) { return 0; }
    static __device__ uint32_t word(float tensor_scale) { return __float_as_uint(tensor_scale); }
    static __device__ void widen(uint32_t four, uint32_t, uint32_t &low, uint32_t &high) {
        low = __byte_perm(four, 0, 0x1404);
        high = __byte_perm(four, 0, 0x3424);
    }
    static __device__ float scale(uint32_t word) { return __uint_as_float(word); }
};

struct int8_codes {
    /* A byte with 0x64 above it is the fp16 number 1024 + byte; codes are offset by 128. */
    static __device__ uint32_t zero(uint32_t low_word, uint32_t high_word) {
        return ((__byte_perm(low_word, high_word, 0x0400) & 0x00ff00ffu) ^ 0x00800080u) | 0x64006400u;
    }
    static __device__ void widen(uint32_t four, uint32_t zero, uint32_t &low, uint32_t &high) {
        const uint32_t offset = four ^ 0x80808080u;
        low = pair_bits(__hsub2(bits_pair(__byte_perm(offset, 0x64646464u, 0x4140)), bits_pair(zero)));
        high = pair_bits(__hsub2(bits_pair(__byte_perm(offset, 0x64646464u, 0x4342)), bits_pair(zero)));
    }
    static __device__ float scale(uint32_t word) { return __uint_as_float(word & ~0xffu); }
    static __device__ uint32_t word(float) { return 0; } /* no tensor has one scale */
};

/* Eight codes of a row with that word as elements, times `factor`: Codes::scale(word) gives their values, rounded, and
 * 1 what widen gives, exact. */
template <typename Codes, typename Element>
__device__ inline uint4 widen_eight(uint2 eight, uint32_t word, float factor) {
    const uint32_t zero = Codes::zero(word, word), four[2] = {eight.x, eight.y};
    uint32_t out[4];
#pragma unroll
    for (int f = 0; f < 2; f++) {
        uint32_t pair[2];
        Codes::widen(four[f], zero, pair[0], pair[1]);
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const float2 x = __half22float2(bits_pair(pair[p]));
            out[2 * f + p] = pack_pair<Element>(x.x * factor, x.y * factor);
        }
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

template <typename Kind>
struct codes_tag {
    using codes = Kind;
};

/* Whether rows are codes with one word each, of a row, a head or a tensor. */
__host__ __device__ inline bool is_code(cpa_dtype dtype) {
    return dtype == CPA_FP8_E4M3 || dtype == CPA_INT8 || dtype == CPA_FP8_E5M2;
}

/* On the host: launch(codes_tag<...>()) with the codes of a quantised dtype, for kernels that are compiled for e4m3 and
 * int8. */
template <typename Launch>
auto launch_for_codes(cpa_dtype dtype, const Launch &launch) {
    if (dtype == CPA_INT8) return launch(codes_tag<int8_codes>());
    return launch(codes_tag<e4m3_codes>());
}

/* One element. */
__device__ inline float read_code(const void *codes, cpa_dtype dtype, int64_t i, uint32_t word) {
    uint32_t low, high;
    const uint32_t code = ((const uint8_t *)codes)[i];
    if (dtype == CPA_INT8) {
        int8_codes::widen(code, int8_codes::zero(word, word), low, high);
        return int8_codes::scale(word) * __low2float(bits_pair(low));
    }
    if (dtype == CPA_FP8_E5M2) {
        e5m2_codes::widen(code, 0, low, high);
        return __uint_as_float(word) * __low2float(bits_pair(low));
    }
    e4m3_codes::widen(code, 0, low, high);
    return __uint_as_float(word) * (__low2float(bits_pair(low)) * e4m3_codes::FACTOR);
}

__device__ inline float finite_or_zero(float x) {
    return is_nonfinite(x) ? 0 : x;
}

/* The scale word of a row whose finite elements and 0 span [low, high]. */
__device__ inline uint32_t scale_word(cpa_dtype dtype, float tensor_scale, float low, float high) {
    if (dtype != CPA_INT8) {
        const float most = dtype == CPA_FP8_E5M2 ? 57344.0f : 448.0f;
        return __float_as_uint(tensor_scale != 0 ? tensor_scale : __fdiv_rn(fmaxf(high, -low), most));
    }
    const float range = __fsub_rn(__fdiv_rn(high, 255.0f), __fdiv_rn(low, 255.0f));
    const uint32_t bits = (__float_as_uint(range) + 0xff) & ~0xffu;
    if (bits == 0) return 0;
    const float zero = fminf(rintf(__fdiv_rn(-low, __uint_as_float(bits))) - 128, 127);
    return bits | (uint8_t)(int8_t)zero;
}

/* What is nearest to x in e4m3; what is out of range saturates, and NaN is 0. */
__device__ inline uint8_t e4m3_code(float x) {
    return isnan(x) ? 0 : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

__device__ inline uint16_t e4m3_pair(float low, float high) {
    const float2 pair = make_float2(isnan(low) ? 0 : low, isnan(high) ? 0 : high);
    return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
}

/* Four of them that are numbers. */
__device__ inline uint32_t e4m3_four_numbers(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    uint32_t four;
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
        : "=r"(four)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
#else
    return e4m3_pair(a, b) | (uint32_t)e4m3_pair(c, d) << 16;
#endif
}

/* Four of them. An instruction that rounds gives 0x7f or 0xff for NaN, which nothing else becomes. */
__device__ inline uint32_t e4m3_four(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    const uint32_t four = e4m3_four_numbers(a, b, c, d), nan = ((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return four & ~(nan | (nan - (nan >> 7)));
#else
    return e4m3_four_numbers(a, b, c, d);
#endif
}

/* The largest magnitude of those that are finite; 0 without any. Maxima leave out NaN. */
template <int N>
__device__ inline float largest_finite(const float (&x)[N]) {
    float most = 0;
#pragma unroll
    for (int e = 0; e < N; e++) most = fmaxf(most, fabsf(x[e]));
    if (!is_nonfinite(most)) return most;
    most = 0;
#pragma unroll
    for (int e = 0; e < N; e++) most = fmaxf(most, fabsf(finite_or_zero(x[e])));
    return most;
}

/* The same; NaN among them becomes 0. */
template <int N>
__device__ inline float largest_of_numbers(float (&x)[N]) {
    float most = 0;
#pragma unroll
    for (int e = 0; e < N; e++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(x[e])));
    if (!is_nonfinite(most)) return most;
#pragma unroll
    for (int e = 0; e < N; e++) x[e] = isnan(x[e]) ? 0 : x[e];
    return largest_finite(x);
}

/* One over a power of two that is normal and below 2^127: exact. */
__device__ inline float inverse_of_pow2(float scale) {
    return __uint_as_float((254u << 23) - __float_as_uint(scale));
}

/* What is nearest to x in e5m2, likewise. */
__device__ inline uint8_t e5m2_code(float x) {
    return isnan(x) ? 0 : __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
}

/* The code of an element of a row with that word. */
__device__ inline uint8_t code_of(cpa_dtype dtype, uint32_t word, float x) {
    if (dtype == CPA_FP8_E4M3) return e4m3_code(__fdiv_rn(x, __uint_as_float(word)));
    if (dtype == CPA_FP8_E5M2) return e5m2_code(__fdiv_rn(x, __uint_as_float(word)));
    const float quotient = __fdiv_rn(x, int8_codes::scale(word));
    const float code = (isnan(quotient) ? 0 : rintf(quotient)) + (float)(int8_t)(word & 0xff);
    return (uint8_t)(int8_t)fminf(fmaxf(code, -128), 127);
}

#endif
