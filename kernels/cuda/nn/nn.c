/* The table of operators beside attention. */
#include "kernels/cuda/nn/nn.h"

#include "kernels/cuda/experts/expert_fused.h"
#include "kernels/cuda/nn/linear.h"

#define ROW(name) .name = cpa_cuda_##name,

const cpa_nn_table cpa_cuda_nn = {
    CPA_NN_OPERATORS(ROW) /* each ends in a comma */
        .linear_fused = cpa_cuda_linear_few,
    .fused_rows = CPA_CUDA_FEW_ROWS,
    .normed_inputs = CPA_CUDA_NORMED_INPUTS,
    .fuses_experts = cpa_cuda_fuses_experts,
    .expert_fused = cpa_cuda_expert_fused,
    .chooses_experts = cpa_cuda_chooses_experts,
    .expert_choose = cpa_cuda_expert_choose,
};
