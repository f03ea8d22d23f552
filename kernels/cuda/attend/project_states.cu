/* project_states: a CTA takes some rows of one head, whose O lies in shared memory; a thread has some columns of the
 * results, so that a row of the matrix is loaded once for all rows of the CTA. */
#include "kernels/cuda/attend/state.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"

namespace {

constexpr int THREADS = 128, ROWS = 8;

template <typename T>
__global__ void __launch_bounds__(THREADS) project_states(const __grid_constant__ cpa_project_states_args a) {
    __shared__ float o[CPA_MAX_HEAD_DIM][ROWS];
    const int64_t head = blockIdx.x % a.heads, first = (int64_t)(blockIdx.x / a.heads) * ROWS;
    const int rows = (int)(a.rows - first < ROWS ? a.rows - first : ROWS);
    const float *lse = a.from.lse + first * a.from.lse_row_stride + head;
    const float *from = a.from.o + first * a.from.o_row_stride + head * a.v_dim;
    for (int row = 0; row < ROWS; row++) {
        const bool is_read = row < rows && counted_lse(lse[row * a.from.lse_row_stride], 0) != -INFINITY;
        for (int d = threadIdx.x; d < a.v_dim; d += THREADS)
            o[d][row] = is_read ? from[row * a.from.o_row_stride + d] : 0;
    }
    if (threadIdx.x < rows)
        a.to.lse[(first + threadIdx.x) * a.to.lse_row_stride + head] = lse[threadIdx.x * a.from.lse_row_stride];
    __syncthreads();
    const T *matrix = (const T *)a.matrix + head * a.v_dim * a.out_dim;
    float *to = a.to.o + first * a.to.o_row_stride + head * a.out_dim;
    for (int column = threadIdx.x; column < a.out_dim; column += THREADS) {
        float sum[ROWS] = {};
        for (int d = 0; d < a.v_dim; d++) {
            const float factor = to_float(matrix[(int64_t)d * a.out_dim + column]);
#pragma unroll
            for (int row = 0; row < ROWS; row++) sum[row] = fmaf(o[d][row], factor, sum[row]);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            if (row < rows) to[row * a.to.o_row_stride + column] = sum[row];
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_project_states(const cpa_project_states_args *args, cpa_stream *stream) {
    const int64_t ctas = (args->rows + ROWS - 1) / ROWS * args->heads;
    const auto kernel = args->dtype == CPA_F32    ? project_states<float>
                        : args->dtype == CPA_BF16 ? project_states<__nv_bfloat16>
                                                  : project_states<__half>;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (ctas > INT32_MAX) return cpa_cuda_unsupported(stream, "more rows than a grid counts", args->rows);
    kernel<<<(unsigned)ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "project_states");
}
