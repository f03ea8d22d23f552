/* swiglu: a thread computes a unit of a row. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/cuda/nn/silu.cuh"

namespace {

constexpr int THREADS = 256;

struct swiglu_args {
    int64_t rows;
    int32_t width;
    const void *gate_up;
    void *out;
};

template <typename T, int UNIT>
__global__ void __launch_bounds__(THREADS) swiglu(const __grid_constant__ swiglu_args a) {
    using unit = unit_of<T, UNIT>;
    const int32_t units = a.width / UNIT, column = blockIdx.x * THREADS + threadIdx.x;
    dependent_wait();
    dependent_allow();
    if (column >= units) return;
    for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
        const unit *gates = (const unit *)((const T *)a.gate_up + row * 2 * a.width), *ups = gates + units;
        const unit gate_unit = gates[column], up_unit = ups[column];
        float gate[UNIT], up[UNIT];
        widen<T, UNIT>(gate, gate_unit);
        widen<T, UNIT>(up, up_unit);
#pragma unroll
        for (int e = 0; e < UNIT; e++) gate[e] = silu<T>(gate[e]) * up[e];
        ((unit *)((T *)a.out + row * a.width))[column] = narrow<T, UNIT>(gate);
    }
}

template <typename T, int UNIT>
cpa_status launch(const swiglu_args &a, cpa_stream *stream) {
    const int32_t units = a.width / UNIT;
    return launch_early(swiglu<T, UNIT>, dim3((unsigned)((units + THREADS - 1) / THREADS), grid_rows(a.rows)), THREADS,
                        a, stream, "swiglu");
}

} // namespace

extern "C" cpa_status cpa_cuda_swiglu(const cpa_swiglu_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    const swiglu_args a = {args->rows, args->width, args->gate_up, args->out};
    const bool vectors = in_vectors(args->dtype, args->width, (uintptr_t)args->gate_up | (uintptr_t)args->out);
    return launch_for_elements(args->dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        return vectors ? launch<T, VECTOR<T>>(a, stream) : launch<T, 1>(a, stream);
    });
}
