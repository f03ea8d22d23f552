/* block_union: a CTA a query head and so many rows, of which it lists those that bring something new. */
#include "kernels/cuda/device/cuda.h"

namespace {

constexpr int THREADS = 256, MOST_CTAS = 1 << 14;

__global__ void __launch_bounds__(THREADS) block_union(const __grid_constant__ cpa_block_union_args a,
                                                             int64_t words) {
    __shared__ int32_t listed[THREADS]; /* rows, counted from the first of the CTA */
    __shared__ int32_t n;
    const int32_t head = (int32_t)blockIdx.y, kv_head = head / (a.q_heads / a.kv_heads);
    for (int64_t first = (int64_t)blockIdx.x * THREADS; first < a.rows; first += (int64_t)gridDim.x * THREADS) {
        const int64_t own = first + threadIdx.x;
        if (threadIdx.x == 0) n = 0;
        __syncthreads();
        if (own < a.rows && a.set[own] >= 0 && cpa_block_union_is_new(&a, own))
            listed[atomicAdd(&n, 1)] = (int32_t)threadIdx.x;
        __syncthreads();
        for (int32_t i = 0; i < n; i++) {
            const int64_t row = first + listed[i], word = cpa_block_union_word(&a, row);
            const uint32_t *bits = a.blocks.bits + word + head * a.blocks.head_stride;
            uint32_t *out = a.out + ((int64_t)a.set[row] * a.kv_heads + kv_head) * words;
            for (int64_t w = threadIdx.x; w < words; w += THREADS) {
                const uint32_t brings = (word < 0 ? ~0u : bits[w]) & cpa_block_union_all(a.blocks.width, w);
                if (brings & ~out[w]) atomicOr(&out[w], brings);
            }
        }
        __syncthreads(); /* the list has been read */
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_block_union(const cpa_block_union_args *args, cpa_stream *stream) {
    const int64_t words = cpa_mask_words(args->blocks.width);
    const int64_t bytes = args->sets * args->kv_heads * words * (int64_t)sizeof *args->out;
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    status = cpa_cuda_check(&stream->error, cudaMemsetAsync(args->out, 0, (size_t)bytes, cpa_cuda_handle(stream)),
                            "cudaMemsetAsync");
    if (status != CPA_OK || args->rows == 0 || bytes == 0) return status;
    const int64_t ctas = (args->rows + THREADS - 1) / THREADS;
    const dim3 grid((unsigned)(ctas < MOST_CTAS ? ctas : MOST_CTAS), (unsigned)args->q_heads);
    block_union<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(*args, words);
    return cpa_cuda_launched(stream, "block_union");
}
