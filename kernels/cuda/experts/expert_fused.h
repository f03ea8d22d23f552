/* What decode of few rows with experts fuses: the entries of kernels/nn.h's table. C and CUDA C++. */
#ifndef CPA_CUDA_EXPERT_FUSED_H
#define CPA_CUDA_EXPERT_FUSED_H

#include "kernels/cuda/device/cuda.h"
#include "kernels/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* fuses_experts and expert_fused: few places of each expert, in 16-bit elements and vectors of 16 bytes. */
int cpa_cuda_fuses_experts(const cpa_expert_linear_args *args, const cpa_stream *stream);
cpa_status cpa_cuda_expert_fused(const cpa_expert_linear_args *args, const cpa_expert_fusion *fusion,
                                 cpa_stream *stream);
/* chooses_experts and expert_choose: a few rows, on devices of CPA_CUDA_HOPPER. */
int cpa_cuda_chooses_experts(const cpa_linear_args *router, const cpa_stream *stream);
cpa_status cpa_cuda_expert_choose(const cpa_linear_args *router, const cpa_expert_route_args *route,
                                  const cpa_expert_permute_args *permute, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
