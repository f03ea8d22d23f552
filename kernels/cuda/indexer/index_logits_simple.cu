/* index_logits of any form: a thread has a key, and takes one head of a row after the other. */
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/indexer/index_tile.cuh"

namespace {

constexpr int THREADS = 128;

__device__ float read_number(const cpa_cuda_index_work &w, const char *row, int32_t d) {
    if (w.dtype == CPA_FP8_E4M3) return read_code(row, w.dtype, d, __float_as_uint(1.0f));
    return w.dtype == CPA_F32 ? ((const float *)row)[d] : to_float(((const __nv_bfloat16 *)row)[d]);
}

__global__ void __launch_bounds__(THREADS, 1) index_logits_simple(const __grid_constant__ cpa_cuda_index_work w) {
    __shared__ float q[CPA_INDEX_MOST_DIM], scores[THREADS];
    const index_tile tile = find_index_tile(w, blockIdx.x);
    const int32_t first = blockIdx.y * THREADS, key = first + (int32_t)threadIdx.x;
    const bool has_key = key < tile.keys;
    const int64_t block = has_key ? index_block(w, tile.item, key) : 0;
    const char *row_of_key = index_row(w, block, key);
    const int64_t head_bytes = w.dim * (w.dtype == CPA_FP8_E4M3 ? 1 : w.dtype == CPA_BF16 ? 2 : 4);
    for (int32_t r = 0; r < tile.rows; r++) {
        const int64_t row = tile.item->q_row + tile.first + r;
        float sum = 0;
        for (int32_t head = 0; first < tile.keys && head < w.heads; head++) {
            float dot = 0;
            __syncthreads();
            for (int32_t d = threadIdx.x; d < w.dim; d += THREADS)
                q[d] = read_number(w, w.q + row * w.q_row_stride + head * head_bytes, d);
            __syncthreads();
            for (int32_t d = 0; has_key && d < w.dim; d++) dot += q[d] * read_number(w, row_of_key, d);
            sum += fmaxf(dot, 0) * (w.weights ? w.weights[row * w.weight_row_stride + head] : 1);
        }
        scores[threadIdx.x] = has_key ? sum * read_index_scale(w, block, key) : 0;
        __syncthreads();
        store_columns(w, row, first, (int32_t)cpa_index_keys_seen(&w.items, tile.item, tile.first + r), scores,
                      THREADS);
        __syncthreads();
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_index_logits_simple(const cpa_cuda_index_work *work, cpa_stream *stream) {
    const int64_t chunks = index_chunks(*work, THREADS), most = 65535;
    if (chunks > most) return cpa_cuda_unsupported(stream, "index_logits: more columns than a grid takes", work->width);
    const dim3 grid((unsigned)work->tiles, (unsigned)chunks);
    index_logits_simple<<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(*work);
    return cpa_cuda_launched(stream, "index_logits");
}
