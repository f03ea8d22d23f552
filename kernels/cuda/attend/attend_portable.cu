/* attend over prefill tiles without rules of scores, and with rules over elements: which kernels of portable_kernel.cuh
 * there are. */
#include "kernels/cuda/attend/portable_kernel.cuh"

namespace {

template <typename Element, typename Codes, bool Ruled>
cpa_status launch_widths(const cpa_cuda_attend_args *args, dim3 grid, cpa_stream *stream) {
    constexpr int NARROW_WARPS = std::is_void<Codes>::value ? 4 : 8;
    int32_t k_dim = args->k_dim, v_dim = args->v_dim;
    if (k_dim <= 64 && v_dim <= 64)
        return launch<config<Element, Codes, 64, 64, 64, NARROW_WARPS, Ruled>>(args, grid, stream);
    if (k_dim <= 128 && v_dim <= 128) return launch<config<Element, Codes, 128, 128, 64, 8, Ruled>>(args, grid, stream);
    if (k_dim <= 192 && v_dim <= 128) return launch<config<Element, Codes, 192, 128, 64, 8, Ruled>>(args, grid, stream);
    return launch<config<Element, Codes, 256, 256, 64, 8, Ruled>>(args, grid, stream);
}

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_args *args, dim3 grid, cpa_stream *stream) {
    if (!cpa_dtype_is_quantised(args->kv_dtype))
        return args->score.any ? launch_widths<Element, void, true>(args, grid, stream)
                               : launch_widths<Element, void, false>(args, grid, stream);
    return launch_for_codes(args->kv_dtype, [&](auto tag) {
        return launch_widths<Element, typename decltype(tag)::codes, false>(args, grid, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_portable(const cpa_cuda_attend_args *args, int32_t n_pieces, int32_t tile_rows,
                                               cpa_stream *stream) {
    const dim3 grid = portable_grid(args, n_pieces, tile_rows);
    return args->q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(args, grid, stream)
                                     : launch_codes<__half>(args, grid, stream);
}
