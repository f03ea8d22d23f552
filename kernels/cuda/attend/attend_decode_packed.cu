/* attend of few rows over caches of TurboQuant whose rows lie 16 bytes apart, or multiples of them, without rules of
 * scores: which kernels of decode_packed.cuh there are. */
#include "kernels/cuda/attend/attend_tokens.h"
#include "kernels/cuda/attend/decode_packed.cuh"

namespace {

template <typename Element, int KeyBits, int ValueBits>
using turboquant = config<Element, turboquant_keys<KeyBits>, turboquant_values<ValueBits>,
                          turboquant_ends<turboquant_keys<KeyBits>, turboquant_values<ValueBits>>, 1, 1>;
template <typename Element, typename Codes, typename Bytes, int Heads>
using words = config<Element, byte_keys<Bytes, false>, byte_values<Bytes>, word_ends<Codes, Bytes>, Heads, 2>;

template <typename Element, typename Codes, typename Bytes>
cpa_status launch_words(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->heads == 2 ? launch<words<Element, Codes, Bytes, 2>>(l, stream)
                               : launch<words<Element, Codes, Bytes, 1>>(l, stream);
}

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    switch (l->spec->call.kv_dtype) {
        case CPA_FP8_E4M3: return launch_words<Element, e4m3_codes, e4m3_bytes>(l, stream);
        case CPA_INT8: return launch_words<Element, int8_codes, int8_bytes>(l, stream);
        case CPA_TQ_K8V4: return launch<turboquant<Element, 8, 4>>(l, stream);
        case CPA_TQ_4BIT: return launch<turboquant<Element, 4, 4>>(l, stream);
        case CPA_TQ_K3V4: return launch<turboquant<Element, 3, 4>>(l, stream);
        default: return launch<turboquant<Element, 3, 3>>(l, stream);
    }
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_packed(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    const int of_tokens = l->plan->decode_wide && cpa_cuda_takes_tokens(l->spec->shape, l->spec->block_size);
    if (of_tokens && cpa_cuda_tokens_of(l->args) != CPA_CUDA_TOKENS_PARTED)
        return cpa_cuda_attend_decode_tokens(l, stream);
    return l->spec->call.q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(l, stream) : launch_codes<__half>(l, stream);
}
