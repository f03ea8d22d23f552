/* Blocks of a CPA_VLLM_X cache as rows in the dtype of the queries, for kernels that take rows alone; see
 * attend_widen.cu. A thread has 8 columns of 8 tokens: of keys these lie together token by token, and of values column
 * by column, which it transposes in its registers. */
#include "kernels/cuda/attend/widen.cuh"

namespace {

constexpr int THREADS = 128, SIDE = 8; /* columns, and tokens, of a thread */

__device__ uint32_t word_of(const uint4 &vector, int i) {
    return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

/* Eight rows of eight 16-bit elements become eight columns. */
__device__ void transpose(uint4 (&rows)[SIDE]) {
    uint4 out[SIDE];
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; w++)
            words[w] =
                __byte_perm(word_of(rows[2 * w], i / 2), word_of(rows[2 * w + 1], i / 2), i % 2 ? 0x7632 : 0x5410);
        out[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
#pragma unroll
    for (int i = 0; i < SIDE; i++) rows[i] = out[i];
}

/* Codes or elements of one token's 8 columns, or of one column's 8 tokens, as elements. */
template <typename Element, bool CODES>
__device__ uint4 load_eight(const char *from) {
    if constexpr (CODES) {
        return widen_eight<e4m3_codes, Element>(__ldg((const uint2 *)from), 0, 1);
    } else {
        return __ldg((const uint4 *)from);
    }
}

/* Eight elements times a factor, rounded once more: exact codes become values. */
template <typename Element>
__device__ uint4 scaled(uint4 eight, float factor) {
    uint32_t out[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const uint32_t pair = word_of(eight, w);
        const Element *each = (const Element *)&pair;
        out[w] = pack_pair<Element>(to_float(each[0]) * factor, to_float(each[1]) * factor);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
}

template <typename Element, bool CODES>
__global__ void __launch_bounds__(THREADS) attend_widen_runs(const __grid_constant__ widen_args a) {
    constexpr int BYTES = CODES ? 1 : 2;
    const widen_tensor t = a.tensors[blockIdx.y];
    const bool keys = blockIdx.y == 0;
    const int32_t groups = 1 << a.block_shift >> 3, columns = t.dim / SIDE, all = a.kv_heads * columns * groups;
    const int64_t id = __ldg(a.blocks + blockIdx.x);
    if (id < 0) return;
    const char *block = t.from + id * t.block_stride;
    const int64_t row = (int64_t)a.kv_heads * t.dim * 2;
    char *to = t.to + ((int64_t)blockIdx.x << a.block_shift) * row;
    for (int32_t i = threadIdx.x; i < all; i += THREADS) {
        const int32_t token = i % groups * SIDE, rest = i / groups, head = rest / columns;
        const int32_t column = (rest - head * columns) * SIDE;
        const char *from = block + head * t.head_stride;
        uint4 eights[SIDE];
        if (keys) {
            from += (column >> t.run_shift) * t.run_stride + (column & ((1 << t.run_shift) - 1)) * BYTES;
#pragma unroll
            for (int e = 0; e < SIDE; e++) eights[e] = load_eight<Element, CODES>(from + (token + e) * 16);
        } else {
#pragma unroll
            for (int e = 0; e < SIDE; e++)
                eights[e] = load_eight<Element, CODES>(from + (column + e) * t.run_stride + token * BYTES);
            transpose(eights);
        }
        const float scale = a.scale_of(t, head);
#pragma unroll
        for (int e = 0; e < SIDE; e++) {
            if constexpr (CODES) {
                const uint32_t *words = (const uint32_t *)(block + t.words_at) + (head << a.block_shift) + token + e;
                const float factor = e4m3_codes::scale(t.words_at ? __ldg(words) : __float_as_uint(scale));
                const bool apart = keys && a.k_scales;
                if (!apart) eights[e] = scaled<Element>(eights[e], factor);
                if (apart && column == 0)
                    a.key_scale(((int64_t)blockIdx.x << a.block_shift) + token + e, head) = factor;
            }
            *(uint4 *)(to + (token + e) * row + (head * t.dim + column) * 2) = eights[e];
        }
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_widen_runs(const cpa_cuda_attend_args *args, const int32_t *blocks,
                                                 int32_t n_blocks, int32_t wide_block, void *k, void *v,
                                                 float *k_scales, cpa_stream *stream) {
    const bool codes = args->kv_dtype == CPA_FP8_E4M3;
    const widen_args a(*args, blocks, n_blocks, wide_block, k, v, k_scales);
    const dim3 grid(n_blocks, 2);
    cudaStream_t handle = cpa_cuda_handle(stream);
    if (args->q_dtype == CPA_BF16) {
        codes ? attend_widen_runs<__nv_bfloat16, true><<<grid, THREADS, 0, handle>>>(a)
              : attend_widen_runs<__nv_bfloat16, false><<<grid, THREADS, 0, handle>>>(a);
    } else {
        codes ? attend_widen_runs<__half, true><<<grid, THREADS, 0, handle>>>(a)
              : attend_widen_runs<__half, false><<<grid, THREADS, 0, handle>>>(a);
    }
    return cpa_cuda_launched(stream, "attend");
}
