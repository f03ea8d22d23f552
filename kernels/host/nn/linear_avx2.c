/* The inner loops of linear for AVX2 with FMA and F16C. */
#include "kernels/host/attend/attend_x86.h"

#define ISA_LANES 8
#define ISA_OUTPUTS 6
#define ISA_CELL 8
#define isa_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define isa_load(from, dtype) cpa_x86_load8(from, dtype, 0)
#define isa_transpose cpa_x86_transpose8

#include "kernels/host/nn/linear_vector.h"

void cpa_linear_avx2(const cpa_linear_tile *tile) {
    multiply_tile(tile);
}
