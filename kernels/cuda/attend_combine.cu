/* attend, last step: joins the partial states that the pieces of a tile left in the work space. A warp a row; the
 * states count in the order of their keys, so the result does not depend on when they were written. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/warp.cuh"

namespace {

constexpr int WARPS = 4;

template <typename Element>
__global__ void __launch_bounds__(WARPS *WARP_LANES) attend_combine(const __grid_constant__ cpa_cuda_attend_args a) {
    dependent_allow(); /* a push of the states */
    dependent_wait();
    const cpa_cuda_split split = a.splits[blockIdx.x];
    const int kv_group = blockIdx.y, rows = split.row_end - split.row_begin, lane = threadIdx.x % WARP_LANES;
    for (int row = blockIdx.z * WARPS + threadIdx.x / WARP_LANES; row < rows; row += gridDim.z * WARPS) {
        const int64_t first = kv_group * a.partial_rows + split.partial + row;
        const float *lses = a.partial_lse + first, *os = a.partial_o + first * a.v_dim;
        float max = -INFINITY, sum = 0;
        for (int s = lane; s < split.count; s += WARP_LANES) max = fmaxf(max, lses[(int64_t)s * rows]);
        max = warp_max(max);
        for (int s = lane; s < split.count && max > -INFINITY; s += WARP_LANES)
            sum += expf(lses[(int64_t)s * rows] - max);
        sum = warp_sum(sum);
        const float lse = max > -INFINITY ? max + logf(sum) : -INFINITY;
        row_sink sink(a, split.q_row, split.row_begin + row, kv_group, lse);
        for (int column = lane * 4; column < a.v_dim; column += WARP_LANES * 4) {
            float value[4] = {0, 0, 0, 0};
#pragma unroll 4
            for (int s = 0; s < split.count; s++) {
                float part[4], weight = lse > -INFINITY ? expf(lses[(int64_t)s * rows] - lse) : 0;
                load_floats(os + (int64_t)s * rows * a.v_dim + column, part);
                for (int e = 0; e < 4; e++) value[e] += weight * part[e];
            }
            sink.store<Element>(column, value);
        }
        __syncwarp(); /* the lanes of the row have read the LSE that is there */
        if (lane == 0) sink.store_lse();
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_combine(const cpa_cuda_attend_args *args, int32_t n_splits, cpa_stream *stream) {
    const int tile_parts = 4; /* CTAs that share a tile's rows */
    const dim3 grid(n_splits, args->kv_heads, tile_parts);
    const auto kernel = args->q_dtype == CPA_BF16 ? attend_combine<__nv_bfloat16> : attend_combine<__half>;
    const bool early = cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER;
    return cpa_cuda_check(
        &stream->error,
        launch_dependent(kernel, grid, WARPS * WARP_LANES, *args, early, cpa_cuda_handle(stream)), "attend");
}
