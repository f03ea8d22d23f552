/* Blocks of a quantised cache in the dtype of the queries, for kernels that take no codes: a thread widens 8 codes at a
 * time, and a CTA TOKENS of a block, or as many blocks as hold them. Values are rounded; codes of keys are exact, and
 * their scales lie apart. What lies past the last token of a block is widened too; nobody reads it into a result. */
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/cache/quant.cuh"

namespace {

constexpr int THREADS = 256, TOKENS = 16;

/* Keys or values. */
struct tensor {
    const char *from;
    char *to;
    int64_t block_stride, token_stride, head_stride, words_at;
    int32_t dim;
    float scale; /* of the tensor */
    const float *head_scales;
};

struct widen_args {
    tensor tensors[2];
    const int32_t *blocks;
    float *k_scales;
    int32_t n_blocks, cta_blocks;
    int32_t kv_heads, block_shift, head_scale_step, wide_shift; /* log2 of the tokens of a block, and of a block of scales */
};

template <typename Element, typename Codes>
__device__ void widen_block(const widen_args &a, const tensor &t, int64_t place) {
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
        const uint32_t word = t.words_at ? __ldg(words)
                                         : Codes::word(head_scale(t.scale, t.head_scales, a.head_scale_step, head));
        const bool keys = blockIdx.y == 0;
        const float scale = Codes::scale(word);
        if (keys && chunk == 0) {
            const int64_t at = (place << a.block_shift) + token, within = at & ((1 << a.wide_shift) - 1);
            a.k_scales[(((at >> a.wide_shift) * a.kv_heads + head) << a.wide_shift) + within] = scale;
        }
        to[i] = widen_eight<Codes, Element>(eight, word, keys ? 1 : scale);
    }
}

template <typename Element, typename Codes>
__global__ void __launch_bounds__(THREADS) attend_widen(const __grid_constant__ widen_args a) {
    const tensor t = a.tensors[blockIdx.y];
    const int32_t first = blockIdx.x * a.cta_blocks;
    for (int32_t place = first; place < min(first + a.cta_blocks, a.n_blocks); place++)
        widen_block<Element, Codes>(a, t, place);
}

template <typename Element>
void launch(const widen_args &a, cpa_dtype dtype, cudaStream_t stream) {
    const int32_t block_size = 1 << a.block_shift;
    const dim3 grid((a.n_blocks + a.cta_blocks - 1) / a.cta_blocks, 2, block_size > TOKENS ? block_size / TOKENS : 1);
    launch_for_codes(dtype, [&](auto tag) {
        attend_widen<Element, typename decltype(tag)::codes><<<grid, THREADS, 0, stream>>>(a);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_widen(const cpa_cuda_attend_args *args, const int32_t *blocks, int32_t n_blocks,
                                            int32_t wide_block, void *k, void *v, float *k_scales,
                                            cpa_stream *stream) {
    const int32_t block_size = 1 << args->block_shift;
    const widen_args a = {
        {{args->k, (char *)k, args->k_block_stride, args->k_token_stride, args->k_head_stride, args->k_words_at,
          args->k_dim, args->k_scale, args->k_head_scales},
         {args->v, (char *)v, args->v_block_stride, args->v_token_stride, args->v_head_stride, args->v_words_at,
          args->v_dim, args->v_scale, args->v_head_scales}},
        blocks,
        k_scales,
        n_blocks,
        block_size < TOKENS ? TOKENS / block_size : 1,
        args->kv_heads,
        args->block_shift,
        args->head_scale_step,
        cpa_cuda_log2(wide_block),
    };
    if (args->q_dtype == CPA_BF16) {
        launch<__nv_bfloat16>(a, args->kv_dtype, cpa_cuda_handle(stream));
    } else {
        launch<__half>(a, args->kv_dtype, cpa_cuda_handle(stream));
    }
    return cpa_cuda_launched(stream, "attend");
}
