/* attend of few rows whose scores have rules (score.cuh), over rows of elements that lie together: which kernels of
 * decode_kernel.cuh there are. */
#include "kernels/cuda/attend/decode_kernel.cuh"
#include "kernels/cuda/attend/width.cuh"

namespace {

/* Pairs of narrow heads share a CTA; single ones have the kernel of wider heads, which leaves loads out. */
template <typename Element>
cpa_status launch_widths(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    if (l->spec->heads == 2) return launch<config<Element, void, 64, 64, 6, 4, 2, true>>(l, stream);
    return launch_for_width<CPA_CUDA_128, CPA_CUDA_192_128, CPA_CUDA_256>(l->spec->width, [&](auto width) {
        constexpr int K = decltype(width)::K_DIM, V = decltype(width)::V_DIM;
        if constexpr (K == 128) {
            if (l->plan->decode_wide) return launch<config<Element, void, K, V, 3, 8, 1, true>>(l, stream);
            if (l->plan->decode_row_tiles == 2)
                return launch<config<Element, void, K, V, 4, 6, 1, true, ROWS_TOGETHER, false, 2>>(l, stream);
        }
        return launch<config<Element, void, K, V, K == 128 ? 3 : K == 192 ? 4 : 2, 4, 1, true>>(l, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_ruled(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_widths<__nv_bfloat16>(l, stream)
                                             : launch_widths<__half>(l, stream);
}
