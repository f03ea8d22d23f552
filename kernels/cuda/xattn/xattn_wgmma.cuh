/* Products of 64 groups of queries and 256 of keys by wgmma, both in shared memory. See wgmma.cuh. */
#ifndef CPA_CUDA_XATTN_WGMMA_CUH
#define CPA_CUDA_XATTN_WGMMA_CUH

#include "kernels/cuda/attend/wgmma.cuh"

/* clang-format off */
#define CPA_WGMMA_D128 \
    CPA_WGMMA_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
                  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
                  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
                  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CPA_WGMMA_GROUPS(TYPE) \
    CPA_WGMMA_SHARED(TYPE, 256, CPA_WGMMA_D128, "%128", "%129", "%130", CPA_WGMMA_32(0), CPA_WGMMA_32(32), \
                     CPA_WGMMA_32(64), CPA_WGMMA_32(96))
/* clang-format on */

/* multiply(d, a, b, accumulate): by descriptors. Without `accumulate`, D = A B. */
template <typename Element>
struct xattn_wgmma;
template <>
struct xattn_wgmma<__nv_bfloat16> {
    CPA_WGMMA_GROUPS("bf16")
};
template <>
struct xattn_wgmma<__half> {
    CPA_WGMMA_GROUPS("f16")
};

#endif
