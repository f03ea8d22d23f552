/* The table of operators beside attention. */
#include "kernels/host/nn/nn.h"

#define ROW(name) .name = cpa_host_##name,

const cpa_nn_table cpa_host_nn = {CPA_NN_OPERATORS(ROW)};
