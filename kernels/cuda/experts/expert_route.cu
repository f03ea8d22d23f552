/* expert_route: a warp has a token. */
#include "kernels/cuda/experts/route_token.cuh"
#include "kernels/cuda/nn/nn.h"

namespace {

constexpr int WARPS = 2, THREADS = WARPS * WARP_LANES;

__global__ void __launch_bounds__(THREADS) expert_route(const __grid_constant__ cpa_expert_route_args a) {
    __shared__ token_scores scores[WARPS];
    const int warp = threadIdx.x / WARP_LANES;
    dependent_allow();
    dependent_wait();
    for (int64_t row = (int64_t)blockIdx.x * WARPS + warp; row < a.rows; row += (int64_t)gridDim.x * WARPS)
        route_token(a, row, scores[warp]);
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_route(const cpa_expert_route_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    return launch_early(expert_route, dim3(grid_rows((args->rows + WARPS - 1) / WARPS)), THREADS, *args, stream,
                        "expert_route");
}
