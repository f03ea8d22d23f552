/* attend of few rows without rules of scores: which kernels of decode_kernel.cuh there are. */
#include "kernels/cuda/attend/decode_kernel.cuh"
#include "kernels/cuda/attend/width.cuh"

namespace {

/* Runs whose rows lie apart; single narrow heads have the kernel of wider ones. */
template <typename Element>
cpa_status launch_apart(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    if (l->spec->heads == 2) return launch<config<Element, void, 64, 64, 6, 4, 2, false, ROWS_APART>>(l, stream);
    return launch_for_width<CPA_CUDA_128, CPA_CUDA_192_128, CPA_CUDA_256>(l->spec->width, [&](auto width) {
        constexpr int K = decltype(width)::K_DIM, V = decltype(width)::V_DIM;
        return launch<config<Element, void, K, V, K == 192 ? 4 : 3, 4, 1, false, ROWS_APART>>(l, stream);
    });
}

/* Two heads a CTA where that is better and there are pairs of them. Codes are half the bytes of elements: with more
 * stages as much is under way. */
template <typename Element, typename Codes>
cpa_status launch_together(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    constexpr bool Q = !std::is_void<Codes>::value;
    return launch_for_width<CPA_CUDA_64, CPA_CUDA_128, CPA_CUDA_192_128, CPA_CUDA_256>(l->spec->width, [&](auto width) {
        constexpr int K = decltype(width)::K_DIM, V = decltype(width)::V_DIM;
        constexpr int STAGES = K == 64 ? (Q ? 7 : 6) : K == 192 ? (Q ? 6 : 4) : Q ? 5 : 3;
        if constexpr (K == 64 || (K == 128 && Q)) {
            if (l->spec->heads == 2) return launch<config<Element, Codes, K, V, STAGES, 4, 2, false>>(l, stream);
        } else if constexpr (K == 128) {
            if (l->plan->decode_wide) return launch<config<Element, void, K, V, STAGES, 8, 1, false>>(l, stream);
            if (l->plan->decode_row_tiles == 2) /* twice the work for the same bytes, which more warps hide */
                return launch<config<Element, void, K, V, 4, 6, 1, false, ROWS_TOGETHER, false, 2>>(l, stream);
        }
        return launch<config<Element, Codes, K, V, STAGES, 4, 1, false>>(l, stream);
    });
}

/* Rows in runs: few kernels serve all widths, as narrower heads only leave loads out. int8 is not among the codes. */
template <typename Element, typename Codes>
cpa_status launch_runs(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    constexpr int STAGES = std::is_void<Codes>::value ? 3 : 5;
    return launch_for_width<CPA_CUDA_128, CPA_CUDA_256>(l->spec->width, [&](auto width) {
        constexpr int K = decltype(width)::K_DIM, V = decltype(width)::V_DIM;
        return launch<config<Element, Codes, K, V, STAGES, 4, 1, false, ROWS_TOGETHER, true>>(l, stream);
    });
}

template <typename Element>
cpa_status launch_caches(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    switch (l->spec->call.cache) {
        case CPA_CUDA_ELEMENTS: return launch_together<Element, void>(l, stream);
        case CPA_CUDA_ELEMENTS_APART: return launch_apart<Element>(l, stream);
        case CPA_CUDA_RUNS: return launch_runs<Element, void>(l, stream);
        case CPA_CUDA_RUN_CODES: return launch_runs<Element, e4m3_codes>(l, stream);
        default: break;
    }
    return launch_for_codes(l->spec->call.kv_dtype, [&](auto tag) {
        return launch_together<Element, typename decltype(tag)::codes>(l, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_caches<__nv_bfloat16>(l, stream)
                                             : launch_caches<__half>(l, stream);
}
