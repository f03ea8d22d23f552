#include "kernels/cuda/experts/expert_fused.h"

#include "base/check.h"
#include "kernels/cuda/experts/expert_linear.h"

int cpa_cuda_fuses_experts(const cpa_expert_linear_args *args, const cpa_stream *stream) {
    return args->dtype != CPA_F32 && !args->weight_scale && cpa_cuda_expert_in_vectors(args) &&
           cpa_cuda_expert_is_few(args) && cpa_cuda_device_of(stream)->path != CPA_CUDA_SIMPLE;
}

cpa_status cpa_cuda_expert_fused(const cpa_expert_linear_args *args, const cpa_expert_fusion *fusion,
                                 cpa_stream *stream) {
    CPA_TRY(cpa_cuda_select(stream->device, &stream->error));
    return cpa_cuda_expert_multiply_few(args, fusion, stream);
}
