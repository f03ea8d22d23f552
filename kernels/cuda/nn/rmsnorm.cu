/* rmsnorm of rows in dtype, and rmsnorm2: a CTA a row, or a warp a row where all rows are short. */
#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/norm_rows.cuh"
#include "kernels/cuda/nn/rmsnorm_codes.h"
#include "kernels/cuda/nn/warp_rows.cuh"

namespace {

/* Both kinds of rows of rmsnorm2; rmsnorm has the first alone. */
template <int PARTS>
struct norm_parts {
    int64_t rows;
    norm_args part[PARTS];
};

/* Of CTAs whose rows a warp takes: then a lane has 8 units of a row. */
constexpr int SHORT_ROW_WARPS = 4;

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

template <typename T, typename W, int PARTS>
__global__ void __launch_bounds__(ROW_WARPS_THREADS, ctas_before_9(4))
    rmsnorm_short(const __grid_constant__ norm_parts<PARTS> parts) {
    const norm_args &a = parts.part[PARTS == 1 ? 0 : blockIdx.y];
    const int64_t row = (int64_t)blockIdx.x * ROWS_OF_CTA + threadIdx.x / WARP_LANES;
    using norm_row = warp_row<T, W, SHORT_ROW_WARPS>;
    norm_row norm(a);
    dependent_allow();
    dependent_wait();
    if (row >= parts.rows) return;
    norm.load(a, row);
    const float scale = norm.scale(a);
    const auto *weight = (const unit_of<W, norm_row::UNIT> *)a.weight;
    auto *out = (typename norm_row::unit *)((T *)a.out + row * a.out_stride);
    norm.for_units([&](int w, int i, int32_t u) {
        out[u] = norm.normed(a, norm.kept[w][i], read_constant(weight + u), scale);
    });
}

template <int PARTS>
cpa_status launch(const norm_parts<PARTS> &parts, cpa_dtype dtype, bool weight_is_f32, cpa_stream *stream,
                  const char *name) {
    bool vectors = true, are_short = true;
    int32_t widest = 0;
    for (const norm_args &a : parts.part) {
        vectors = vectors && norm_in_vectors(a, dtype);
        are_short = are_short && is_warp_row(a, dtype, SHORT_ROW_WARPS);
        widest = a.width > widest ? a.width : widest;
    }
    return launch_for_norm(dtype, weight_is_f32, vectors, [&](auto tag) {
        using kind = decltype(tag);
        if constexpr (kind::UNIT > 1) {
            if (are_short)
                return launch_early(rmsnorm_short<typename kind::element, typename kind::weight, PARTS>,
                                    dim3((unsigned)((parts.rows + ROWS_OF_CTA - 1) / ROWS_OF_CTA), PARTS),
                                    ROW_WARPS_THREADS, parts, stream, name);
        }
        return launch_early(rmsnorm<typename kind::element, typename kind::weight, kind::UNIT, PARTS>,
                            dim3((unsigned)parts.rows, PARTS), norm_cta_threads(widest, kind::UNIT), parts, stream,
                            name);
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
    const norm_parts<1> parts = {args->rows,
                                 {{args->width, args->x, args->x_stride, args->residual, args->residual_stride,
                                   args->weight, args->weight_offset, args->eps, args->out, args->out_stride}}};
    return launch(parts, args->dtype, args->weight_is_f32, stream, "rmsnorm");
}

extern "C" cpa_status cpa_cuda_rmsnorm2(const cpa_rmsnorm2_args *args, cpa_stream *stream) {
    cpa_status status = begin(args->rows, stream);
    if (status != CPA_OK) return status;
    norm_parts<2> parts;
    parts.rows = args->rows;
    for (int i = 0; i < 2; i++) {
        const cpa_norm_rows &p = args->parts[i];
        parts.part[i] = {p.width,  p.x,                 p.x_stride, NULL,  0,
                         p.weight, args->weight_offset, args->eps,  p.out, p.out_stride};
    }
    return launch(parts, args->dtype, args->weight_is_f32, stream, "rmsnorm2");
}
