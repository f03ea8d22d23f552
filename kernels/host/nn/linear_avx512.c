/* The inner loops of linear for AVX-512. */
#include "kernels/host/isa/isa_avx512.h"

#define ISA_OUTPUTS 12

#include "kernels/host/nn/linear_vector.h"

void cpa_linear_avx512(const cpa_linear_tile *tile) {
    multiply_tile(tile);
}
