/* Rows of 128 elements of bf16 of an indexer that are rotated, transformed and become codes, with the bits of
 * kernels/host/indexer/index_row.h: four neighbouring lanes make a row, a warp eight at a time. Lane l of the four has
 * the elements 32 p + 8 l + e for p < 4 and e < 8, so that all partners of a rotation, and most of those of a sum or of
 * the transform, are its own. All lanes of a warp come to what shuffles. What includes this is compiled without
 * contraction of products and sums (-fmad=false). */
#ifndef CPA_CUDA_INDEX_QUAD_CUH
#define CPA_CUDA_INDEX_QUAD_CUH

#include <math.h>

#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/indexer.h"
#include "kernels/rope.h"

namespace {

constexpr int ROW = 128, ROTATED = 64; /* elements */
constexpr int LANES = 4, ROWS = WARP_LANES / LANES, PARTS = 4, PART = 8;

using quad_row = float[PARTS][PART];
using packed_row = uint32_t[PARTS][PART / 2]; /* pairs of bf16 */
using raw_row = uint4[PARTS];

__device__ inline int quad_lane() {
    return (int)threadIdx.x % LANES;
}
__device__ inline int quad_of_warp() {
    return (int)threadIdx.x % WARP_LANES / LANES;
}

/* ---- the rotation ---- */

/* Which elements of a row are rotated: the first 64, partners 32 apart; the last 64, partners side by side. */
enum quad_turn { QUAD_HALVES, QUAD_PAIRS, QUAD_OTHER };

inline quad_turn quad_turn_of(const cpa_rope &rope) {
    const bool plain = rope.table && cpa_rope_streams(&rope) == 1 && !rope.inverse && rope.max_position <= INT32_MAX;
    if (!plain || rope.dim != ROTATED || (uintptr_t)rope.table % 16) return QUAD_OTHER;
    if (!rope.interleaved && rope.first == 0) return QUAD_HALVES;
    return rope.interleaved && rope.first == ROW - ROTATED ? QUAD_PAIRS : QUAD_OTHER;
}

/* On the host: launch(quad_turn_tag<TURN>()) with a rotation that is not QUAD_OTHER. */
template <quad_turn OF_ROW>
struct quad_turn_tag {
    static constexpr quad_turn TURN = OF_ROW;
};
template <typename Launch>
auto launch_for_quad_turn(quad_turn turn, const Launch &launch) {
    return turn == QUAD_HALVES ? launch(quad_turn_tag<QUAD_HALVES>()) : launch(quad_turn_tag<QUAD_PAIRS>());
}

/* A token's position, -1 where that is outside of the table. */
__device__ inline int32_t position_in_table(const cpa_rope &rope, int64_t position) {
    return position >= 0 && position < rope.max_position ? (int32_t)position : -1;
}

/* The angles of a lane's pairs: two runs of four. */
template <quad_turn TURN>
struct quad_angles {
    float4 cosine[2], sine[2];

    /* Those of position 0 where it is outside of the table. */
    __device__ void load(const cpa_rope &rope, int32_t position) {
        const float4 *from = (const float4 *)(rope.table + (int64_t)max(position, 0) * ROTATED);
        constexpr int SINES = ROTATED / 2 / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = TURN == QUAD_HALVES ? 2 * quad_lane() + i : LANES * i + quad_lane();
            cosine[i] = __ldg(from + at), sine[i] = __ldg(from + SINES + at);
        }
    }

    __device__ static void turn_two(float &x, float &y, float cosine, float sine) {
        const float a = x, b = y;
        x = a * cosine - b * sine;
        y = b * cosine + a * sine;
    }

    __device__ void turn(quad_row &x) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float c[4] = {cosine[i].x, cosine[i].y, cosine[i].z, cosine[i].w};
            const float s[4] = {sine[i].x, sine[i].y, sine[i].z, sine[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (TURN == QUAD_HALVES)
                    turn_two(x[0][4 * i + e], x[1][4 * i + e], c[e], s[e]);
                else
                    turn_two(x[2 + i][2 * e], x[2 + i][2 * e + 1], c[e], s[e]);
            }
        }
    }
};

/* ---- rows ---- */

__device__ inline void load_row(raw_row &raw, const __nv_bfloat16 *row) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) raw[p] = *((const uint4 *)row + p * LANES + quad_lane());
}

__device__ inline float low_of(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ inline float high_of(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ inline void widen_row(quad_row &x, const raw_row &raw) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const uint32_t pairs[PART / 2] = {raw[p].x, raw[p].y, raw[p].z, raw[p].w};
#pragma unroll
        for (int e = 0; e < PART / 2; e++) x[p][2 * e] = low_of(pairs[e]), x[p][2 * e + 1] = high_of(pairs[e]);
    }
}

/* Rounds the parts [FIRST, END) to bf16. */
template <int FIRST, int END>
__device__ inline void round_parts(quad_row &x) {
#pragma unroll
    for (int p = FIRST; p < END; p++) {
#pragma unroll
        for (int e = 0; e < PART; e += 2) {
            const uint32_t pair = pack_pair<__nv_bfloat16>(x[p][e], x[p][e + 1]);
            x[p][e] = low_of(pair), x[p][e + 1] = high_of(pair);
        }
    }
}

/* The sum of term(p, e) over a row as halves fold onto each other. */
template <typename Term>
__device__ inline float fold_terms(const Term &term) {
    float sum[PART];
#pragma unroll
    for (int e = 0; e < PART; e++) {
        sum[e] = (term(0, e) + term(2, e)) + (term(1, e) + term(3, e));
        sum[e] += __shfl_xor_sync(0xffffffff, sum[e], 2);
        sum[e] += __shfl_xor_sync(0xffffffff, sum[e], 1);
    }
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

/* gamma and beta: 128 each in shared memory. */
__device__ inline void norm_row(quad_row &x, float eps, const float4 *gamma, const float4 *beta) {
    const float mean = fold_terms([&](int p, int e) { return x[p][e]; }) * (1.0f / ROW); /* a power of two */
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) x[p][e] -= mean;
    }
    const float variance = fold_terms([&](int p, int e) { return x[p][e] * x[p][e]; }) * (1.0f / ROW);
    const float inverse = __fdiv_rn(1, __fsqrt_rn(variance + eps));
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 g = gamma[(p * LANES + quad_lane()) * 2 + i], b = beta[(p * LANES + quad_lane()) * 2 + i];
            x[p][4 * i] = x[p][4 * i] * inverse * g.x + b.x;
            x[p][4 * i + 1] = x[p][4 * i + 1] * inverse * g.y + b.y;
            x[p][4 * i + 2] = x[p][4 * i + 2] * inverse * g.z + b.z;
            x[p][4 * i + 3] = x[p][4 * i + 3] * inverse * g.w + b.w;
        }
    }
}

__device__ inline void sum_and_difference(float &low, float &high) {
    const float a = low, b = high;
    low = a + b, high = a - b;
}

/* Sums and differences of neighbours, of pairs of neighbours and so on. */
__device__ inline void transform_row(quad_row &x) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int step = 1; step < PART; step *= 2) {
#pragma unroll
            for (int e = 0; e < PART; e++)
                if (!(e & step)) sum_and_difference(x[p][e], x[p][e + step]);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) {
            const float sign = quad_lane() & step ? -1 : 1;
#pragma unroll
            for (int e = 0; e < PART; e++)
                x[p][e] = __fmaf_rn(x[p][e], sign, __shfl_xor_sync(0xffffffff, x[p][e], step)); /* exact products */
        }
    }
#pragma unroll
    for (int e = 0; e < PART; e++) {
        sum_and_difference(x[0][e], x[1][e]);
        sum_and_difference(x[2][e], x[3][e]);
        sum_and_difference(x[0][e], x[2][e]);
        sum_and_difference(x[1][e], x[3][e]);
    }
}

/* The transform, and the last rounding; NaN of a row whose position is outside of the table. */
__device__ inline void finish_row(packed_row &out, quad_row &x, int32_t position) {
    const float scale = position < 0 ? NAN : 0x1.6a09e6p-4f; /* 128^-0.5 */
    transform_row(x);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART / 2; e++)
            out[p][e] = pack_pair<__nv_bfloat16>(x[p][2 * e] * scale, x[p][2 * e + 1] * scale);
    }
}

/* ---- codes ---- */

__device__ inline __nv_bfloat162 bf16_pair(uint32_t bits) {
    return *(const __nv_bfloat162 *)&bits;
}
__device__ inline uint32_t bits_of(__nv_bfloat162 pair) {
    return *(const uint32_t *)&pair;
}

/* The largest magnitude of a row, NaN if there is one, as a pair of which the larger counts. */
__device__ inline float largest_of(const packed_row &x) {
    __nv_bfloat162 most = bf16_pair(0);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART / 2; e++) most = __hmax2_nan(most, bf16_pair(x[p][e] & 0x7fff7fffu));
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
        most = __hmax2_nan(most, bf16_pair(__shfl_xor_sync(0xffffffff, bits_of(most), step)));
    return __bfloat162float(__hmax_nan(__low2bfloat16(most), __high2bfloat16(most)));
}

/* Makes 0 of what is NaN; returns the largest finite magnitude of the row. */
__device__ inline float repair_row(packed_row &x) {
    float most = 0;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART / 2; e++) {
            const float low = low_of(x[p][e]), high = high_of(x[p][e]);
            most = fmaxf(most, fmaxf(fabsf(finite_or_zero(low)), fabsf(finite_or_zero(high))));
            x[p][e] &= (isnan(low) ? 0 : 0x0000ffffu) | (isnan(high) ? 0 : 0xffff0000u);
        }
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
    return most;
}

/* Stores the codes of a row where it `goes` somewhere; returns their scale, a power of two, whose inverse is exact. */
__device__ inline float store_row_codes(uint8_t *to, packed_row &x, float floor, bool goes) {
    float most = largest_of(x);
    if (__any_sync(0xffffffff, is_nonfinite(most))) most = repair_row(x);
    const float scale = cpa_pow2_above(__fdiv_rn(fmaxf(most, floor), 448.0f));
    const __nv_bfloat162 inverse = __float2bfloat162_rn(inverse_of_pow2(scale));
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        uint32_t scaled[PART / 2];
#pragma unroll
        for (int e = 0; e < PART / 2; e++) scaled[e] = bits_of(__hmul2(bf16_pair(x[p][e]), inverse));
        uint32_t codes[2];
#pragma unroll
        for (int f = 0; f < 2; f++)
            codes[f] = e4m3_four_numbers(low_of(scaled[2 * f]), high_of(scaled[2 * f]), low_of(scaled[2 * f + 1]),
                                         high_of(scaled[2 * f + 1]));
        if (goes) *((uint2 *)to + p * LANES + quad_lane()) = make_uint2(codes[0], codes[1]);
    }
    return scale;
}

} // namespace

#endif
