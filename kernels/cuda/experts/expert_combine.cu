/* expert_combine: a thread computes a unit of a row, in the order of the host. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"

namespace {

constexpr int THREADS = 256;

template <typename T, typename Y, int UNIT>
__global__ void __launch_bounds__(THREADS) expert_combine(const __grid_constant__ cpa_expert_combine_args a) {
    const int32_t units = a.width / UNIT, column = blockIdx.x * THREADS + threadIdx.x;
    dependent_allow();
    dependent_wait();
    if (column >= units) return;
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
        float sum[UNIT] = {}, wide[UNIT];
        for (int32_t k = 0; k < a.top_k; k++) {
            const int64_t place = a.places[row * a.top_k + k];
            const float weight = a.weights[row * a.top_k + k];
            if (place < 0 || place >= a.y_rows) continue;
            widen<Y, UNIT>(wide, ((const unit_of<Y, UNIT> *)((const Y *)a.y + place * a.y_stride))[column]);
#pragma unroll
            for (int e = 0; e < UNIT; e++) sum[e] += weight * wide[e];
        }
        if (a.shared) {
            widen<T, UNIT>(wide, ((const unit_of<T, UNIT> *)((const T *)a.shared + row * a.width))[column]);
#pragma unroll
            for (int e = 0; e < UNIT; e++) sum[e] += wide[e];
        }
        ((unit_of<T, UNIT> *)((T *)a.out + row * a.width))[column] = narrow<T, UNIT>(sum);
    }
}

template <typename T, typename Y, int UNIT>
cpa_status launch(const cpa_expert_combine_args &a, cpa_stream *stream) {
    const int32_t units = a.width / UNIT;
    return launch_early(expert_combine<T, Y, UNIT>,
                        dim3((unsigned)((units + THREADS - 1) / THREADS), grid_rows(a.rows)), THREADS, a, stream,
                        "expert_combine");
}

} // namespace

extern "C" cpa_status cpa_cuda_expert_combine(const cpa_expert_combine_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const cpa_expert_combine_args a = *args;
    const uintptr_t pointers = (uintptr_t)a.y | (uintptr_t)a.shared | (uintptr_t)a.out;
    const bool vectors = in_vectors(a.dtype, a.width, pointers) && in_vectors(a.y_dtype, a.y_stride, pointers);
    if (a.dtype == CPA_F32 && a.y_dtype != CPA_F32) /* parts of sums that ranks add */
        return launch_for_elements(a.y_dtype, [&](auto tag) {
            using Y = typename decltype(tag)::element;
            return vectors && a.width % VECTOR<Y> == 0 ? launch<float, Y, VECTOR<Y>>(a, stream)
                                                       : launch<float, Y, 1>(a, stream);
        });
    return launch_for_elements(a.dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        if (a.y_dtype == a.dtype) return vectors ? launch<T, T, VECTOR<T>>(a, stream) : launch<T, T, 1>(a, stream);
        return vectors ? launch<T, float, VECTOR<T>>(a, stream) : launch<T, float, 1>(a, stream);
    });
}
