/* project_states: a CTA takes some rows of one head, whose O lies in shared memory, and a lane has a column of the
 * results. The warps share the columns of O, so that the few CTAs of few rows have many loads under way; what these read
 * of the matrix is fetched while the kernel in front still runs. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/state.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"

namespace {

constexpr int ROWS = 8, COLUMNS = 32, SLICES = 16, THREADS = SLICES * COLUMNS; /* SLICES warps */
static_assert(ROWS * COLUMNS <= THREADS, "a result a thread");

template <typename T>
__global__ void __launch_bounds__(THREADS) project_states(const __grid_constant__ cpa_project_states_args a) {
    __shared__ __align__(16) float o[CPA_MAX_HEAD_DIM][ROWS];
    __shared__ float parts[SLICES][ROWS][COLUMNS];
    const int64_t head = blockIdx.x % a.heads, first = (int64_t)(blockIdx.x / a.heads) * ROWS;
    const int rows = (int)(a.rows - first < ROWS ? a.rows - first : ROWS);
    const int lane = threadIdx.x % COLUMNS, slice = threadIdx.x / COLUMNS, column = blockIdx.y * COLUMNS + lane;
    const T *matrix = (const T *)a.matrix + head * a.v_dim * a.out_dim + (int64_t)blockIdx.y * COLUMNS;
    const float *lse = a.from.lse + first * a.from.lse_row_stride + head;
    const float *from = a.from.o + first * a.from.o_row_stride + head * a.v_dim;
    for (int d = threadIdx.x; d < a.v_dim; d += THREADS) prefetch_l2(matrix + (int64_t)d * a.out_dim);
    dependent_allow();
    dependent_wait();
    for (int i = threadIdx.x; i < a.v_dim * ROWS; i += THREADS) {
        const int row = i / a.v_dim, d = i % a.v_dim;
        const bool is_read = row < rows && counted_lse(lse[row * a.from.lse_row_stride], 0) != -INFINITY;
        o[d][row] = is_read ? from[row * a.from.o_row_stride + d] : 0;
    }
    if (blockIdx.y == 0 && threadIdx.x < rows)
        a.to.lse[(first + threadIdx.x) * a.to.lse_row_stride + head] = lse[threadIdx.x * a.from.lse_row_stride];
    __syncthreads();
    float sum[ROWS] = {};
    if (column < a.out_dim) {
#pragma unroll 16
        for (int d = slice; d < a.v_dim; d += SLICES) {
            const float factor = to_float(matrix[(int64_t)d * a.out_dim + lane]);
#pragma unroll
            for (int row = 0; row < ROWS; row++) sum[row] = fmaf(o[d][row], factor, sum[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) parts[slice][row][lane] = sum[row];
    __syncthreads();
    if (slice >= rows || column >= a.out_dim) return; /* a warp a row */
    float all = 0;
#pragma unroll
    for (int i = 0; i < SLICES; i++) all += parts[i][slice][lane];
    a.to.o[(first + slice) * a.to.o_row_stride + head * a.out_dim + column] = all;
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
    const dim3 grid((unsigned)ctas, (unsigned)((args->out_dim + COLUMNS - 1) / COLUMNS));
    const int early = cpa_cuda_starts_early(stream, ctas * grid.y);
    return cpa_cuda_check(&stream->error,
                          launch_dependent(kernel, grid, THREADS, *args, early, cpa_cuda_handle(stream)),
                          "project_states");
}
