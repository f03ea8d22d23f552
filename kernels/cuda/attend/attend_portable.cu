/* attend over prefill tiles without rules of scores, and with rules over elements: which kernels of portable_kernel.cuh
 * there are. */
#include "kernels/cuda/attend/portable_kernel.cuh"
#include "kernels/cuda/attend/width.cuh"

namespace {

template <typename Element, typename Codes, bool Ruled>
cpa_status launch_widths(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return launch_for_width<CPA_CUDA_64, CPA_CUDA_128, CPA_CUDA_192_128, CPA_CUDA_256>(l->spec->width, [&](auto width) {
        constexpr int K = decltype(width)::K_DIM, V = decltype(width)::V_DIM;
        constexpr int WARPS = K == 64 && std::is_void<Codes>::value ? 4 : 8;
        return launch<config<Element, Codes, K, V, 64, WARPS, Ruled>>(l, stream);
    });
}

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    if (l->spec->call.cache != CPA_CUDA_CODES)
        return l->spec->call.rules ? launch_widths<Element, void, true>(l, stream)
                                   : launch_widths<Element, void, false>(l, stream);
    return launch_for_codes(l->spec->call.kv_dtype, [&](auto tag) {
        return launch_widths<Element, typename decltype(tag)::codes, false>(l, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_portable(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(l, stream) : launch_codes<__half>(l, stream);
}
