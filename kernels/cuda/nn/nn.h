/* The operators beside attention. */
#ifndef CPA_CUDA_NN_H
#define CPA_CUDA_NN_H

#include "kernels/nn.h"

extern const cpa_nn_table cpa_cuda_nn;

#endif
