/* The operators beside attention, an operation a file: cpa_cuda_<name>. */
#ifndef CPA_CUDA_NN_H
#define CPA_CUDA_NN_H

#include "kernels/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const cpa_nn_table cpa_cuda_nn;

#define CPA_CUDA_NN_DECLARE(name) cpa_status cpa_cuda_##name(const cpa_##name##_args *args, cpa_stream *stream);
CPA_NN_OPERATORS(CPA_CUDA_NN_DECLARE)
#undef CPA_CUDA_NN_DECLARE

#ifdef __cplusplus
}
#endif

#endif
