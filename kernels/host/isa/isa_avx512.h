/* Vectors of AVX-512 (vector.h says what each name is). */
#ifndef CPA_HOST_ISA_AVX512_H
#define CPA_HOST_ISA_AVX512_H

#include "kernels/host/isa/x86.h"

#define ISA_LANES 16
#define ISA_CELL 8
#define isa_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define isa_transpose cpa_x86_transpose8

static inline __m512 isa_load(const char *from, cpa_dtype dtype) {
    __m512 low = _mm512_castps256_ps512(cpa_x86_load8(from, dtype, 0));
    return _mm512_insertf32x8(low, cpa_x86_load8(from, dtype, 8), 1);
}

#endif
