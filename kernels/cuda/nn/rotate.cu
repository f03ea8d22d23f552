/* rotate: a CTA takes a row, or several whose heads are few. */
#include "kernels/cuda/nn/rotate.cuh"

namespace {

constexpr int ROTATE_THREADS = 128;

struct rotate_grid {
    cpa_rotate_args call;
    int32_t log2_threads; /* of a row */
};

template <typename T, int UNIT, bool ONE>
__global__ void __launch_bounds__(ROTATE_THREADS) rotate(const __grid_constant__ rotate_grid grid) {
    const int32_t threads = 1 << grid.log2_threads;
    const int64_t row = (int64_t)blockIdx.x * (ROTATE_THREADS / threads) + (threadIdx.x >> grid.log2_threads);
    dependent_allow();
    dependent_wait();
    if (row < grid.call.rows)
        rotate_row<T, UNIT, ONE>(grid.call, row, {(int32_t)threadIdx.x & (threads - 1), threads});
}

/* So many that each thread of a row takes all of its heads at once; elements beside what is rotated ask for more. */
int32_t log2_threads_of_row(const cpa_rotate_args &a, int32_t unit) {
    const int32_t wanted = a.rope.dim / 2 / unit * ((a.heads + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE);
    int32_t shift = 0;
    while (1 << shift < ROTATE_THREADS && (1 << shift < wanted || a.dim > a.rope.dim)) shift++;
    return shift;
}

} // namespace

extern "C" cpa_status cpa_cuda_rotate(const cpa_rotate_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "rotate: more rows than a grid has CTAs", args->rows);
    return launch_for_rotation(args->dtype, args->rope, rotate_in_vectors(*args), [&](auto tag) {
        using kind = decltype(tag);
        const rotate_grid grid = {*args, log2_threads_of_row(*args, kind::UNIT)};
        const int64_t rows = ROTATE_THREADS >> grid.log2_threads;
        return launch_early(rotate<typename kind::element, kind::UNIT, kind::ONE>,
                            dim3((unsigned)((args->rows + rows - 1) / rows)), ROTATE_THREADS, grid, stream, "rotate");
    });
}
