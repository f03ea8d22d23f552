/* expert_linear, and linear with weights in FP8: which kernel makes a product. */
#include "kernels/cuda/experts/expert_linear.h"

#include "base/check.h"
#include "kernels/cuda/nn/nn.h"

cpa_status cpa_cuda_expert_multiply(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_expert_multiply_simple(product, stream);
}

cpa_status cpa_cuda_expert_linear(const cpa_expert_linear_args *args, cpa_stream *stream) {
    const cpa_cuda_expert_product product = {.args = *args, .bias = NULL};
    return cpa_cuda_expert_multiply(&product, stream);
}
