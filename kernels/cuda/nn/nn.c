/* The table of operators beside attention. */
#include "kernels/cuda/nn/nn.h"

#define ROW(name) .name = cpa_cuda_##name,

const cpa_nn_table cpa_cuda_nn = {CPA_NN_OPERATORS(ROW)};
