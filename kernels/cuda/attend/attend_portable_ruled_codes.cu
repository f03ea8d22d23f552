/* attend over prefill tiles of quantised caches whose scores have rules (score.cuh), where the Hopper kernel does not take
 * them: a bias, and wide heads. Narrower heads than these have the kernel of wider ones, for which the rest is zeros.
 * For compute capability 9.0 alone. */
#include "kernels/cuda/attend/portable_kernel.cuh"

namespace {

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return launch_for_codes(l->spec->call.kv_dtype, [&](auto tag) {
        using codes = typename decltype(tag)::codes;
        if (l->spec->width <= CPA_CUDA_128) return launch<config<Element, codes, 128, 128, 64, 8, true>>(l, stream);
        return launch<config<Element, codes, 256, 256, 64, 8, true>>(l, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_portable_ruled_codes(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(l, stream) : launch_codes<__half>(l, stream);
}
