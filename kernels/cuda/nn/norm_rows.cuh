/* The norm of a row by the threads of a CTA, for the kernels whose results are those of rmsnorm: the same units in the
 * same threads, and the same sums, by the width alone, so that a row has the same bits in any batch and any of them. */
#ifndef CPA_CUDA_NN_NORM_ROWS_CUH
#define CPA_CUDA_NN_NORM_ROWS_CUH

#include "kernels/cuda/nn/row_norm.cuh"

namespace {

/* Threads of a CTA of rmsnorm, at most. */
constexpr int MOST_NORM_THREADS = 1024;

/* Rows that are normed. */
struct norm_args {
    int32_t width;
    const void *x;
    int64_t x_stride;
    void *residual;
    int64_t residual_stride;
    const void *weight;
    float weight_offset, eps;
    void *out;
    int64_t out_stride;
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

/* A row of units of UNIT elements, with weights of W. A thread keeps its first units of it, and reads the others of a
 * wider row twice. Threads beyond those that the width asks for have no units. */
template <typename T, typename W, int UNIT, int MOST_THREADS = MOST_NORM_THREADS>
struct normed_row {
    using unit = unit_of<T, UNIT>;
    static constexpr int KEPT = NORM_KEPT, ELEMENTS = UNIT;
    const unit_of<W, UNIT> *weight;
    unit_of<W, UNIT> weights[KEPT] = {};
    float kept[KEPT][UNIT] = {};
    const unit *source; /* the row that is normed */
    float offset, scale;
    int32_t units, threads, first;

    /* Reads the weights, so that they are there when the row is. */
    __device__ normed_row(const norm_args &a)
        : weight((const unit_of<W, UNIT> *)a.weight), offset(a.weight_offset), units(a.width / UNIT),
          threads(min(norm_threads(units), MOST_THREADS)), first(threadIdx.x) {
        if (first >= threads) units = 0;
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (first + i * threads < units) weights[i] = weight[first + i * threads];
    }

    /* Adds the residual, where there is one, and sums the squares. All threads come here. */
    __device__ void sum(const norm_args &a, int64_t row) {
        const unit *x = (const unit *)((const T *)a.x + row * a.x_stride);
        unit *residual = a.residual ? (unit *)((T *)a.residual + row * a.residual_stride) : NULL;
        unit from[KEPT], before[KEPT] = {};
        float sum = 0;
        source = residual ? residual : x;
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
        for (int32_t u = first + KEPT * threads; u < units; u += threads) {
            float value[UNIT];
            add_residual<T, UNIT>(value, x[u], residual ? residual + u : NULL, residual ? residual[u] : unit());
            sum += squares(value);
        }
        scale = 1 / sqrtf(cta_sum<MOST_THREADS>(sum) / (float)a.width + a.eps);
    }

    /* visit(u, normed) with the elements of each unit u of this thread. All lanes of a warp come to each visit, those
     * without a unit with u >= width / UNIT and zeros. */
    template <typename Visit>
    __device__ void for_units(const Visit &visit) const {
        const int32_t lane = first % WARP_LANES;
#pragma unroll
        for (int i = 0; i < KEPT; i++) visit(first + i * threads, normed(kept[i], weights[i]));
        for (int32_t u = first + KEPT * threads; u - lane < units; u += threads) {
            float value[UNIT] = {};
            unit_of<W, UNIT> w = {};
            if (u < units) {
                widen<T, UNIT>(value, source[u]); /* this thread has written the sum */
                w = weight[u];
            }
            visit(u, normed(value, w));
        }
    }

    struct unit_values {
        float element[UNIT];
    };
    __device__ unit_values normed(const float (&value)[UNIT], const unit_of<W, UNIT> &by) const {
        unit_values out;
        widen<W, UNIT>(out.element, by);
#pragma unroll
        for (int e = 0; e < UNIT; e++) out.element[e] = value[e] * scale * (out.element[e] + offset);
        return out;
    }
};

/* Threads of a CTA for rows of that width. */
inline int norm_cta_threads(int32_t width, int unit, int most = MOST_NORM_THREADS) {
    const int32_t threads = norm_threads(width / unit);
    return threads < most ? threads : most;
}

/* Whether rows can be read in units of vectors. */
inline bool norm_in_vectors(const norm_args &a, cpa_dtype dtype) {
    return in_vectors(dtype, a.width | a.x_stride | (a.residual ? a.residual_stride : 0) | a.out_stride,
                      (uintptr_t)a.x | (uintptr_t)a.residual | (uintptr_t)a.weight | (uintptr_t)a.out);
}

template <typename T, typename W, int UNIT_OF>
struct norm_tag {
    using element = T;
    using weight = W;
    static constexpr int UNIT = UNIT_OF;
};

/* launch(norm_tag<...>()) with the elements, the weights and the units of rows. */
template <typename Launch>
auto launch_for_norm(cpa_dtype dtype, bool weight_is_f32, bool vectors, const Launch &launch) {
    return launch_for_elements(dtype, [&](auto tag) {
        using T = typename decltype(tag)::element;
        if (weight_is_f32)
            return vectors ? launch(norm_tag<T, float, VECTOR<T>>()) : launch(norm_tag<T, float, 1>());
        return vectors ? launch(norm_tag<T, T, VECTOR<T>>()) : launch(norm_tag<T, T, 1>());
    });
}

} // namespace

#endif
