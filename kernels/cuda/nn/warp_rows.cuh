/* The norm of a row by one warp, for rows that are too short to keep a CTA busy: no barriers, and all of a row is on
 * its way at once. It has the bits of norm_rows.cuh: the warp does what the warps of a CTA do there, one by one. */
#ifndef CPA_CUDA_NN_WARP_ROWS_CUH
#define CPA_CUDA_NN_WARP_ROWS_CUH

#include "kernels/cuda/nn/norm_rows.cuh"

namespace {

/* Warps, and so rows, of a CTA. */
constexpr int ROWS_OF_CTA = 4, ROW_WARPS_THREADS = ROWS_OF_CTA * WARP_LANES;

/* 16 bytes of what no kernel that may still run writes, or several such. */
template <typename Unit>
__device__ Unit read_constant(const Unit *from) {
    static_assert(sizeof(Unit) % sizeof(uint4) == 0, "whole accesses");
    union {
        Unit unit;
        uint4 access[sizeof(Unit) / sizeof(uint4)];
    } to;
#pragma unroll
    for (size_t i = 0; i < sizeof(Unit) / sizeof(uint4); i++) to.access[i] = __ldg((const uint4 *)from + i);
    return to.unit;
}

/* A row without a residual, which a CTA of at most MOST_WARPS warps would norm. */
template <typename T, typename W, int MOST_WARPS>
struct warp_row {
    static constexpr int UNIT = VECTOR<T>;
    using unit = unit_of<T, UNIT>;
    unit kept[MOST_WARPS][NORM_KEPT];
    int32_t units, threads, lane;

    __device__ warp_row(const norm_args &a)
        : units(a.width / UNIT), threads(norm_threads(units)), lane(threadIdx.x % WARP_LANES) {}

    /* visit(w, i, u) with the i-th unit, u, of this lane of each warp w. */
    template <typename Visit>
    __device__ void for_units(const Visit &visit) const {
#pragma unroll
        for (int w = 0; w < MOST_WARPS; w++) {
#pragma unroll
            for (int i = 0; i < NORM_KEPT; i++) {
                const int32_t thread = w * WARP_LANES + lane, u = thread + i * threads;
                if (thread < threads && u < units) visit(w, i, u);
            }
        }
    }
    __device__ void load(const norm_args &a, int64_t row) {
        const unit *x = (const unit *)((const T *)a.x + row * a.x_stride);
        for_units([&](int w, int i, int32_t u) { kept[w][i] = x[u]; });
    }
    /* 1 / sqrt(mean of squares + eps); all lanes come here. */
    __device__ float scale(const norm_args &a) const {
        float sum[MOST_WARPS] = {};
        for_units([&](int w, int i, int32_t) {
            float value[UNIT];
            widen<T, UNIT>(value, kept[w][i]);
            sum[w] += squares(value);
        });
        return 1 / sqrtf(total(sum) / (float)a.width + a.eps);
    }
    /* As cta_sum adds; for one warp, its second round adds zeros. */
    __device__ float total(const float (&sum)[MOST_WARPS]) const {
        if constexpr (MOST_WARPS == 1) {
            return warp_sum(sum[0]);
        } else {
            float mine = 0;
#pragma unroll
            for (int w = 0; w < MOST_WARPS; w++) {
                const float all = warp_sum(sum[w]);
                mine = lane == w ? all : mine;
            }
            return warp_sum(mine);
        }
    }
    __device__ unit normed(const norm_args &a, const unit &x, const unit_of<W, UNIT> &weight, float scale) const {
        float value[UNIT], w[UNIT];
        widen<T, UNIT>(value, x);
        widen<W, UNIT>(w, weight);
#pragma unroll
        for (int e = 0; e < UNIT; e++) value[e] = value[e] * scale * (w[e] + a.weight_offset);
        return narrow<T, UNIT>(value);
    }
};

/* Whether rows that can be read in units of vectors are short enough for that. */
inline bool is_warp_row(const norm_args &a, cpa_dtype dtype, int most_warps) {
    const int32_t unit = 16 / (int32_t)cpa_dtype_bytes(dtype);
    return !a.residual && norm_threads(a.width / unit) <= most_warps * WARP_LANES;
}

} // namespace

#endif
