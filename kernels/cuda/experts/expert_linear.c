/* expert_linear, and linear with weights in FP8: which kernel makes a product. */
#include "kernels/cuda/experts/expert_linear.h"

#include "base/check.h"
#include "kernels/cuda/nn/nn.h"

/* Places that an expert has in the mean, from which on wgmma's tiles are full enough. */
enum { MANY_PLACES = 64 };

cpa_status cpa_cuda_expert_multiply(const cpa_cuda_expert_product *product, cpa_stream *stream) {
    const cpa_expert_linear_args *a = &product->args;
    const cpa_cuda_path path = cpa_cuda_device_of(stream)->path;
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    if (a->dtype == CPA_F32 || !cpa_cuda_expert_in_vectors(a) || path == CPA_CUDA_SIMPLE)
        return cpa_cuda_expert_multiply_simple(product, stream);
    if (path != CPA_CUDA_HOPPER || a->rows / a->experts <= MANY_PLACES || (a->weight_scale && a->dtype != CPA_BF16))
        return cpa_cuda_expert_multiply_tiles(product, stream);
    return a->weight_scale ? cpa_cuda_expert_multiply_hopper_codes(product, stream)
                           : cpa_cuda_expert_multiply_hopper(product, stream);
}

cpa_status cpa_cuda_expert_linear(const cpa_expert_linear_args *args, cpa_stream *stream) {
    const cpa_cuda_expert_product product = {.args = *args, .bias = NULL};
    return cpa_cuda_expert_multiply(&product, stream);
}
