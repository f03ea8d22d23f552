/* The table of operators beside attention. */
#include "kernels/cuda/nn/nn.h"

const cpa_nn_table cpa_cuda_nn = {
    .rmsnorm = cpa_cuda_rmsnorm,
    .qk_norm_rope = cpa_cuda_qk_norm_rope,
    .swiglu = cpa_cuda_swiglu,
    .embed = cpa_cuda_embed,
    .linear = cpa_cuda_linear,
    .sample = cpa_cuda_sample,
    .mark_tokens = cpa_cuda_mark_tokens,
};
