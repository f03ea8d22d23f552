/* Vectors of AVX-512 (vector.h says what each name is). */
#ifndef CPA_HOST_ISA_AVX512_H
#define CPA_HOST_ISA_AVX512_H

#include "kernels/host/isa/x86.h"

#define ISA_LANES 16
#define ISA_CELL 16
#define isa_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define isa_max(a, b) _mm512_max_ps(b, a)
#define isa_max_of(a) _mm512_reduce_max_ps(a)
#define isa_sum_of(a) _mm512_reduce_add_ps(a)
#define isa_zero_below(a, x, least) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_NLT_UQ), a)
#define isa_transpose cpa_avx512_transpose16

static inline __m512 isa_load(const char *from, cpa_dtype dtype) {
    if (dtype == CPA_F32) return _mm512_loadu_ps((const float *)(const void *)from);
    __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)from);
    if (dtype == CPA_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Rows of 16 words: word i of row j becomes word j of row i. */
static inline __attribute__((always_inline)) void cpa_avx512_transpose_words(__m512 r[16]) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    /* r[4 g + c] now has, in its quarter w, word 4 w + c of rows 4 g to 4 g + 3: quarters remain to be transposed. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        t[c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        t[8 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        t[12 + c] = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        r[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
        r[4 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0x88);
        r[12 + c] = _mm512_shuffle_f32x4(t[4 + c], t[12 + c], 0xdd);
    }
}

/* to[i * stride + j] = element d + i of row j. */
static inline __attribute__((always_inline)) void cpa_avx512_transpose16(float *to, int64_t stride,
                                                                         const char *const *rows, cpa_dtype dtype,
                                                                         int32_t d) {
    __m512 r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = isa_load(rows[i] + d * cpa_dtype_bytes(dtype), dtype);
    cpa_avx512_transpose_words(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(to + i * stride, r[i]);
}

#endif
