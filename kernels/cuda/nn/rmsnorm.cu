/* rmsnorm: a CTA a row. A thread keeps its first units of the row, and reads the others of a wider row twice. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/row_norm.cuh"

namespace {

constexpr int MOST_THREADS = 1024, KEPT = NORM_KEPT;

struct norm_args {
    int32_t width;
    const void *x;
    int64_t x_stride;
    void *residual;
    const void *weight;
    float weight_offset, eps;
    void *out;
};

/* One unit of the row to be normed: that of x, or of the residual that x has been added to. */
template <typename T, int UNIT>
__device__ void add_residual(float (&value)[UNIT], const unit_of<T, UNIT> &x, unit_of<T, UNIT> *residual,
                             const unit_of<T, UNIT> &before) {
    widen<T, UNIT>(value, x);
    if (!residual) return;
    float sum[UNIT];
    widen<T, UNIT>(sum, before);
#pragma unroll
    for (int e = 0; e < UNIT; e++) sum[e] += value[e];
    const unit_of<T, UNIT> rounded = narrow<T, UNIT>(sum);
    *residual = rounded;
    widen<T, UNIT>(value, rounded);
}

template <int UNIT>
__device__ float squares(const float (&value)[UNIT]) {
    float sum = 0;
#pragma unroll
    for (int e = 0; e < UNIT; e++) sum = fmaf(value[e], value[e], sum);
    return sum;
}

template <typename T, int UNIT>
__device__ void store_normed(unit_of<T, UNIT> *out, const float (&value)[UNIT], const unit_of<T, UNIT> &weight,
                             float offset, float scale) {
    float w[UNIT];
    widen<T, UNIT>(w, weight);
#pragma unroll
    for (int e = 0; e < UNIT; e++) w[e] = value[e] * scale * (w[e] + offset);
    *out = narrow<T, UNIT>(w);
}

template <typename T, int UNIT>
__global__ void __launch_bounds__(MOST_THREADS) rmsnorm(const __grid_constant__ norm_args a) {
    using unit = unit_of<T, UNIT>;
    const int32_t units = a.width / UNIT, threads = blockDim.x, first = threadIdx.x, rest = first + KEPT * threads;
    const int64_t row = blockIdx.x;
    const unit *x = (const unit *)((const T *)a.x + row * a.x_stride), *weight = (const unit *)a.weight;
    unit *residual = a.residual ? (unit *)((T *)a.residual + row * a.width) : NULL;
    unit *out = (unit *)((T *)a.out + row * a.width);
    unit weights[KEPT] = {}, from[KEPT], before[KEPT] = {};
    float kept[KEPT][UNIT], sum = 0;
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (first + i * threads < units) weights[i] = weight[first + i * threads];
    dependent_allow(); /* the product, which reads weights meanwhile */
    dependent_wait();
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (first + i * threads >= units) continue;
        from[i] = x[first + i * threads];
        if (residual) before[i] = residual[first + i * threads];
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (first + i * threads >= units) continue;
        add_residual<T, UNIT>(kept[i], from[i], residual ? residual + first + i * threads : NULL, before[i]);
        sum += squares(kept[i]);
    }
    for (int32_t u = rest; u < units; u += threads) {
        float value[UNIT];
        add_residual<T, UNIT>(value, x[u], residual ? residual + u : NULL, residual ? residual[u] : unit());
        sum += squares(value);
    }
    const float scale = 1 / sqrtf(cta_sum<MOST_THREADS>(sum) / (float)a.width + a.eps);
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        if (first + i * threads < units)
            store_normed<T, UNIT>(out + first + i * threads, kept[i], weights[i], a.weight_offset, scale);
    for (int32_t u = rest; u < units; u += threads) {
        float value[UNIT];
        widen<T, UNIT>(value, residual ? residual[u] : x[u]); /* this thread has written the sum */
        store_normed<T, UNIT>(out + u, value, weight[u], a.weight_offset, scale);
    }
}

/* Threads by the width alone, so that a row has the same bits in any batch. */
template <typename T, int UNIT>
cpa_status launch(const norm_args &a, int64_t rows, cpa_stream *stream) {
    const int32_t threads = norm_threads(a.width / UNIT);
    return launch_early(rmsnorm<T, UNIT>, dim3((unsigned)rows), threads < MOST_THREADS ? threads : MOST_THREADS, a,
                        stream, "rmsnorm");
}

} // namespace

extern "C" cpa_status cpa_cuda_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    if (args->rows > INT32_MAX)
        return cpa_cuda_unsupported(stream, "rmsnorm: more rows than a grid has CTAs", args->rows);
    const norm_args a = {args->width,         args->x,   args->x_stride, args->residual, args->weight,
                         args->weight_offset, args->eps, args->out};
    const bool vectors =
        in_vectors(args->dtype, args->width | args->x_stride,
                   (uintptr_t)args->x | (uintptr_t)args->residual | (uintptr_t)args->weight | (uintptr_t)args->out);
    return launch_for_elements(args->dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        return vectors ? launch<T, VECTOR<T>>(a, args->rows, stream) : launch<T, 1>(a, args->rows, stream);
    });
}
