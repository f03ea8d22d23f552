/* The rotation of heads by the threads of a CTA. */
#ifndef CPA_CUDA_NN_ROTATE_CUH
#define CPA_CUDA_NN_ROTATE_CUH

#include <math.h>

#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/rope.h"

namespace {

/* Cosines and sines of the UNIT pairs from `pair` on. */
template <int UNIT>
struct rotation_of_pairs {
    float cosine[UNIT], sine[UNIT];

    __device__ rotation_of_pairs(const cpa_rope &rope, const int64_t *positions, int64_t rows, int64_t row,
                                 int32_t pair) {
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
            const int64_t position = positions[cpa_rope_stream_of(&rope, pair + e) * rows + row];
            const float *from = rope.table + position * rope.dim + pair + e, value = from[rope.dim / 2];
            cosine[e] = from[0];
            sine[e] = rope.inverse ? -value : value;
        }
    }
    __device__ void apply(float &x, float &y, int e) const {
        const float turned = x * cosine[e] - y * sine[e];
        y = y * cosine[e] + x * sine[e];
        x = turned;
    }
};

/* The pairs of a head from `pair` on: two units of it, of the halves of what is rotated, or of neighbours. */
template <typename T, int UNIT>
__device__ void rotate_pairs(const rotation_of_pairs<UNIT> &by, const cpa_rope &rope, int32_t pair, const T *x,
                             T *out) {
    using unit = unit_of<T, UNIT>;
    const int32_t at = rope.first + (rope.interleaved ? 2 * pair : pair);
    const int32_t next = at + (rope.interleaved ? UNIT : rope.dim / 2);
    float value[2][UNIT];
    widen<T, UNIT>(value[0], *(const unit *)(x + at));
    widen<T, UNIT>(value[1], *(const unit *)(x + next));
    if (rope.interleaved) {
#pragma unroll
        for (int e = 0; e < UNIT; e++)
            by.apply(value[2 * e / UNIT][2 * e % UNIT], value[(2 * e + 1) / UNIT][(2 * e + 1) % UNIT], e);
    } else {
#pragma unroll
        for (int e = 0; e < UNIT; e++) by.apply(value[0][e], value[1][e], e);
    }
    *(unit *)(out + at) = narrow<T, UNIT>(value[0]);
    *(unit *)(out + next) = narrow<T, UNIT>(value[1]);
}

/* What lies beside the rotated elements of a head, to another place. */
template <typename T>
__device__ void pass_elements(const cpa_rotate_args &a, const T *x, T *out) {
    for (int32_t i = threadIdx.x; i < a.heads * a.dim; i += blockDim.x) {
        const int32_t head = i / a.dim, column = i % a.dim;
        if (column < a.rope.first || column >= a.rope.first + a.rope.dim)
            out[head * a.out_head_stride + column] = x[head * a.x_head_stride + column];
    }
}

/* The heads of a row, from x to out, by all threads of the CTA. A thread keeps the rotation of its pairs for all of its
 * heads. */
template <typename T, int UNIT>
__device__ void rotate_heads(const cpa_rotate_args &a, int64_t row, const T *x, T *out) {
    if (!cpa_rope_is_in_table(&a.rope, a.positions, a.rows, row)) {
        for (int32_t i = threadIdx.x; i < a.heads * a.dim; i += blockDim.x)
            out[i / a.dim * a.out_head_stride + i % a.dim] = from_float<T>(NAN);
        if (a.outside) a.outside[row] = 1;
        return;
    }
    const int32_t units = a.rope.dim / 2 / UNIT, threads = blockDim.x, lanes = min(units, threads);
    const int32_t group = threadIdx.x / lanes, groups = threads / lanes;
    for (int32_t u = threadIdx.x % lanes; group < groups && u < units; u += lanes) {
        const rotation_of_pairs<UNIT> by(a.rope, a.positions, a.rows, row, u * UNIT);
        for (int32_t head = group; head < a.heads; head += groups)
            rotate_pairs<T, UNIT>(by, a.rope, u * UNIT, x + head * a.x_head_stride, out + head * a.out_head_stride);
    }
    if (out != x && a.dim > a.rope.dim) pass_elements<T>(a, x, out);
}

template <typename T, int UNIT>
__device__ void rotate_row(const cpa_rotate_args &a, int64_t row) {
    rotate_heads<T, UNIT>(a, row, (const T *)a.x + row * a.x_stride, (T *)a.out + row * a.out_stride);
}

/* Whether the pairs of heads can be read in units of vectors. */
inline bool rotate_in_vectors(const cpa_rotate_args &a) {
    const int64_t strides = a.x_stride | a.x_head_stride | a.out_stride | a.out_head_stride;
    return in_vectors(a.dtype, strides | a.rope.first | a.rope.dim / 2, (uintptr_t)a.x | (uintptr_t)a.out);
}

} // namespace

#endif
