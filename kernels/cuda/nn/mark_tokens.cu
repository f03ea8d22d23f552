/* mark_tokens: one kernel clears the bits and counts of sequences that restart, and the next one sets those of
 * tokens. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) clear_tokens(const __grid_constant__ cpa_mark_tokens_args a) {
    const int64_t words = (a.vocabulary + 31) / 32, word = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    dependent_wait();
    dependent_allow();
    if (word >= words) return;
    for (int64_t i = blockIdx.y; i < a.n_restarts; i += gridDim.y) {
        const int64_t sequence = a.restarts[i];
        if (sequence < 0 || sequence >= a.sequences) continue;
        a.in_prompt[sequence * words + word] = a.in_output[sequence * words + word] = 0;
        for (int64_t token = word; a.output_counts && token < a.vocabulary; token += words)
            a.output_counts[sequence * a.vocabulary + token] = 0;
    }
}

__global__ void __launch_bounds__(THREADS) mark_tokens(const __grid_constant__ cpa_mark_tokens_args a) {
    const int64_t words = (a.vocabulary + 31) / 32, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    dependent_wait();
    dependent_allow();
    if (i >= a.count) return;
    const int64_t sequence = a.sequence[i];
    const uint32_t token = a.tokens[i];
    if (sequence < 0 || sequence >= a.sequences || token >= a.vocabulary) return;
    atomicOr((a.outputs[i] ? a.in_output : a.in_prompt) + sequence * words + token / 32, 1u << (token % 32));
    if (a.outputs[i] && a.output_counts) atomicAdd(a.output_counts + sequence * a.vocabulary + token, 1u);
}

} // namespace

extern "C" cpa_status cpa_cuda_mark_tokens(const cpa_mark_tokens_args *args, cpa_stream *stream) {
    const int64_t words = (args->vocabulary + 31) / 32, ctas = (args->count + THREADS - 1) / THREADS;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (ctas > INT32_MAX)
        return cpa_cuda_unsupported(stream, "mark_tokens: more tokens than a grid has threads", args->count);
    if (args->n_restarts > 0) {
        const dim3 grid((unsigned)((words + THREADS - 1) / THREADS), grid_rows(args->n_restarts));
        status = launch_early(clear_tokens, grid, THREADS, *args, stream, "mark_tokens");
    }
    if (status == CPA_OK && ctas > 0)
        status = launch_early(mark_tokens, dim3((unsigned)ctas), THREADS, *args, stream, "mark_tokens");
    return status;
}
