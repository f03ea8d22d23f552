/* The table of operators beside attention. */
#include "kernels/host/nn/nn.h"

const cpa_nn_table cpa_host_nn = {
    .rmsnorm = cpa_host_rmsnorm,
    .qk_norm_rope = cpa_host_qk_norm_rope,
    .swiglu = cpa_host_swiglu,
    .embed = cpa_host_embed,
    .linear = cpa_host_linear,
    .sample = cpa_host_sample,
    .mark_tokens = cpa_host_mark_tokens,
};
