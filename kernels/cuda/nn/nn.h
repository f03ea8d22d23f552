/* The operators beside attention, an operation a file. */
#ifndef CPA_CUDA_NN_H
#define CPA_CUDA_NN_H

#include "kernels/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const cpa_nn_table cpa_cuda_nn;

cpa_status cpa_cuda_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream);
cpa_status cpa_cuda_qk_norm_rope(const cpa_qk_norm_rope_args *args, cpa_stream *stream);
cpa_status cpa_cuda_swiglu(const cpa_swiglu_args *args, cpa_stream *stream);
cpa_status cpa_cuda_embed(const cpa_embed_args *args, cpa_stream *stream);
cpa_status cpa_cuda_linear(const cpa_linear_args *args, cpa_stream *stream);
cpa_status cpa_cuda_sample(const cpa_sample_args *args, cpa_stream *stream);
cpa_status cpa_cuda_mark_tokens(const cpa_mark_tokens_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
