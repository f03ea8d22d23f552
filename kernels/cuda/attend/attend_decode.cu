/* attend of few rows without rules of scores: which kernels of decode_kernel.cuh there are. */
#include "kernels/cuda/attend/decode_kernel.cuh"

namespace {

/* The widths of launch_widths, for runs whose rows lie apart; single narrow heads have the kernel of wider ones. */
template <typename Element>
cpa_status launch_apart(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    const int32_t k_dim = args->k_dim, v_dim = args->v_dim;
    if (cpa_cuda_decode_heads(args->kv_heads, k_dim, v_dim, 2) == 2)
        return launch<config<Element, void, 64, 64, 6, 4, 2, false, ROWS_APART>>(args, ctas, stream);
    if (k_dim <= 128 && v_dim <= 128)
        return launch<config<Element, void, 128, 128, 3, 4, 1, false, ROWS_APART>>(args, ctas, stream);
    if (k_dim <= 192 && v_dim <= 128)
        return launch<config<Element, void, 192, 128, 4, 4, 1, false, ROWS_APART>>(args, ctas, stream);
    return launch<config<Element, void, 256, 256, 3, 4, 1, false, ROWS_APART>>(args, ctas, stream);
}

/* Two heads a CTA where that is better and there are pairs of them. */
template <typename Element, typename Codes, int Dim, int Stages>
cpa_status launch_short(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    constexpr int64_t BYTES = std::is_void<Codes>::value ? 2 : 1;
    if (cpa_cuda_decode_heads(args->kv_heads, args->k_dim, args->v_dim, BYTES) == 2)
        return launch<config<Element, Codes, Dim, Dim, Stages, 4, 2, false>>(args, ctas, stream);
    return launch<config<Element, Codes, Dim, Dim, Stages, 4, 1, false>>(args, ctas, stream);
}

/* Codes are half the bytes of elements: with more stages as much is under way. */
template <typename Element, typename Codes>
cpa_status launch_widths(const cpa_cuda_attend_args *args, int32_t ctas, int32_t wide, int32_t row_tiles,
                         cpa_stream *stream) {
    constexpr bool Q = !std::is_void<Codes>::value;
    const int32_t k_dim = args->k_dim, v_dim = args->v_dim;
    if (k_dim <= 64 && v_dim <= 64) return launch_short<Element, Codes, 64, Q ? 7 : 6>(args, ctas, stream);
    if (k_dim <= 128 && v_dim <= 128) {
        if constexpr (Q) return launch_short<Element, Codes, 128, 5>(args, ctas, stream);
        if (wide) return launch<config<Element, void, 128, 128, 3, 8, 1, false>>(args, ctas, stream);
        if (row_tiles == 2) /* twice the work for the same bytes, which more warps hide */
            return launch<config<Element, void, 128, 128, 4, 6, 1, false, ROWS_TOGETHER, false, 2>>(args, ctas, stream);
        return launch<config<Element, void, 128, 128, 3, 4, 1, false>>(args, ctas, stream);
    }
    if (k_dim <= 192 && v_dim <= 128)
        return launch<config<Element, Codes, 192, 128, Q ? 6 : 4, 4, 1, false>>(args, ctas, stream);
    return launch<config<Element, Codes, 256, 256, Q ? 5 : 3, 4, 1, false>>(args, ctas, stream);
}

/* Rows in runs: few kernels serve all widths, as narrower heads only leave loads out. int8 is not among the codes. */
template <typename Element, typename Codes>
cpa_status launch_runs(const cpa_cuda_attend_args *args, int32_t ctas, cpa_stream *stream) {
    constexpr bool Q = !std::is_void<Codes>::value;
    if (args->k_dim <= 128 && args->v_dim <= 128)
        return launch<config<Element, Codes, 128, 128, Q ? 5 : 3, 4, 1, false, ROWS_TOGETHER, true>>(args, ctas,
                                                                                                     stream);
    return launch<config<Element, Codes, 256, 256, Q ? 5 : 3, 4, 1, false, ROWS_TOGETHER, true>>(args, ctas, stream);
}

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_args *args, int32_t ctas, int32_t wide, int32_t row_tiles,
                        cpa_stream *stream) {
    if (args->k_run_shift < 30)
        return cpa_dtype_is_quantised(args->kv_dtype) ? launch_runs<Element, e4m3_codes>(args, ctas, stream)
                                                      : launch_runs<Element, void>(args, ctas, stream);
    if (!cpa_dtype_is_quantised(args->kv_dtype)) {
        if (1 << args->block_shift < DECODE_RUN) return launch_apart<Element>(args, ctas, stream);
        return launch_widths<Element, void>(args, ctas, wide, row_tiles, stream);
    }
    return launch_for_codes(args->kv_dtype, [&](auto tag) {
        return launch_widths<Element, typename decltype(tag)::codes>(args, ctas, wide, row_tiles, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_decode(const cpa_cuda_attend_args *args, int32_t ctas, int32_t wide,
                                             int32_t row_tiles, cpa_stream *stream) {
    return args->q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(args, ctas, wide, row_tiles, stream)
                                     : launch_codes<__half>(args, ctas, wide, row_tiles, stream);
}
