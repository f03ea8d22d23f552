/* The rotation of the heads of a row by threads that share it. A thread has the same columns of all of its heads, and
 * keeps their cosines and sines: 16 bytes in the first half of what is rotated and those of the same place in the
 * second half, so that neighbouring threads have neighbouring bytes whichever way pairs lie. */
#ifndef CPA_CUDA_NN_ROTATE_CUH
#define CPA_CUDA_NN_ROTATE_CUH

#include <math.h>

#include "kernels/cuda/nn/nn.h"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/rope.h"

namespace {

/* The threads that share a row, and which of them this one is. */
struct row_threads {
    int32_t at, count;
};

/* Which pair is the e-th of the UNIT pairs of two units, the u-th of both halves. Neighbours of rows that are read
 * element by element are the one exception: there, the halves are the elements of a pair. */
template <int UNIT>
__device__ int32_t pair_of(const cpa_rope &rope, int32_t u, int e) {
    if (UNIT == 1 || !rope.interleaved) return u * UNIT + e;
    return e < UNIT / 2 ? u * UNIT / 2 + e : (rope.dim / 2 + u * UNIT) / 2 + e - UNIT / 2;
}

/* Where a row lies in the table: by one position, which is not waited for before it is asked for, or by one for each
 * stream of pairs. */
template <bool ONE>
struct row_position {
    int64_t one;

    __device__ row_position(const cpa_rotate_args &a, int64_t row) : one(ONE ? a.positions[row] : 0) {}
    __device__ bool is_inside(const cpa_rotate_args &a, int64_t row) const {
        if (ONE) return one >= 0 && one < a.rope.max_position;
        return cpa_rope_is_in_table(&a.rope, a.positions, a.rows, row);
    }
    __device__ int64_t of(const cpa_rotate_args &a, int64_t row, int32_t pair) const {
        return ONE ? one : a.positions[cpa_rope_stream_of(&a.rope, pair) * a.rows + row];
    }
};

/* The cosines and sines of these pairs. Those of a row that is not in the table are of no use, but read from it. */
template <int UNIT>
struct rotation_of_pairs {
    float cosine[UNIT], sine[UNIT];

    template <bool ONE>
    __device__ rotation_of_pairs(const cpa_rotate_args &a, const row_position<ONE> &position, bool inside, int64_t row,
                                 int32_t u) {
        const cpa_rope &rope = a.rope;
        if (ONE) {
            load(rope, inside ? position.one : 0, u);
        } else {
#pragma unroll
            for (int e = 0; e < UNIT; e++) {
                const int32_t pair = pair_of<UNIT>(rope, u, e);
                const float *from = rope.table + (inside ? position.of(a, row, pair) : 0) * rope.dim + pair;
                cosine[e] = from[0], sine[e] = from[rope.dim / 2];
            }
        }
#pragma unroll
        for (int e = 0; e < UNIT; e++) sine[e] = rope.inverse ? -sine[e] : sine[e];
    }

    /* Of one position: half a unit of each at once. */
    __device__ void load(const cpa_rope &rope, int64_t position, int32_t u) {
        constexpr int HALF = UNIT > 1 ? UNIT / 2 : 1;
        const float *row = rope.table + position * rope.dim;
#pragma unroll
        for (int e = 0; e < UNIT; e += HALF) {
            using floats = unit_of<float, HALF>;
            const float *from = row + pair_of<UNIT>(rope, u, e);
            const floats cosines = *(const floats *)from, sines = *(const floats *)(from + rope.dim / 2);
#pragma unroll
            for (int i = 0; i < HALF; i++) cosine[e + i] = cosines.element[i], sine[e + i] = sines.element[i];
        }
    }

    /* Fused as written, so that every kernel has the same bits. */
    __device__ void apply(float &x, float &y, int e) const {
        const float turned = fmaf(x, cosine[e], -(y * sine[e]));
        y = fmaf(y, cosine[e], x * sine[e]);
        x = turned;
    }
};

/* The u-th units of both halves of a head. */
template <typename T, int UNIT>
struct pair_units {
    using unit = unit_of<T, UNIT>;
    unit half[2];

    static __device__ int32_t column(const cpa_rope &rope, int32_t u, int h) {
        if (UNIT == 1 && rope.interleaved) return rope.first + 2 * u + h;
        return rope.first + u * UNIT + h * (rope.dim / 2);
    }
    __device__ void load(const cpa_rope &rope, const T *head, int32_t u) {
#pragma unroll
        for (int h = 0; h < 2; h++) half[h] = *(const unit *)(head + column(rope, u, h));
    }
    __device__ void store(const cpa_rope &rope, T *head, int32_t u) const {
#pragma unroll
        for (int h = 0; h < 2; h++) *(unit *)(head + column(rope, u, h)) = half[h];
    }
    /* Of a row that is not in the table, NaN. */
    __device__ void rotate(const rotation_of_pairs<UNIT> &by, bool interleaved, bool inside) {
        float x[2][UNIT];
#pragma unroll
        for (int h = 0; h < 2; h++) widen<T, UNIT>(x[h], half[h]);
        if (interleaved) {
#pragma unroll
            for (int e = 0; e < UNIT; e++)
                by.apply(x[2 * e / UNIT][2 * e % UNIT], x[(2 * e + 1) / UNIT][(2 * e + 1) % UNIT], e);
        } else {
#pragma unroll
            for (int e = 0; e < UNIT; e++) by.apply(x[0][e], x[1][e], e);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int e = 0; e < UNIT; e++) x[h][e] = inside ? x[h][e] : NAN;
            half[h] = narrow<T, UNIT>(x[h]);
        }
    }
};

/* What lies beside the rotated elements of heads, to another place; of a row that is not in the table, NaN. */
template <typename T, int UNIT>
__device__ void pass_elements(const cpa_rotate_args &a, const T *x, T *out, bool inside, row_threads threads) {
    const int32_t beside = (a.dim - a.rope.dim) / UNIT, before = a.rope.first / UNIT;
    for (int32_t i = threads.at; i < a.heads * beside; i += threads.count) {
        const int32_t head = i / beside, u = i % beside, column = u * UNIT + (u < before ? 0 : a.rope.dim);
        unit_of<T, UNIT> unit;
#pragma unroll
        for (int e = 0; e < UNIT; e++) unit.element[e] = from_float<T>(NAN);
        if (inside) unit = *(const unit_of<T, UNIT> *)(x + head * a.x_head_stride + column);
        *(unit_of<T, UNIT> *)(out + head * a.out_head_stride + column) = unit;
    }
}

/* The heads of a row, from x to out, by all of its threads; AT_ONCE heads are on their way to a thread at a time, the
 * first ones before the position is known. */
template <typename T, int UNIT, bool ONE, int AT_ONCE>
__device__ void rotate_heads(const cpa_rotate_args &a, int64_t row, const T *x, T *out, row_threads threads) {
    const int32_t units = a.rope.dim / 2 / UNIT, lanes = min(units, threads.count);
    const int32_t group = threads.at / lanes, groups = threads.count / lanes;
    const row_position<ONE> position(a, row);
    pair_units<T, UNIT> part[AT_ONCE];
    const auto load = [&](int32_t first, int32_t u) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int32_t head = first + i * groups;
            if (head < a.heads) part[i].load(a.rope, x + head * a.x_head_stride, u);
        }
    };
    for (int32_t u = threads.at % lanes; group < groups && group < a.heads && u < units; u += lanes) {
        load(group, u);
        const bool inside = position.is_inside(a, row);
        const rotation_of_pairs<UNIT> by(a, position, inside, row, u);
        for (int32_t first = group;;) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const int32_t head = first + i * groups;
                if (head >= a.heads) break;
                part[i].rotate(by, a.rope.interleaved, inside);
                part[i].store(a.rope, out + head * a.out_head_stride, u);
            }
            first += AT_ONCE * groups;
            if (first >= a.heads) break;
            load(first, u);
        }
    }
    const bool inside = position.is_inside(a, row);
    if (a.dim > a.rope.dim && (out != x || !inside)) pass_elements<T, UNIT>(a, x, out, inside, threads);
    if (!inside && a.outside) a.outside[row] = 1;
}

/* Heads of a thread at a time: with many threads, enough bytes on their way to keep memory busy. */
constexpr int HEADS_AT_ONCE = 2;

template <typename T, int UNIT, bool ONE>
__device__ void rotate_row(const cpa_rotate_args &a, int64_t row, row_threads threads) {
    const T *x = (const T *)a.x + row * a.x_stride;
    rotate_heads<T, UNIT, ONE, HEADS_AT_ONCE>(a, row, x, (T *)a.out + row * a.out_stride, threads);
}

/* Whether heads, and the table, can be read in units of vectors. */
inline bool rotate_in_vectors(const cpa_rotate_args &a) {
    const int64_t strides = a.x_stride | a.x_head_stride | a.out_stride | a.out_head_stride;
    return in_vectors(a.dtype, strides | a.dim | a.rope.first | a.rope.dim / 2,
                      (uintptr_t)a.x | (uintptr_t)a.out | (uintptr_t)a.rope.table);
}

/* launch(rotate_tag<...>()) with the elements of heads, their units, and whether a row has one position. */
template <typename T, int UNIT_OF, bool ONE_POSITION>
struct rotate_tag {
    using element = T;
    static constexpr int UNIT = UNIT_OF;
    static constexpr bool ONE = ONE_POSITION;
};
template <typename Launch>
auto launch_for_rotation(cpa_dtype dtype, const cpa_rope &rope, bool vectors, const Launch &launch) {
    return launch_for_elements(dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        if (!vectors) return launch(rotate_tag<T, 1, false>());
        if (cpa_rope_streams(&rope) > 1) return launch(rotate_tag<T, VECTOR<T>, false>());
        return launch(rotate_tag<T, VECTOR<T>, true>());
    });
}

} // namespace

#endif
