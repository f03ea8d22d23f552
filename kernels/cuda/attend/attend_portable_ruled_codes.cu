/* attend over prefill tiles of quantised caches whose scores have rules (score.cuh), where the Hopper kernel does not take
 * them: a bias, and wide heads. Narrower heads than these have the kernel of wider ones, for which the rest is zeros.
 * For compute capability 9.0 alone. */
#include "kernels/cuda/attend/portable_kernel.cuh"

namespace {

template <typename Element>
cpa_status launch_codes(const cpa_cuda_attend_args *args, dim3 grid, cpa_stream *stream) {
    return launch_for_codes(args->kv_dtype, [&](auto tag) {
        using codes = typename decltype(tag)::codes;
        if (args->k_dim <= 128 && args->v_dim <= 128)
            return launch<config<Element, codes, 128, 128, 64, 8, true>>(args, grid, stream);
        return launch<config<Element, codes, 256, 256, 64, 8, true>>(args, grid, stream);
    });
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_portable_ruled_codes(const cpa_cuda_attend_args *args, int32_t n_pieces,
                                                           int32_t tile_rows, cpa_stream *stream) {
    const dim3 grid = portable_grid(args, n_pieces, tile_rows);
    return args->q_dtype == CPA_BF16 ? launch_codes<__nv_bfloat16>(args, grid, stream)
                                     : launch_codes<__half>(args, grid, stream);
}
