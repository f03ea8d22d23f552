/* rmsnorm of rows in dtype, and rmsnorm2: a CTA a row. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/norm_rows.cuh"
#include "kernels/cuda/nn/rmsnorm_codes.h"

namespace {

/* Both kinds of rows of rmsnorm2; rmsnorm has the first alone. */
template <int PARTS>
struct norm_parts {
    norm_args part[PARTS];
};

template <typename T, typename W, int UNIT, int PARTS>
__global__ void __launch_bounds__(MOST_NORM_THREADS) rmsnorm(const __grid_constant__ norm_parts<PARTS> parts) {
    const norm_args &a = parts.part[PARTS == 1 ? 0 : blockIdx.y];
    const int64_t row = blockIdx.x;
    normed_row<T, W, UNIT> norm(a);
    dependent_allow(); /* the product, which reads weights meanwhile */
    dependent_wait();
    norm.sum(a, row);
    unit_of<T, UNIT> *out = (unit_of<T, UNIT> *)((T *)a.out + row * a.out_stride);
    norm.for_units([&](int32_t u, const auto &normed) {
        if (u < norm.units) out[u] = narrow<T, UNIT>(normed.element);
    });
}

template <int PARTS>
cpa_status launch(const norm_parts<PARTS> &parts, int64_t rows, cpa_dtype dtype, bool weight_is_f32,
                  cpa_stream *stream, const char *name) {
    bool vectors = true;
    int32_t widest = 0;
    for (const norm_args &a : parts.part) {
        vectors = vectors && norm_in_vectors(a, dtype);
        widest = a.width > widest ? a.width : widest;
    }
    return launch_for_norm(dtype, weight_is_f32, vectors, [&](auto tag) {
        using kind = decltype(tag);
        return launch_early(rmsnorm<typename kind::element, typename kind::weight, kind::UNIT, PARTS>,
                            dim3((unsigned)rows, PARTS), norm_cta_threads(widest, kind::UNIT), parts, stream, name);
    });
}

/* Rows of a grid of CTAs, and the device of the stream. */
cpa_status begin(int64_t rows, cpa_stream *stream) {
    cpa_status status = cpa_cuda_select(stream->device, &stream->error);
    if (status != CPA_OK) return status;
    return rows > INT32_MAX ? cpa_cuda_unsupported(stream, "rmsnorm: more rows than a grid has CTAs", rows) : CPA_OK;
}

} // namespace

extern "C" cpa_status cpa_cuda_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream) {
    cpa_status status = begin(args->rows, stream);
    if (status != CPA_OK) return status;
    if (args->codes != CPA_NORM_PLAIN) return cpa_cuda_rmsnorm_codes(args, stream);
    const norm_parts<1> parts = {{{args->width, args->x, args->x_stride, args->residual, args->residual_stride,
                                   args->weight, args->weight_offset, args->eps, args->out, args->out_stride}}};
    return launch(parts, args->rows, args->dtype, args->weight_is_f32, stream, "rmsnorm");
}

extern "C" cpa_status cpa_cuda_rmsnorm2(const cpa_rmsnorm2_args *args, cpa_stream *stream) {
    cpa_status status = begin(args->rows, stream);
    if (status != CPA_OK) return status;
    norm_parts<2> parts;
    for (int i = 0; i < 2; i++) {
        const cpa_norm_rows &p = args->parts[i];
        parts.part[i] = {p.width,  p.x,                 p.x_stride, NULL,  0,
                         p.weight, args->weight_offset, args->eps,  p.out, p.out_stride};
    }
    return launch(parts, args->rows, args->dtype, args->weight_is_f32, stream, "rmsnorm2");
}
