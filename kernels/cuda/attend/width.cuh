/* On the host: the kernel of the narrowest widths that hold a head, of those that it is compiled for. */
#ifndef CPA_CUDA_WIDTH_CUH
#define CPA_CUDA_WIDTH_CUH

#include "kernels/cuda/attend/attend_kernels.h"

namespace {

template <cpa_cuda_width Width>
struct width_tag {
    static constexpr int K_DIM = Width == CPA_CUDA_256       ? 256
                                 : Width == CPA_CUDA_192_128 ? 192
                                 : Width == CPA_CUDA_128     ? 128
                                                             : 64;
    static constexpr int V_DIM = K_DIM == 192 ? 128 : K_DIM;
};

/* launch(width_tag<...>()) of the first of the widths, which ascend, that is not less; the last is taken for all. */
template <cpa_cuda_width First, cpa_cuda_width... Rest, typename Launch>
cpa_status launch_for_width(cpa_cuda_width width, const Launch &launch) {
    if constexpr (sizeof...(Rest) > 0)
        if (width > First) return launch_for_width<Rest...>(width, launch);
    return launch(width_tag<First>());
}

} // namespace

#endif
