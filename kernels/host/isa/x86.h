/* Loads of eight and transposes of 8 x 8, for AVX2 and for AVX-512. */
#ifndef CPA_HOST_ISA_X86_H
#define CPA_HOST_ISA_X86_H

#include <immintrin.h>

#include <cpattn/types.h>

/* Elements [d, d + 8) of a row as floats. */
static inline __m256 cpa_x86_load8(const char *row, cpa_dtype dtype, int32_t d) {
    if (dtype == CPA_F32) return _mm256_loadu_ps((const float *)(const void *)(row + d * 4));
    __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(row + d * 2));
    if (dtype == CPA_F16) return _mm256_cvtph_ps(half);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* to[i * stride + j] = element d + i of row j. */
static inline void cpa_x86_transpose8(float *to, int64_t stride, const char *const *rows, cpa_dtype dtype, int32_t d) {
    __m256 r0 = cpa_x86_load8(rows[0], dtype, d), r1 = cpa_x86_load8(rows[1], dtype, d);
    __m256 r2 = cpa_x86_load8(rows[2], dtype, d), r3 = cpa_x86_load8(rows[3], dtype, d);
    __m256 r4 = cpa_x86_load8(rows[4], dtype, d), r5 = cpa_x86_load8(rows[5], dtype, d);
    __m256 r6 = cpa_x86_load8(rows[6], dtype, d), r7 = cpa_x86_load8(rows[7], dtype, d);
    __m256 a0 = _mm256_unpacklo_ps(r0, r1), a1 = _mm256_unpackhi_ps(r0, r1);
    __m256 a2 = _mm256_unpacklo_ps(r2, r3), a3 = _mm256_unpackhi_ps(r2, r3);
    __m256 a4 = _mm256_unpacklo_ps(r4, r5), a5 = _mm256_unpackhi_ps(r4, r5);
    __m256 a6 = _mm256_unpacklo_ps(r6, r7), a7 = _mm256_unpackhi_ps(r6, r7);
    __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
    __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
    __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
    __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(b0, b4, 0x20));
    _mm256_storeu_ps(to + stride, _mm256_permute2f128_ps(b1, b5, 0x20));
    _mm256_storeu_ps(to + 2 * stride, _mm256_permute2f128_ps(b2, b6, 0x20));
    _mm256_storeu_ps(to + 3 * stride, _mm256_permute2f128_ps(b3, b7, 0x20));
    _mm256_storeu_ps(to + 4 * stride, _mm256_permute2f128_ps(b0, b4, 0x31));
    _mm256_storeu_ps(to + 5 * stride, _mm256_permute2f128_ps(b1, b5, 0x31));
    _mm256_storeu_ps(to + 6 * stride, _mm256_permute2f128_ps(b2, b6, 0x31));
    _mm256_storeu_ps(to + 7 * stride, _mm256_permute2f128_ps(b3, b7, 0x31));
}

#endif
