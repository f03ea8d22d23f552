/* The inner loops of linear for AVX-512. */
#include "kernels/host/attend/attend_x86.h"

#define ISA_LANES 16
#define ISA_OUTPUTS 12
#define ISA_CELL 8
#define isa_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define isa_transpose cpa_x86_transpose8

static inline __m512 isa_load(const char *from, cpa_dtype dtype) {
    __m512 low = _mm512_castps256_ps512(cpa_x86_load8(from, dtype, 0));
    return _mm512_insertf32x8(low, cpa_x86_load8(from, dtype, 8), 1);
}

#include "kernels/host/nn/linear_vector.h"

void cpa_linear_avx512(const cpa_linear_tile *tile) {
    multiply_tile(tile);
}
