/* Rows of queries and keys of an indexer by a warp, with the bits of kernels/host/indexer/index_row.h: a lane has W
 * neighbouring elements, zeros where the row has none. What includes this is compiled without contraction of products
 * and sums (-fmad=false). */
#ifndef CPA_CUDA_INDEX_ROW_CUH
#define CPA_CUDA_INDEX_ROW_CUH

#include <cpattn/indexer.h>

#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/indexer.h"
#include "kernels/rope.h"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / WARP_LANES;

/* A row of `dim` elements from `from` on. `whole`: the elements of a lane may be read at once. */
template <typename T, int W>
__device__ void load_row(float (&x)[W], const T *from, int32_t dim, bool whole) {
    const int32_t first = threadIdx.x % WARP_LANES * W;
#pragma unroll
    for (int e = 0; e < W; e++) x[e] = 0;
    if (first >= dim) return;
    if (whole) {
        widen<T, W>(x, *(const unit_of<T, W> *)(from + first));
    } else {
#pragma unroll
        for (int e = 0; e < W; e++) x[e] = to_float(from[first + e]);
    }
}

template <typename T, int W>
__device__ void store_row(T *to, const unit_of<T, W> &row, int32_t dim, bool whole) {
    const int32_t first = threadIdx.x % WARP_LANES * W;
    if (first >= dim) return;
    if (whole) {
        *(unit_of<T, W> *)(to + first) = row;
    } else {
#pragma unroll
        for (int e = 0; e < W; e++) to[first + e] = row.element[e];
    }
}

/* Whether the elements of lanes lie at multiples of their size, rows beginning at multiples of `strides` elements. */
template <typename T, int W>
bool lanes_are_aligned(const void *pointer, int64_t strides) {
    const int64_t size = (int64_t)sizeof(unit_of<T, W>);
    return ((int64_t)(uintptr_t)pointer | strides * (int64_t)sizeof(T)) % size == 0;
}

/* The sum of all elements, each second half folded onto the first. */
template <int W>
__device__ float fold(float (&x)[W]) {
#pragma unroll
    for (int step = WARP_LANES / 2; step > 0; step /= 2) {
#pragma unroll
        for (int e = 0; e < W; e++) x[e] += __shfl_xor_sync(0xffffffff, x[e], step);
    }
#pragma unroll
    for (int half = W / 2; half > 0; half /= 2) {
#pragma unroll
        for (int e = 0; e < half; e++) x[e] += x[e + half];
    }
    return x[0];
}

template <int W>
__device__ void norm_row(float (&x)[W], int32_t dim, const float *gamma, const float *beta, float eps) {
    const int32_t first = threadIdx.x % WARP_LANES * W;
    float parts[W];
#pragma unroll
    for (int e = 0; e < W; e++) parts[e] = x[e];
    const float mean = __fdiv_rn(fold<W>(parts), (float)dim);
#pragma unroll
    for (int e = 0; e < W; e++) {
        x[e] = first < dim ? x[e] - mean : 0;
        parts[e] = x[e] * x[e];
    }
    const float inverse = __fdiv_rn(1, __fsqrt_rn(__fdiv_rn(fold<W>(parts), (float)dim) + eps));
#pragma unroll
    for (int e = 0; e < W; e++)
        if (first < dim) x[e] = x[e] * inverse * gamma[first + e] + beta[first + e];
}

/* What the rotation does to the elements of a lane, for all rows of a token: x cosine + y sine, y the partner. */
template <int W>
struct row_rotation {
    float cosine[W], sine[W];
    int32_t partner[W]; /* -1: the element stays as it is */
    bool inside;

    __device__ row_rotation(const cpa_rope &rope, const int64_t *positions, int64_t tokens, int64_t token) {
        const int32_t half = rope.dim / 2;
        inside = !rope.table || cpa_rope_is_in_table(&rope, positions, tokens, token);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const int32_t at = threadIdx.x % WARP_LANES * W + e - rope.first;
            partner[e] = -1, cosine[e] = 1, sine[e] = 0;
            if (!rope.table || !inside || at < 0 || at >= rope.dim) continue;
            const bool is_first = rope.interleaved ? at % 2 == 0 : at < half;
            const int32_t pair = rope.interleaved ? at / 2 : at % half, apart = rope.interleaved ? 1 : half;
            const float *from =
                rope.table + positions[cpa_rope_stream_of(&rope, pair) * tokens + token] * rope.dim + pair;
            partner[e] = rope.first + at + (is_first ? apart : -apart);
            cosine[e] = from[0];
            sine[e] = is_first != (rope.inverse != 0) ? -from[half] : from[half];
        }
    }

    /* `shared`: room for a row, of this warp. */
    __device__ void apply(float (&x)[W], float *shared) const {
        const int32_t first = threadIdx.x % WARP_LANES * W;
        __syncwarp();
#pragma unroll
        for (int e = 0; e < W; e++) shared[first + e] = x[e];
        __syncwarp();
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (partner[e] >= 0) x[e] = x[e] * cosine[e] + shared[partner[e]] * sine[e];
            if (!inside) x[e] = NAN;
        }
    }
};

/* Sums and differences of neighbours, of pairs of neighbours and so on, times dim^-0.5. */
template <int W>
__device__ void transform_row(float (&x)[W], int32_t dim, float scale) {
#pragma unroll
    for (int step = 1; step < W; step *= 2) {
#pragma unroll
        for (int e = 0; e < W; e++) {
            if (e & step) continue;
            const float a = x[e], b = x[e + step];
            x[e] = a + b, x[e + step] = a - b;
        }
    }
    for (int step = 1; step * W < dim; step *= 2) {
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float other = __shfl_xor_sync(0xffffffff, x[e], step);
            x[e] = threadIdx.x & step ? other - x[e] : x[e] + other;
        }
    }
#pragma unroll
    for (int e = 0; e < W; e++) x[e] *= scale;
}

template <int W>
__device__ void round_row(float (&x)[W]) {
#pragma unroll
    for (int e = 0; e < W; e++) x[e] = __bfloat162float(__float2bfloat16_rn(x[e]));
}

/* From the rotation to the last rounding to bf16; hadamard: dim^-0.5, or 0. */
template <int W>
__device__ void finish_row(float (&x)[W], int32_t dim, const row_rotation<W> &rotation, bool rotated, float hadamard,
                           float *shared) {
    if (rotated) rotation.apply(x, shared);
    round_row<W>(x);
    if (hadamard == 0) return;
    transform_row<W>(x, dim, hadamard);
    round_row<W>(x);
}

/* The codes of a row, and their scale. */
template <int W>
__device__ float row_codes(unit_of<uint8_t, W> &codes, const float (&x)[W], float floor, bool pow2) {
    float largest = floor;
#pragma unroll
    for (int e = 0; e < W; e++) largest = fmaxf(largest, fabsf(finite_or_zero(x[e])));
    const float ratio = __fdiv_rn(warp_max(largest), 448.0f), scale = pow2 ? cpa_pow2_above(ratio) : ratio;
#pragma unroll
    for (int e = 0; e < W; e++) codes.element[e] = e4m3_code(__fdiv_rn(x[e], scale));
    return scale;
}

/* The codes of a row of MXFP4, a byte for two elements, and the exponents of the scales of its blocks. */
template <int W>
__device__ void store_mxfp4(uint8_t *codes, uint8_t *scales, const float (&x)[W], int32_t dim, bool whole) {
    constexpr int LANES = CPA_INDEX_MXFP4_BLOCK / W, BYTES = W > 1 ? W / 2 : 1;
    const int32_t lane = threadIdx.x % WARP_LANES;
    float largest = 0;
#pragma unroll
    for (int e = 0; e < W; e++) largest = fmaxf(largest, fabsf(finite_or_zero(x[e])));
    for (int step = 1; step < LANES; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
    const float scale = cpa_index_mxfp4_scale(largest);
    uint32_t nibble[W];
    unit_of<uint8_t, BYTES> bytes;
#pragma unroll
    for (int e = 0; e < W; e++) nibble[e] = cpa_index_e2m1(__fdiv_rn(x[e], scale));
    if constexpr (W == 1) {
        bytes.element[0] = (uint8_t)(nibble[0] | __shfl_down_sync(0xffffffff, nibble[0], 1) << 4);
        if (lane % 2 == 0 && lane < dim) codes[lane / 2] = bytes.element[0];
    } else {
#pragma unroll
        for (int b = 0; b < BYTES; b++) bytes.element[b] = (uint8_t)(nibble[2 * b] | nibble[2 * b + 1] << 4);
        store_row<uint8_t, BYTES>(codes, bytes, dim / 2, whole);
    }
    if (lane % LANES == 0 && lane * W < dim) scales[lane / LANES] = (uint8_t)(__float_as_uint(scale) >> 23);
}

/* On the host: launch(width_tag<W>()) with the fewest elements of a lane that hold a row. */
template <int ELEMENTS>
struct width_tag {
    static constexpr int W = ELEMENTS;
};
template <typename Launch>
auto launch_for_width(int32_t dim, const Launch &launch) {
    if (dim <= WARP_LANES) return launch(width_tag<1>());
    if (dim <= 2 * WARP_LANES) return launch(width_tag<2>());
    if (dim <= 4 * WARP_LANES) return launch(width_tag<4>());
    static_assert(CPA_INDEX_MOST_DIM == 8 * WARP_LANES, "the widest row");
    return launch(width_tag<8>());
}

} // namespace

#endif
