/* The inner loops of linear for AVX2 with FMA and F16C. */
#include "kernels/host/isa/isa_avx2.h"

#define ISA_OUTPUTS 6

#include "kernels/host/nn/linear_vector.h"

void cpa_linear_avx2(const cpa_linear_tile *tile) {
    multiply_tile(tile);
}
