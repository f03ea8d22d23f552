/* Vectors of AVX2 with FMA and F16C (vector.h says what each name is). */
#ifndef CPA_HOST_ISA_AVX2_H
#define CPA_HOST_ISA_AVX2_H

#include "kernels/host/isa/x86.h"

#define ISA_LANES 8
#define ISA_CELL 8
#define isa_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define isa_load(from, dtype) cpa_x86_load8(from, dtype, 0)
#define isa_transpose cpa_x86_transpose8

#endif
