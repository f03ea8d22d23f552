/* attend of few rows whose scores have rules (score.cuh), over quantised caches, blocks shorter than a run, and rows that
 * lie in runs: which kernels of decode_kernel.cuh there are. Narrower heads have those of wider ones, which leave loads
 * out. They take long to compile, and are for compute capability 9.0 alone. */
#include "kernels/cuda/attend/decode_kernel.cuh"

namespace {

/* Heads of up to 128 columns, HEADS of them a CTA, or of up to 256. Rules of codes are a long way from score to
 * probability, which more warps hide where they have the registers; the widest have as many stages as fit beside the
 * queries. */
template <typename Element, typename Codes, int Heads, run_rows Rows, bool Runs>
cpa_status launch_widths(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    constexpr bool Q = !std::is_void<Codes>::value, MANY = std::is_same<Codes, e4m3_codes>::value;
    constexpr int WARPS = MANY ? 6 : 4, STAGES = Q && !MANY ? 5 : 3;
    if (l->spec->width <= CPA_CUDA_128)
        return launch<config<Element, Codes, 128, 128, STAGES, WARPS, Heads, true, Rows, Runs>>(l, stream);
    return launch<config<Element, Codes, 256, 256, Q ? 4 : 2, 4, 1, true, Rows, Runs>>(l, stream);
}

/* Blocks of fewer tokens. Pairs of narrow heads are for two CTAs there. */
template <typename Element>
cpa_status launch_apart(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    if (l->spec->heads == 2) return launch<config<Element, void, 64, 64, 6, 4, 2, true, ROWS_APART>>(l, stream);
    return launch_widths<Element, void, 1, ROWS_APART, false>(l, stream);
}

template <typename Element, typename Codes>
cpa_status launch_codes(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    if (l->spec->heads == 2) return launch_widths<Element, Codes, 2, ROWS_EITHER, false>(l, stream);
    return launch_widths<Element, Codes, 1, ROWS_EITHER, false>(l, stream);
}

template <typename Element>
cpa_status launch_caches(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    switch (l->spec->call.cache) {
        case CPA_CUDA_RUNS: return launch_widths<Element, void, 1, ROWS_TOGETHER, true>(l, stream);
        case CPA_CUDA_RUN_CODES: return launch_widths<Element, e4m3_codes, 1, ROWS_TOGETHER, true>(l, stream);
        case CPA_CUDA_CODES: break;
        default: return launch_apart<Element>(l, stream);
    }
    return launch_for_codes(l->spec->call.kv_dtype,
                            [&](auto tag) { return launch_codes<Element, typename decltype(tag)::codes>(l, stream); });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode_ruled_caches(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    return l->spec->call.q_dtype == CPA_BF16 ? launch_caches<__nv_bfloat16>(l, stream)
                                             : launch_caches<__half>(l, stream);
}
