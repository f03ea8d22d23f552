/* attend over tensors without pages, and over pages of 16 tokens and more, for heads of up to 128 columns and results in
 * `out` alone, on compute capability 9.0 (FlashAttention-3, Shah et al., arXiv:2407.08608, as in attend_hopper.cu). Short
 * sequences, and images, have pieces that take as long to begin and to end as for all between: so CTAs stay
 * (persistent_kernel.cuh). */
#include "kernels/cuda/attend/persistent_kernel.cuh"

namespace {

template <typename Element>
cpa_status launch_widths(const persistent_args &args, cpa_stream *stream) {
    switch (shape_of(args.pools.a.k_dim, args.pools.a.v_dim, true, false, args.pools.flat)) {
        case NARROW: return launch_persistent<persistent_config<Element, NARROW>>(args, stream);
        case FLAT_72: return launch_persistent<persistent_config<Element, FLAT_72>>(args, stream);
        case TAILED_80: return launch_persistent<persistent_config<Element, TAILED_80>>(args, stream);
        case TAILED_96: return launch_persistent<persistent_config<Element, TAILED_96>>(args, stream);
    }
    return launch_persistent<persistent_config<Element, SQUARE>>(args, stream);
}

} // namespace

extern "C" cpa_status cpa_cuda_attend_persistent(const cpa_cuda_attend_args *a, const cpa_cuda_persistent_maps *maps,
                                                 int32_t n_pieces, uint32_t *tickets, cpa_stream *stream) {
    const int32_t box = cpa_cuda_hopper_box(a->k_dim, a->v_dim, 1 << a->block_shift, 0);
    const persistent_args args = {{maps->pools, *a, box, 1 << a->block_shift == CPA_TENSOR_BLOCK},
                                  maps->q,
                                  maps->q_tail,
                                  tickets,
                                  n_pieces * a->kv_heads,
                                  cpa_cuda_log2(a->group)};
    return a->q_dtype == CPA_BF16 ? launch_widths<__nv_bfloat16>(args, stream) : launch_widths<__half>(args, stream);
}
