/* What the kernels beside attention share: 16 bytes of a row as elements, or one element where rows are not aligned to
 * 16 bytes, and their launch. */
#ifndef CPA_CUDA_NN_ROWS_CUH
#define CPA_CUDA_NN_ROWS_CUH

#include "base/dependent.cuh"
#include "kernels/cuda/device/cuda.h"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch_bounds.cuh"

/* Elements of 16 bytes. */
template <typename T>
constexpr int VECTOR = 16 / (int)sizeof(T);

/* The elements of a unit, read as floats. */
template <typename T, int UNIT>
__device__ inline void widen(float (&to)[UNIT], const unit_of<T, UNIT> &from) {
#pragma unroll
    for (int e = 0; e < UNIT; e++) to[e] = to_float(from.element[e]);
}

/* And rounded. */
template <typename T, int UNIT>
__device__ inline unit_of<T, UNIT> narrow(const float (&from)[UNIT]) {
    unit_of<T, UNIT> to;
#pragma unroll
    for (int e = 0; e < UNIT; e++) to.element[e] = from_float<T>(from[e]);
    return to;
}

template <typename T>
struct element_tag {
    using element = T;
};

/* launch(element_tag<...>()) with the elements of a plain dtype. */
template <typename Launch>
auto launch_for_elements(cpa_dtype dtype, const Launch &launch) {
    if (dtype == CPA_F32) return launch(element_tag<float>());
    if (dtype == CPA_BF16) return launch(element_tag<__nv_bfloat16>());
    return launch(element_tag<__half>());
}

/* Whether strides and widths, as the bits of all of them, and pointers let rows be read 16 bytes at a time. */
inline bool in_vectors(cpa_dtype dtype, int64_t strides, uintptr_t pointers) {
    return strides * cpa_dtype_bytes(dtype) % 16 == 0 && pointers % 16 == 0;
}

/* The rows that a grid has in y, through which its CTAs step. */
inline unsigned grid_rows(int64_t rows) {
    const int64_t most = 65535;
    return (unsigned)(rows < most ? rows : most);
}

/* Launches a kernel that may be placed while the one before it in the stream still runs: all of its threads come to
 * dependent_wait, before which they read constants alone. */
template <typename Args>
cpa_status launch_early(void (*kernel)(Args), dim3 grid, int threads, const Args &args, cpa_stream *stream,
                        const char *operation, size_t shared_bytes = 0) {
    const bool early = cpa_cuda_device_of(stream)->path == CPA_CUDA_HOPPER;
    return cpa_cuda_check(&stream->error,
                          launch_dependent(kernel, grid, threads, args, early, cpa_cuda_handle(stream), shared_bytes),
                          operation);
}

#endif
