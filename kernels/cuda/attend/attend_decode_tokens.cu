/* attend of few rows over whole tokens of a cache of CPA_TQ_: which kernels of decode_tokens.cuh there are. */
#include "kernels/cuda/attend/decode_tokens.cuh"

namespace {

template <typename Element, int KeyBits, int ValueBits>
cpa_status launch_tokens(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    static uint64_t prepared[2];
    using apart = token_config<Element, KeyBits, ValueBits, false>;
    using paired = token_config<Element, KeyBits, ValueBits, true>;
    if (cpa_cuda_tokens_of(l->args) == CPA_CUDA_TOKENS_PAIRED)
        return launch_decode<paired>(attend_decode_tokens<paired>, &prepared[1], l, stream);
    return launch_decode<apart>(attend_decode_tokens<apart>, &prepared[0], l, stream);
}

template <typename Element>
cpa_status launch_bits(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    switch (l->spec->call.kv_dtype) {
        case CPA_TQ_4BIT: return launch_tokens<Element, 4, 4>(l, stream);
        case CPA_TQ_K3V4: return launch_tokens<Element, 3, 4>(l, stream);
        default: return launch_tokens<Element, 3, 3>(l, stream);
    }
}

} // namespace

extern "C" cpa_cuda_tokens cpa_cuda_tokens_of(const cpa_cuda_attend_args *a) {
    const int64_t strides = a->k_block_stride | a->k_token_stride | a->v_block_stride | a->v_token_stride;
    const int64_t k_bytes = cpa_kv_row_bytes(a->kv_dtype, CPA_KEYS, a->k_dim),
                  v_bytes = cpa_kv_row_bytes(a->kv_dtype, CPA_VALUES, a->v_dim);
    if (strides % 16 != 0 || (uintptr_t)a->k % 16 != 0) return CPA_CUDA_TOKENS_PARTED;
    if (a->k_head_stride == k_bytes && a->v_head_stride == v_bytes && (uintptr_t)a->v % 16 == 0)
        return CPA_CUDA_TOKENS_APART;
    const int alike = a->k_head_stride == a->v_head_stride && a->k_token_stride == a->v_token_stride &&
                      a->k_block_stride == a->v_block_stride && a->v == a->k + k_bytes;
    return alike && a->k_head_stride == k_bytes + v_bytes ? CPA_CUDA_TOKENS_PAIRED : CPA_CUDA_TOKENS_PARTED;
}

extern "C" cpa_status cpa_cuda_attend_decode_tokens(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_bits<__nv_bfloat16>(l, stream) : launch_bits<__half>(l, stream);
}
