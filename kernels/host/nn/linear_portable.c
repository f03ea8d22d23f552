/* The inner loops of linear in vectors of four, which the compiler turns into what the target has. */
#include "kernels/host/isa/isa_portable.h"

#define ISA_OUTPUTS 2

#include "kernels/host/nn/linear_vector.h"

void cpa_linear_portable(const cpa_linear_tile *tile) {
    multiply_tile(tile);
}
