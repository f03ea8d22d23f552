/* Blocks of a quantised cache in the dtype of the queries, for kernels that take no codes: a thread widens 8 codes at a
 * time, and a CTA TOKENS of a block, or as many blocks as hold them. Values are rounded; codes of keys are exact, and
 * their scales lie apart, if there is a place for them, else keys are as values. What lies past the last token of a
 * block is widened too; nobody reads it into a result. */
#include "kernels/cuda/attend/widen.cuh"

namespace {

constexpr int THREADS = 256, TOKENS = 16;

template <typename Element, typename Codes>
__device__ void widen_block(const widen_args &a, const widen_tensor &t, int64_t place) {
    const int32_t chunks = t.dim / 8, token_chunks = a.kv_heads * chunks, all = token_chunks << a.block_shift;
    const int32_t part = all / gridDim.z, end = part * (blockIdx.z + 1);
    const int64_t id = __ldg(a.blocks + place);
    const char *block = t.from + id * t.block_stride;
    uint4 *to = (uint4 *)t.to + place * all;
    if (id < 0) return;
    for (int32_t i = end - part + threadIdx.x; i < end; i += THREADS) {
        const int32_t token = i / token_chunks, rest = i - token * token_chunks, head = rest / chunks;
        const int32_t chunk = rest - head * chunks;
        const uint2 eight = __ldg((const uint2 *)(block + token * t.token_stride + head * t.head_stride + chunk * 8));
        const uint32_t *words = (const uint32_t *)(block + t.words_at) + (head << a.block_shift) + token;
        const uint32_t word = t.words_at ? __ldg(words) : Codes::word(a.scale_of(t, head));
        const bool keys = blockIdx.y == 0;
        const float scale = Codes::scale(word);
        const bool apart = keys && a.k_scales;
        if (apart && chunk == 0) a.key_scale((place << a.block_shift) + token, head) = scale;
        to[i] = widen_eight<Codes, Element>(eight, word, apart ? 1 : scale);
    }
}

/* Blocks of a CTA. */
__host__ __device__ int32_t cta_blocks(const widen_args &a) {
    return max(TOKENS >> a.block_shift, 1);
}

template <typename Element, typename Codes>
__global__ void __launch_bounds__(THREADS) attend_widen(const __grid_constant__ widen_args a) {
    const widen_tensor t = a.tensors[blockIdx.y];
    const int32_t first = blockIdx.x * cta_blocks(a);
    for (int32_t place = first; place < min(first + cta_blocks(a), a.n_blocks); place++)
        widen_block<Element, Codes>(a, t, place);
}

template <typename Element>
void launch(const widen_args &a, cpa_dtype dtype, cudaStream_t stream) {
    const dim3 grid((a.n_blocks + cta_blocks(a) - 1) / cta_blocks(a), 2, max((1 << a.block_shift) / TOKENS, 1));
    if (dtype == CPA_FP8_E5M2) {
        attend_widen<Element, e5m2_codes><<<grid, THREADS, 0, stream>>>(a);
        return;
    }
    launch_for_codes(dtype, [&](auto tag) {
        attend_widen<Element, typename decltype(tag)::codes><<<grid, THREADS, 0, stream>>>(a);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_widen(const cpa_cuda_attend_args *args, const int32_t *blocks, int32_t n_blocks,
                                            int32_t wide_block, void *k, void *v, float *k_scales,
                                            cpa_stream *stream) {
    const widen_args a(*args, blocks, n_blocks, wide_block, k, v, k_scales);
    if (args->q_dtype == CPA_BF16) {
        launch<__nv_bfloat16>(a, args->kv_dtype, cpa_cuda_handle(stream));
    } else {
        launch<__half>(a, args->kv_dtype, cpa_cuda_handle(stream));
    }
    return cpa_cuda_launched(stream, "attend");
}
