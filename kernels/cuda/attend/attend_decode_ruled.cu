/* attend of few rows whose scores have rules (score.cuh), over rows of elements that lie together: which kernels of
 * decode_kernel.cuh there are. */
#include "kernels/cuda/attend/decode_kernel.cuh"

namespace {

/* Pairs of narrow heads share a CTA; single ones have the kernel of wider heads, which leaves loads out. */
template <typename Element>
cpa_status launch_widths(const cpa_cuda_attend_args *args, int32_t ctas, int32_t wide, int32_t row_tiles,
                         cpa_stream *stream) {
    const int32_t k_dim = args->k_dim, v_dim = args->v_dim;
    if (cpa_cuda_decode_heads(args->kv_heads, k_dim, v_dim, 2) == 2)
        return launch<config<Element, void, 64, 64, 6, 4, 2, true>>(args, ctas, stream);
    if (k_dim <= 128 && v_dim <= 128) {
        if (wide) return launch<config<Element, void, 128, 128, 3, 8, 1, true>>(args, ctas, stream);
        if (row_tiles == 2)
            return launch<config<Element, void, 128, 128, 4, 6, 1, true, ROWS_TOGETHER, false, 2>>(args, ctas, stream);
        return launch<config<Element, void, 128, 128, 3, 4, 1, true>>(args, ctas, stream);
    }
    if (k_dim <= 192 && v_dim <= 128)
        return launch<config<Element, void, 192, 128, 4, 4, 1, true>>(args, ctas, stream);
    return launch<config<Element, void, 256, 256, 2, 4, 1, true>>(args, ctas, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_ruled(const cpa_cuda_attend_args *args, int32_t ctas, int32_t wide,
                                                   int32_t row_tiles, cpa_stream *stream) {
    return args->q_dtype == CPA_BF16 ? launch_widths<__nv_bfloat16>(args, ctas, wide, row_tiles, stream)
                                     : launch_widths<__half>(args, ctas, wide, row_tiles, stream);
}
