/* rmsnorm whose rows become codes: a CTA a row. Lanes whose units share a scale find the largest of them together.
 * Where these are all that share it, they have the scale; else the largest of each scale's elements meet in shared
 * memory, where the scales then replace them. */
#include "kernels/cuda/nn/rmsnorm_codes.h"

#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/nn/divisor.cuh"
#include "kernels/cuda/nn/norm_rows.cuh"
#include "kernels/norm_codes.h"

namespace {

/* Of a CTA, at most: codes need more registers than rmsnorm does. */
constexpr int MOST_THREADS = 512;

struct codes_args {
    cpa_rmsnorm_args call;
    norm_args norm;
    int32_t group, groups; /* elements that share a scale, and scales of a row */
    int32_t lanes;         /* lanes of a warp whose units share a scale, a power of two */
};

/* Of finite elements; *nonfinite becomes true where one is not. */
template <int UNIT>
__device__ float largest_of(const float (&value)[UNIT], bool *nonfinite) {
    float largest = 0;
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
        *nonfinite |= is_nonfinite(value[e]);
        largest = fmaxf(largest, fabsf(finite_or_zero(value[e])));
    }
    return largest;
}

/* The code of an element, given its quotient by the scale. */
__device__ uint8_t norm_code(cpa_norm_codes kind, float quotient) {
    return kind == CPA_NORM_INT8_TOKEN ? cpa_norm_int8(quotient, 1) : e4m3_code(quotient);
}

template <int UNIT>
__device__ void store_codes(uint8_t *out, cpa_norm_codes kind, const float (&value)[UNIT], const divisor &scale) {
    unit_of<uint8_t, UNIT> codes;
#pragma unroll
    for (int e = 0; e < UNIT; e++) codes.element[e] = norm_code(kind, scale.divide(value[e]));
    *(unit_of<uint8_t, UNIT> *)out = codes;
}

/* Scales by column of rows that only fill up the last four. */
__device__ void clear_scale_pads(const codes_args &a) {
    if (!a.call.scales_by_column) return;
    for (int64_t row = a.call.rows; row % 4; row++) {
        for (int32_t g = threadIdx.x; g < a.groups; g += blockDim.x)
            a.call.scales[cpa_norm_scale_at(&a.call, row, g)] = 0;
    }
}

/* Of the elements of the lanes whose units share a scale. All lanes come here. */
template <int UNIT>
__device__ float largest_of_lanes(const codes_args &a, const float (&value)[UNIT], bool *nonfinite) {
    float largest = largest_of(value, nonfinite);
    for (int step = a.lanes / 2; step > 0; step /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
    return largest;
}

__device__ void store_scale(const codes_args &a, int64_t row, int32_t group, float scale) {
    if (a.call.scales) a.call.scales[cpa_norm_scale_at(&a.call, row, group)] = scale;
}

/* Codes whose scales each serve the units of a.lanes lanes. */
template <typename Norm>
__device__ void code_by_lanes(const codes_args &a, int64_t row, const Norm &norm, uint8_t *out, bool *nonfinite) {
    norm.for_units([&](int32_t u, const auto &normed) {
        const float scale = cpa_norm_scale(&a.call, largest_of_lanes(a, normed.element, nonfinite));
        if (u >= norm.units) return;
        if (threadIdx.x % a.lanes == 0) store_scale(a, row, u / a.lanes, scale);
        store_codes(out + u * Norm::ELEMENTS, a.call.codes, normed.element, divisor(scale));
    });
}

/* Those of other scales, which pass through `scales`, [groups] zeros. */
template <typename Norm>
__device__ void code_by_row(const codes_args &a, int64_t row, const Norm &norm, uint32_t *scales, uint8_t *out,
                            bool *nonfinite) {
    norm.for_units([&](int32_t u, const auto &normed) {
        const float largest = largest_of_lanes(a, normed.element, nonfinite);
        /* Floats that are not negative are in the order of their bits. */
        if (u < norm.units && threadIdx.x % a.lanes == 0)
            atomicMax(&scales[u * Norm::ELEMENTS / a.group], __float_as_uint(largest));
    });
    __syncthreads();
    for (int32_t g = threadIdx.x; g < a.groups; g += blockDim.x) {
        const float scale = cpa_norm_scale(&a.call, __uint_as_float(scales[g]));
        scales[g] = __float_as_uint(scale);
        store_scale(a, row, g, scale);
    }
    __syncthreads();
    norm.for_units([&](int32_t u, const auto &normed) {
        if (u >= norm.units) return;
        const divisor scale(__uint_as_float(scales[u * Norm::ELEMENTS / a.group]));
        store_codes(out + u * Norm::ELEMENTS, a.call.codes, normed.element, scale);
    });
}

template <typename T, typename W, int UNIT, bool BY_LANES>
__global__ void __launch_bounds__(MOST_THREADS, 1) rmsnorm_codes(const __grid_constant__ codes_args a) {
    extern __shared__ uint32_t scales[]; /* [groups] bits of the largest magnitude, and then of the scale */
    const int64_t row = blockIdx.x;
    uint8_t *out = (uint8_t *)a.call.out + row * a.call.out_stride;
    bool nonfinite = false;
    normed_row<T, W, UNIT, MOST_THREADS> norm(a.norm);
    for (int32_t g = threadIdx.x; !BY_LANES && g < a.groups; g += blockDim.x) scales[g] = 0;
    dependent_allow();
    dependent_wait();
    norm.sum(a.norm, row); /* behind its barrier, the zeros are there */
    if (BY_LANES) {
        code_by_lanes(a, row, norm, out, &nonfinite);
    } else {
        code_by_row(a, row, norm, scales, out, &nonfinite);
    }
    if (nonfinite && a.call.nonfinite) a.call.nonfinite[row] = 1;
    if (row == a.call.rows - 1) clear_scale_pads(a);
}

} // namespace

extern "C" cpa_status cpa_cuda_rmsnorm_codes(const cpa_rmsnorm_args *args, cpa_stream *stream) {
    const int32_t most_groups = 48 * 1024 / 4 - MOST_THREADS; /* shared memory that every device has */
    codes_args a = {*args,
                    {args->width, args->x, args->x_stride, args->residual, args->residual_stride, args->weight,
                     args->weight_offset, args->eps, NULL, 0},
                    cpa_norm_group(args),
                    0,
                    WARP_LANES};
    a.groups = (args->width + a.group - 1) / a.group;
    if (a.groups > most_groups)
        return cpa_cuda_unsupported(stream, "rmsnorm: more scales of a row than shared memory takes", a.groups);
    const bool codes_in_vectors = ((uintptr_t)args->out | (uintptr_t)args->out_stride) % 16 == 0;
    const bool vectors = codes_in_vectors && norm_in_vectors(a.norm, args->dtype);
    return launch_for_norm(args->dtype, args->weight_is_f32, vectors, [&](auto tag) {
        using kind = decltype(tag);
        while (args->codes == CPA_NORM_FP8_GROUP && a.lanes * kind::UNIT > a.group) a.lanes /= 2;
        using T = typename kind::element;
        using W = typename kind::weight;
        constexpr bool VECTORS = kind::UNIT > 1; /* element by element, there is one kernel */
        const bool by_lanes = VECTORS && args->codes == CPA_NORM_FP8_GROUP && a.lanes * kind::UNIT == a.group;
        auto *kernel = by_lanes ? rmsnorm_codes<T, W, kind::UNIT, VECTORS> : rmsnorm_codes<T, W, kind::UNIT, false>;
        return launch_early(kernel, dim3((unsigned)args->rows),
                            norm_cta_threads(args->width, kind::UNIT, MOST_THREADS), a, stream, "rmsnorm",
                            by_lanes ? 0 : (size_t)a.groups * sizeof(uint32_t));
    });
}
