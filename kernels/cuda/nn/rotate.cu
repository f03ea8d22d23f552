/* rotate: a CTA takes the heads of a row. */
#include "kernels/cuda/nn/rotate.cuh"

namespace {

constexpr int ROTATE_THREADS = 128;

template <typename T, int UNIT>
__global__ void __launch_bounds__(ROTATE_THREADS) rotate(const __grid_constant__ cpa_rotate_args a) {
    dependent_wait();
    dependent_allow();
    rotate_row<T, UNIT>(a, blockIdx.x);
}

} // namespace

extern "C" cpa_status cpa_cuda_rotate(const cpa_rotate_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "rotate: more rows than a grid has CTAs", args->rows);
    return launch_for_elements(args->dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        return launch_early(rotate_in_vectors(*args) ? rotate<T, VECTOR<T>> : rotate<T, 1>,
                            dim3((unsigned)args->rows), ROTATE_THREADS, *args, stream, "rotate");
    });
}
