/* The bias as what a product is added to, for results of another dtype than the bias. */
#include "kernels/cuda/nn/linear.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int THREADS = 256;

struct bias_args {
    int64_t rows;
    int32_t outputs;
    const void *bias;
    float *out;
    int64_t out_stride;
};

template <typename T>
__global__ void __launch_bounds__(THREADS) linear_bias(const __grid_constant__ bias_args a) {
    const int32_t output = blockIdx.x * THREADS + threadIdx.x;
    dependent_wait();
    dependent_allow();
    if (output >= a.outputs) return;
    const float bias = to_float(((const T *)a.bias)[output]);
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) a.out[row * a.out_stride + output] = bias;
}

} // namespace

extern "C" cpa_status cpa_cuda_linear_bias(const cpa_linear_args *args, cpa_stream *stream) {
    const bias_args a = {args->rows, args->outputs, args->bias, (float *)args->out, args->out_stride};
    const dim3 grid((unsigned)((args->outputs + THREADS - 1) / THREADS), grid_rows(args->rows));
    return launch_for_elements(args->dtype, [&](auto tag) {
        return launch_early(linear_bias<typename decltype(tag)::element>, grid, THREADS, a, stream, "linear");
    });
}
