/* attend of few rows over caches of TurboQuant, with and without rules of scores: which kernels of decode_kernel.cuh
 * there are, with as many warps as a multiprocessor takes. Narrower heads have those of 128 columns. */
#include "kernels/cuda/attend/decode_kernel.cuh"

namespace {

template <typename Element>
cpa_status launch_rules(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    if (l->spec->call.rules)
        return launch<config<Element, void, 128, 128, 3, 8, 1, true, ROWS_EITHER, false, 1, true>>(l, stream);
    return launch<config<Element, void, 128, 128, 3, 8, 1, false, ROWS_EITHER, false, 1, true>>(l, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_turboquant(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_rules<__nv_bfloat16>(l, stream) : launch_rules<__half>(l, stream);
}
