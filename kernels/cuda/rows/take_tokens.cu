/* take_tokens: a thread a row. */
#include "kernels/cuda/device/cuda.h"

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) take_tokens(const __grid_constant__ cpa_take_tokens_args args) {
    const int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= args.rows) return;
    const int32_t source = args.sources[row];
    if (source >= 0) args.tokens[row] = args.ids[(int64_t)source * args.id_stride];
}

} // namespace

extern "C" cpa_status cpa_cuda_take_tokens(const cpa_take_tokens_args *args, cpa_stream *stream) {
    if (args->rows == 0) return CPA_OK;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const unsigned ctas = (unsigned)((args->rows + THREADS - 1) / THREADS);
    take_tokens<<<ctas, THREADS, 0, cpa_cuda_handle(stream)>>>(*args);
    return cpa_cuda_launched(stream, "take_tokens");
}
