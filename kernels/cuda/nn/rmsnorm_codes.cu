/* rmsnorm whose rows become codes: a CTA a row. Lanes whose units share a scale find the largest of them together; the
 * largest of each scale's elements meet in shared memory, where the scales then replace them. */
#include "kernels/cuda/nn/rmsnorm_codes.h"

#include "kernels/cuda/cache/quant.cuh"
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

/* The code of an element. */
__device__ uint8_t norm_code(cpa_norm_codes kind, float value, float scale) {
    return kind == CPA_NORM_INT8_TOKEN ? cpa_norm_int8(value, scale) : e4m3_code(value / scale);
}

template <int UNIT>
__device__ void store_codes(uint8_t *out, cpa_norm_codes kind, const float (&value)[UNIT], float scale) {
    constexpr int WORD = UNIT < 4 ? UNIT : 4; /* codes of an access */
#pragma unroll
    for (int at = 0; at < UNIT; at += WORD) {
        unit_of<uint8_t, WORD> codes;
#pragma unroll
        for (int e = 0; e < WORD; e++) codes.element[e] = norm_code(kind, value[at + e], scale);
        *(unit_of<uint8_t, WORD> *)(out + at) = codes;
    }
}

/* Scales by column of rows that only fill up the last four. */
__device__ void clear_scale_pads(const codes_args &a) {
    if (!a.call.scales_by_column) return;
    for (int64_t row = a.call.rows; row % 4; row++) {
        for (int32_t g = threadIdx.x; g < a.groups; g += blockDim.x)
            a.call.scales[cpa_norm_scale_at(&a.call, row, g)] = 0;
    }
}

template <typename T, typename W, int UNIT>
__global__ void __launch_bounds__(MOST_THREADS, 1) rmsnorm_codes(const __grid_constant__ codes_args a) {
    extern __shared__ uint32_t scales[]; /* [groups] bits of the largest magnitude, and then of the scale */
    const int64_t row = blockIdx.x;
    bool nonfinite = false;
    normed_row<T, W, UNIT, MOST_THREADS> norm(a.norm);
    for (int32_t g = threadIdx.x; g < a.groups; g += blockDim.x) scales[g] = 0;
    dependent_allow();
    dependent_wait();
    norm.sum(a.norm, row); /* behind its barrier, the zeros are there */
    norm.for_units([&](int32_t u, const auto &normed) {
        float largest = largest_of(normed.element, &nonfinite);
        for (int step = a.lanes / 2; step > 0; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        /* Floats that are not negative are in the order of their bits. */
        if (u < norm.units && threadIdx.x % a.lanes == 0)
            atomicMax(&scales[u * UNIT / a.group], __float_as_uint(largest));
    });
    if (nonfinite && a.call.nonfinite) a.call.nonfinite[row] = 1;
    __syncthreads();
    for (int32_t g = threadIdx.x; g < a.groups; g += blockDim.x) {
        const float scale = cpa_norm_scale(&a.call, __uint_as_float(scales[g]));
        scales[g] = __float_as_uint(scale);
        if (a.call.scales) a.call.scales[cpa_norm_scale_at(&a.call, row, g)] = scale;
    }
    if (row == a.call.rows - 1) clear_scale_pads(a);
    __syncthreads();
    uint8_t *out = (uint8_t *)a.call.out + row * a.call.out_stride;
    norm.for_units([&](int32_t u, const auto &normed) {
        if (u < norm.units)
            store_codes(out + u * UNIT, a.call.codes, normed.element, __uint_as_float(scales[u * UNIT / a.group]));
    });
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
        return launch_early(rmsnorm_codes<typename kind::element, typename kind::weight, kind::UNIT>,
                            dim3((unsigned)args->rows), norm_cta_threads(args->width, kind::UNIT, MOST_THREADS), a, stream,
                            "rmsnorm", (size_t)a.groups * sizeof(uint32_t));
    });
}
