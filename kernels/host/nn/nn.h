/* The operators beside attention, an operation a file. */
#ifndef CPA_HOST_NN_H
#define CPA_HOST_NN_H

#include "kernels/nn.h"

extern const cpa_nn_table cpa_host_nn;

cpa_status cpa_host_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream);
cpa_status cpa_host_qk_norm_rope(const cpa_qk_norm_rope_args *args, cpa_stream *stream);
cpa_status cpa_host_swiglu(const cpa_swiglu_args *args, cpa_stream *stream);
cpa_status cpa_host_embed(const cpa_embed_args *args, cpa_stream *stream);
cpa_status cpa_host_linear(const cpa_linear_args *args, cpa_stream *stream);
cpa_status cpa_host_sample(const cpa_sample_args *args, cpa_stream *stream);
cpa_status cpa_host_mark_tokens(const cpa_mark_tokens_args *args, cpa_stream *stream);

#endif
