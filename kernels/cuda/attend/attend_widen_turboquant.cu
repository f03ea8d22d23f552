/* Blocks of a cache of TurboQuant in the dtype of the queries, for kernels that take no codes: a warp a row. Keys are
 * rotated back, so that queries stay as they are. */
#include "kernels/cuda/attend/widen.cuh"
#include "kernels/cuda/cache/turboquant.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP_LANES;

/* blockIdx.x names the place, blockIdx.y keys or values. A rotated key of centroids has elements of size 1 once it is
 * divided by the root of its width. */
template <typename Element>
__global__ void __launch_bounds__(THREADS) attend_widen_turboquant(const __grid_constant__ widen_args a, cpa_dtype dtype) {
    const widen_tensor t = a.tensors[blockIdx.y];
    const bool keys = blockIdx.y == 0;
    const int lane = threadIdx.x % WARP_LANES, width = t.dim / WARP_LANES;
    const int64_t place = blockIdx.x, id = __ldg(a.blocks + place);
    const int bits = keys ? tq_key_bits(dtype) : tq_value_bits(dtype);
    if (id < 0) return;
    for (int32_t i = threadIdx.x / WARP_LANES; i < a.kv_heads << a.block_shift; i += WARPS) {
        const int32_t token = i / a.kv_heads, head = i - token * a.kv_heads;
        const char *row = t.from + id * t.block_stride + token * t.token_stride + head * t.head_stride;
        float x[TQ_WIDTH], scale = 1;
        tq_read_row(row, dtype, keys, t.dim, lane, x);
        if (keys && bits < 8 && a.k_scales) {
            const float length = tq_half(row, bits, t.dim, 0), unit = sqrtf((float)t.dim);
            scale = length / unit;
#pragma unroll
            for (int e = 0; e < TQ_WIDTH; e++) x[e] = length > 0 ? x[e] / scale : 0;
        }
        if (keys && lane == 0 && a.k_scales) a.key_scale((place << a.block_shift) + token, head) = scale;
        Element *to = (Element *)t.to + (((place << a.block_shift) + token) * a.kv_heads + head) * t.dim + lane * width;
#pragma unroll
        for (int e = 0; e < TQ_WIDTH; e++)
            if (e < width) to[e] = from_float<Element>(x[e]);
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_widen_turboquant(const cpa_cuda_attend_args *args, const int32_t *blocks,
                                                       int32_t n_blocks, int32_t wide_block, void *k, void *v,
                                                       float *k_scales, cpa_stream *stream) {
    const widen_args a(*args, blocks, n_blocks, wide_block, k, v, k_scales);
    const dim3 grid(n_blocks, 2);
    if (args->q_dtype == CPA_BF16) {
        attend_widen_turboquant<__nv_bfloat16><<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a, args->kv_dtype);
    } else {
        attend_widen_turboquant<__half><<<grid, THREADS, 0, cpa_cuda_handle(stream)>>>(a, args->kv_dtype);
    }
    return cpa_cuda_launched(stream, "attend");
}
