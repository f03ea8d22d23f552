/* Rows of queries and keys of an indexer, with the bits of kernels/host/indexer/index_row.h: LANES neighbouring lanes
 * have a row, so that a warp has several. Lane l of them has two parts of PART neighbouring elements, from l PART on
 * and from (LANES + l) PART on, zeros where the row has none. All lanes of a warp come to what shuffles. What includes
 * this is compiled without contraction of products and sums (-fmad=false). */
#ifndef CPA_CUDA_INDEX_ROW_CUH
#define CPA_CUDA_INDEX_ROW_CUH

#include <cpattn/indexer.h>

#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/indexer.h"
#include "kernels/rope.h"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / WARP_LANES, PARTS = 2, PART = 8;

using lane_row = float[PARTS][PART];

template <typename T>
using raw_row = unit_of<T, PART>[PARTS];

/* Where a part of this lane begins in its row. */
template <int LANES>
__device__ int32_t part_first(int part) {
    return (part * LANES + (int32_t)threadIdx.x % LANES) * PART;
}

/* A row of `dim` elements from `from` on. `whole`: the elements of a part may be read at once. */
template <typename T, int LANES>
__device__ void load_row(raw_row<T> &x, const T *from, int32_t dim, bool whole) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int32_t first = part_first<LANES>(p);
        x[p] = {};
        if (first >= dim) continue;
        if (whole) {
            x[p] = *(const unit_of<T, PART> *)(from + first);
        } else {
#pragma unroll
            for (int e = 0; e < PART; e++) x[p].element[e] = from[first + e];
        }
    }
}

template <typename T>
__device__ void widen_row(lane_row &x, const raw_row<T> &raw) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) widen<T, PART>(x[p], raw[p]);
}

/* Stores N elements that stand for a part. */
template <typename T, int N>
__device__ void store_part(T *to, const unit_of<T, N> &part, bool whole) {
    if (whole) {
        *(unit_of<T, N> *)to = part;
    } else {
#pragma unroll
        for (int e = 0; e < N; e++) to[e] = part.element[e];
    }
}

/* Whether parts lie at multiples of what one access takes, rows beginning at multiples of `strides` elements. */
template <typename T>
bool parts_are_aligned(const void *pointer, int64_t strides) {
    const int64_t size = (int64_t)alignof(unit_of<T, PART>);
    return ((int64_t)(uintptr_t)pointer | strides * (int64_t)sizeof(T)) % size == 0;
}

/* The sum of all elements, each second half folded onto the first. Lanes that fold onto each other each do half of it,
 * as long as both have several sums; each then has those of few elements. */
template <int LANES>
__device__ float fold(const lane_row &x) {
    constexpr int LEFT = PART > LANES ? PART / LANES : 1;
    float sum[PART];
    int n = PART;
#pragma unroll
    for (int e = 0; e < PART; e++) sum[e] = x[0][e] + x[1][e];
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        const bool upper = threadIdx.x & step;
        if (n == 1) {
            sum[0] += __shfl_xor_sync(0xffffffff, sum[0], step);
            continue;
        }
        n /= 2;
#pragma unroll
        for (int e = 0; e < n; e++) {
            const float given = upper ? sum[e] : sum[e + n], kept = upper ? sum[e + n] : sum[e];
            sum[e] = kept + __shfl_xor_sync(0xffffffff, given, step);
        }
    }
#pragma unroll
    for (int step = LANES / 2, apart = PART / 2; apart >= LEFT; step /= 2, apart /= 2) {
#pragma unroll
        for (int e = 0; e < LEFT; e++) sum[e] += __shfl_xor_sync(0xffffffff, sum[e], step);
    }
#pragma unroll
    for (int half = LEFT / 2; half > 0; half /= 2) {
#pragma unroll
        for (int e = 0; e < half; e++) sum[e] += sum[e + half];
    }
    return sum[0];
}

template <int LANES>
__device__ void norm_row(lane_row &x, int32_t dim, const lane_row &gamma, const lane_row &beta, float eps) {
    lane_row squares;
    const float mean = __fdiv_rn(fold<LANES>(x), (float)dim);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) {
            x[p][e] = part_first<LANES>(p) < dim ? x[p][e] - mean : 0;
            squares[p][e] = x[p][e] * x[p][e];
        }
    }
    const float inverse = __fdiv_rn(1, __fsqrt_rn(__fdiv_rn(fold<LANES>(squares), (float)dim) + eps));
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) x[p][e] = x[p][e] * inverse * gamma[p][e] + beta[p][e];
    }
}

/* gamma or beta, zeros where the row has no elements. */
template <int LANES>
__device__ void load_floats_of_row(lane_row &x, const float *from, int32_t dim) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) x[p][e] = part_first<LANES>(p) < dim ? from[part_first<LANES>(p) + e] : 0;
    }
}

/* Sums and differences of neighbours, of pairs of neighbours and so on, times dim^-0.5. */
template <int LANES>
__device__ void transform_row(lane_row &x, int32_t dim, float scale) {
    const auto both = [](float &low, float &high) {
        const float a = low, b = high;
        low = a + b, high = a - b;
    };
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int step = 1; step < PART; step *= 2) {
#pragma unroll
            for (int e = 0; e < PART; e++)
                if (!(e & step)) both(x[p][e], x[p][e + step]);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            const float sign = threadIdx.x & step ? -1 : 1;
            if (step * PART >= dim) continue;
#pragma unroll
            for (int e = 0; e < PART; e++)
                x[p][e] = __fmaf_rn(x[p][e], sign, __shfl_xor_sync(0xffffffff, x[p][e], step)); /* exact products */
        }
    }
#pragma unroll
    for (int e = 0; e < PART; e++) {
        if (LANES * PART < dim) both(x[0][e], x[1][e]);
        x[0][e] *= scale, x[1][e] *= scale;
    }
}

__device__ void round_row(lane_row &x) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e += 2) {
            const uint32_t pair = pack_pair<__nv_bfloat16>(x[p][e], x[p][e + 1]);
            x[p][e] = __uint_as_float(pair << 16), x[p][e + 1] = __uint_as_float(pair & 0xffff0000u);
        }
    }
}

/* From the rotation to the last rounding, for rows of that dtype; hadamard: dim^-0.5, or 0. */
template <int LANES>
__device__ void finish_row(lane_row &x, int32_t dim, float hadamard, cpa_dtype dtype) {
    if (dtype != CPA_F32) round_row(x);
    if (hadamard == 0) return;
    transform_row<LANES>(x, dim, hadamard);
    if (dtype != CPA_F32) round_row(x);
}

/* Stores a row that is no codes. */
template <int LANES>
__device__ void store_plain_row(void *to, const lane_row &x, cpa_dtype dtype, int32_t dim, bool whole) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int32_t first = part_first<LANES>(p);
        if (first >= dim) continue;
        if (dtype == CPA_BF16)
            store_part((__nv_bfloat16 *)to + first, narrow<__nv_bfloat16, PART>(x[p]), whole);
        else
            store_part((float *)to + first, narrow<float, PART>(x[p]), whole);
    }
}

/* Whether parts of such rows may be stored at once, rows beginning at multiples of `strides` bytes. */
inline bool stores_are_aligned(const void *pointer, int64_t strides, cpa_dtype dtype) {
    return dtype == CPA_F32    ? parts_are_aligned<float>(pointer, strides / 4)
           : dtype == CPA_BF16 ? parts_are_aligned<__nv_bfloat16>(pointer, strides / 2)
                               : parts_are_aligned<uint8_t>(pointer, strides);
}

template <int LANES>
__device__ float lanes_most(float x) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

/* Makes the codes of a row; returns their scale. A scale that is a power of two has an exact inverse. */
template <int LANES>
__device__ float row_codes(uint2 (&codes)[PARTS], const lane_row &x, float floor, bool pow2) {
    const float most = lanes_most<LANES>(fmaxf(largest_finite<PART>(x[0]), largest_finite<PART>(x[1])));
    const float ratio = __fdiv_rn(fmaxf(most, floor), 448.0f), scale = pow2 ? cpa_pow2_above(ratio) : ratio;
    const float inverse = pow2 ? inverse_of_pow2(scale) : 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        float quotient[PART];
#pragma unroll
        for (int e = 0; e < PART; e++) quotient[e] = pow2 ? x[p][e] * inverse : __fdiv_rn(x[p][e], scale);
        codes[p].x = e4m3_four(quotient[0], quotient[1], quotient[2], quotient[3]);
        codes[p].y = e4m3_four(quotient[4], quotient[5], quotient[6], quotient[7]);
    }
    return scale;
}

template <int LANES>
__device__ void store_codes_of_row(uint8_t *to, const uint2 (&codes)[PARTS], int32_t dim, bool whole) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int32_t first = part_first<LANES>(p);
        if (first >= dim) continue;
        if (whole) {
            *(uint2 *)(to + first) = codes[p];
        } else {
#pragma unroll
            for (int e = 0; e < PART; e++)
                to[first + e] = (uint8_t)((e < 4 ? codes[p].x : codes[p].y) >> (e % 4 * 8));
        }
    }
}

/* The codes of a row of MXFP4, a byte for two elements, and the exponents of the scales of its blocks. Each part has
 * blocks of its own, but for rows of one block. `stores`: of those lanes. */
template <int LANES>
__device__ void store_mxfp4(uint8_t *codes, uint8_t *scales, const lane_row &x, int32_t dim, bool whole, bool stores) {
    constexpr int BLOCK_LANES = CPA_INDEX_MXFP4_BLOCK / PART < LANES ? CPA_INDEX_MXFP4_BLOCK / PART : LANES;
    float most[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++) most[p] = lanes_most<BLOCK_LANES>(largest_finite<PART>(x[p]));
    if (BLOCK_LANES * PART < CPA_INDEX_MXFP4_BLOCK) most[0] = most[1] = fmaxf(most[0], most[1]);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int32_t first = part_first<LANES>(p);
        const float scale = cpa_index_mxfp4_scale(most[p]), inverse = inverse_of_pow2(scale);
        unit_of<uint8_t, PART / 2> bytes;
        if (first >= dim || !stores) continue;
#pragma unroll
        for (int b = 0; b < PART / 2; b++)
            bytes.element[b] = (uint8_t)(cpa_index_e2m1(x[p][2 * b] * inverse) |
                                         cpa_index_e2m1(x[p][2 * b + 1] * inverse) << 4);
        store_part(codes + first / 2, bytes, whole);
        if (first % CPA_INDEX_MXFP4_BLOCK == 0)
            scales[first / CPA_INDEX_MXFP4_BLOCK] = (uint8_t)(__float_as_uint(scale) >> 23);
    }
}

/* On the host: launch(lanes_tag<LANES>()) with the fewest lanes that hold a row. */
template <int OF_ROW>
struct lanes_tag {
    static constexpr int LANES = OF_ROW;
};
template <typename Launch>
auto launch_for_lanes(int32_t dim, const Launch &launch) {
    constexpr int OF_LANE = PARTS * PART;
    if (dim <= 2 * OF_LANE) return launch(lanes_tag<2>());
    if (dim <= 4 * OF_LANE) return launch(lanes_tag<4>());
    if (dim <= 8 * OF_LANE) return launch(lanes_tag<8>());
    static_assert(CPA_INDEX_MOST_DIM == 16 * OF_LANE, "the widest row");
    return launch(lanes_tag<16>());
}

} // namespace

#endif
