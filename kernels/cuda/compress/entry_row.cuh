/* Rows of entries (cpattn/compress.h) by a warp, with the bits of kernels/host/compress/entry_row.h: a lane has PARTS
 * parts of PART neighbouring elements, which lie between those of its neighbours, zeros where a row has none. What
 * includes this is compiled without contraction of products and sums (-fmad=false). */
#ifndef CPA_CUDA_ENTRY_ROW_CUH
#define CPA_CUDA_ENTRY_ROW_CUH

#include "kernels/compress.h"
#include "kernels/cuda/cache/tiles.cuh"
#include "kernels/cuda/device/warp.cuh"
#include "kernels/cuda/nn/rows.cuh"
#include "kernels/indexer.h"
#include "kernels/kv_view.h"

namespace {

constexpr int PARTS = 2, PART = 8, THREADS = 128, WARPS = THREADS / WARP_LANES;
static_assert(PARTS * PART * WARP_LANES == CPA_ENTRY_DIM, "a warp has an entry");

using lane_row = float[PARTS][PART];

/* Where a part of a lane begins. */
__device__ inline int32_t part_first(int part, int lane) {
    return (part * WARP_LANES + lane) * PART;
}

/* The cache that rows go to; strides and offsets in bytes. */
struct entry_pool {
    char *memory;
    cpa_dtype dtype;
    int64_t slots, block_stride, token_stride, words_at;
    int32_t block_shift, dim;
    float scale; /* of codes of e4m3; 0: each row has its own */
    cpa_cuda_bad_slot *bad_slot;
    uint8_t *mxfp4, *mxfp4_scales; /* rows go there; NULL: to the cache */
};

inline entry_pool entry_pool_of(const cpa_kv_view &view, cpa_stream *stream) {
    const cpa_kv_view kv = cpa_kv_view_resolve(view);
    const cpa_kv_pool keys = cpa_kv_pool_of(&kv, CPA_KEYS);
    return {keys.memory,
            kv.dtype,
            kv.num_blocks * kv.block_size,
            keys.block_stride,
            keys.token_stride,
            cpa_kv_words_at(&kv, CPA_KEYS),
            cpa_cuda_log2(kv.block_size),
            kv.k_dim,
            keys.tensor_scale,
            ((cpa_cuda_stream *)stream)->bad_slot};
}

__device__ inline void tell_bad_slot(cpa_cuda_bad_slot *bad, int64_t token, int64_t slot) {
    if (atomicExch(&bad->found, 1) == 0) bad->token = token, bad->slot = slot;
}

/* Over `lanes` neighbouring lanes, a power of two. All lanes of the warp come here. */
__device__ inline float lanes_most(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

/* The sum of squares of a row of CPA_ENTRY_DIM: of neighbours first. */
__device__ inline float row_squares(const lane_row &x) {
    float sum[PARTS][PART];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) sum[p][e] = x[p][e] * x[p][e];
#pragma unroll
        for (int n = PART / 2; n > 0; n /= 2) {
#pragma unroll
            for (int e = 0; e < n; e++) sum[p][e] = sum[p][2 * e] + sum[p][2 * e + 1];
        }
#pragma unroll
        for (int step = 1; step < WARP_LANES; step *= 2)
            sum[p][0] += __shfl_xor_sync(0xffffffff, sum[p][0], step);
    }
    return sum[0][0] + sum[1][0];
}

/* Cosines and sines of the pairs of N columns that begin `at` elements behind the first that is rotated: as many at
 * once as lie side by side. Those of columns that are not rotated are left alone. */
template <int N>
__device__ void load_angles(const float *cosines, const float *sines, int32_t at, int32_t dim, float (&cosine)[N / 2],
                            float (&sine)[N / 2]) {
    constexpr int WIDTH = N / 2 < 4 ? N / 2 : 4;
    const uintptr_t places = (uintptr_t)(cosines + at / 2) | (uintptr_t)(sines + at / 2);
    if (at >= 0 && at + N <= dim && places % (WIDTH * sizeof(float)) == 0) {
#pragma unroll
        for (int i = 0; i < N / 2; i += WIDTH) {
            float some[WIDTH];
            load_floats(cosines + at / 2 + i, some);
#pragma unroll
            for (int e = 0; e < WIDTH; e++) cosine[i + e] = some[e];
            load_floats(sines + at / 2 + i, some);
#pragma unroll
            for (int e = 0; e < WIDTH; e++) sine[i + e] = some[e];
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int32_t column = at + 2 * i;
        if (column >= 0 && column < dim) cosine[i] = cosines[column / 2], sine[i] = sines[column / 2];
    }
}

/* Rotates N neighbouring elements of a row, which begin `first` elements behind the first that is rotated. */
template <int N>
__device__ void turn_by(float (&x)[N], int32_t first, int32_t dim, const float (&cosine)[N / 2],
                        const float (&sine)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const int32_t at = first + 2 * i;
        if (at >= 0 && at < dim) cpa_turn_pair(&x[2 * i], &x[2 * i + 1], cosine[i], sine[i]);
    }
}

/* Cosines and sines of the columns of a lane, for all rows of that position; `sign` -1: they turn back. */
struct row_angles {
    float cosine[PARTS][PART / 2], sine[PARTS][PART / 2];
    int32_t first[PARTS], dim;
    bool inside;

    __device__ row_angles(const cpa_rope &rope, int64_t position, float sign, int lane)
        : dim(rope.dim), inside(position >= 0 && position < rope.max_position) {
        const float *cosines = rope.table + position * rope.dim;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            first[p] = part_first(p, lane) - rope.first;
            if (!inside || !has_some(p)) continue;
            load_angles<PART>(cosines, cosines + dim / 2, first[p], dim, cosine[p], sine[p]);
#pragma unroll
            for (int i = 0; i < PART / 2; i++) sine[p][i] *= sign;
        }
    }

    __device__ bool has_some(int part) const { return first[part] + PART > 0 && first[part] < dim; }

    __device__ bool has_whole(int part) const { return first[part] >= 0 && first[part] + PART <= dim; }

    /* NaN where the position is outside the table. */
    __device__ void turn(lane_row &x) const {
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            if (!inside) {
#pragma unroll
                for (int e = 0; e < PART; e++) x[p][e] = NAN;
            } else if (has_whole(p)) {
#pragma unroll
                for (int i = 0; i < PART / 2; i++)
                    cpa_turn_pair(&x[p][2 * i], &x[p][2 * i + 1], cosine[p][i], sine[p][i]);
            } else if (has_some(p)) {
                turn_by<PART>(x[p], first[p], dim, cosine[p], sine[p]);
            }
        }
    }
};

/* Rotates N neighbouring elements of a row from an even column on. */
template <int N>
__device__ void turn_columns(float (&x)[N], int32_t column, const cpa_rope &rope, int64_t position) {
    if (position < 0 || position >= rope.max_position) {
#pragma unroll
        for (int e = 0; e < N; e++) x[e] = NAN;
        return;
    }
    const int32_t first = column - rope.first;
    const float *cosines = rope.table + position * rope.dim;
    float cosine[N / 2], sine[N / 2];
    if (first + N <= 0 || first >= rope.dim) return;
    load_angles<N>(cosines, cosines + rope.dim / 2, first, rope.dim, cosine, sine);
    turn_by<N>(x, first, rope.dim, cosine, sine);
}

template <typename T>
using raw_row = unit_of<T, PART>[PARTS];

template <typename T>
__device__ void load_row(raw_row<T> &x, const T *row, int lane) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) x[p] = *(const unit_of<T, PART> *)(row + part_first(p, lane));
}
template <typename T>
__device__ void widen_row(lane_row &x, const raw_row<T> &raw) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) widen<T, PART>(x[p], raw[p]);
}
template <typename T>
__device__ void store_row(T *row, int lane, const lane_row &x, int32_t dim = CPA_ENTRY_DIM) {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int32_t first = part_first(p, lane);
        if (first < dim) *(unit_of<T, PART> *)(row + first) = narrow<T, PART>(x[p]);
    }
}

/* A part with 0 for NaN, and its largest finite magnitude. */
struct part_numbers {
    float x[PART], most;

    __device__ explicit part_numbers(const float (&of)[PART]) {
#pragma unroll
        for (int e = 0; e < PART; e++) x[e] = of[e];
        most = largest_of_numbers(x);
    }
};

/* The codes of a part, of numbers times a power of two. */
__device__ inline uint2 power_codes(const float (&x)[PART], float inverse) {
    return make_uint2(e4m3_four_numbers(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse),
                      e4m3_four_numbers(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse));
}

/* One over the power of two of an exponent that cpa_power_exponent gave. */
__device__ inline float inverse_power(uint32_t exponent) {
    return cpa_power_of(254 - exponent);
}

__device__ inline void store_power_tiles(char *row, uint8_t *bytes, const lane_row &x, int lane) {
    constexpr int LANES = POWER_TILE / PART, CODED = CPA_ENTRY_DIM - TILE_TAIL;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const part_numbers numbers(x[p]);
        const uint32_t exponent = cpa_power_exponent(lanes_most(numbers.most, LANES), CPA_ENTRY_FLOOR);
        const int32_t first = part_first(p, lane);
        if (lane % LANES == 0) bytes[first / POWER_TILE] = (uint8_t)(first < CODED ? exponent : 0);
        if (first < CODED) {
            *(uint2 *)(row + first) = power_codes(numbers.x, inverse_power(exponent));
        } else {
            *(unit_of<__nv_bfloat16, PART> *)(row + CODED + (first - CODED) * 2) = narrow<__nv_bfloat16, PART>(x[p]);
        }
    }
}

__device__ inline void store_codes_of_row(const entry_pool &pool, char *row, float *word, const lane_row &x,
                                          int lane) {
    const part_numbers numbers[PARTS] = {part_numbers(x[0]), part_numbers(x[1])};
    const float most = lanes_most(fmaxf(numbers[0].most, numbers[1].most), WARP_LANES);
    const uint32_t exponent = cpa_power_exponent(most, CPA_ENTRY_FLOOR);
    if (pool.scale == 0 && lane == 0) *word = cpa_power_of(exponent);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const int32_t first = part_first(p, lane);
        float quotient[PART];
        if (first >= pool.dim) continue;
#pragma unroll
        for (int e = 0; e < PART; e++)
            quotient[e] = pool.scale == 0 ? numbers[p].x[e] * inverse_power(exponent)
                                          : __fdiv_rn(numbers[p].x[e], pool.scale);
        *(uint2 *)(row + first) = power_codes(quotient, 1);
    }
}

/* Four lanes have the 32 elements of a scale. */
__device__ inline void store_mxfp4_row(const entry_pool &pool, int64_t slot, const lane_row &x, int lane) {
    constexpr int LANES = CPA_INDEX_MXFP4_BLOCK / PART;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
        const float scale = cpa_index_mxfp4_scale(lanes_most(largest_finite<PART>(x[p]), LANES));
        const uint32_t exponent = __float_as_uint(scale) >> 23;
        const int32_t first = part_first(p, lane);
        uint32_t codes = 0;
        if (first >= pool.dim) continue;
#pragma unroll
        for (int e = 0; e < PART; e++)
            codes |= (uint32_t)cpa_index_e2m1(x[p][e] * inverse_power(exponent)) << (4 * e);
        *(uint32_t *)(pool.mxfp4 + slot * (pool.dim / 2) + first / 2) = codes;
        if (lane % LANES == 0)
            pool.mxfp4_scales[slot * (pool.dim / CPA_INDEX_MXFP4_BLOCK) + first / CPA_INDEX_MXFP4_BLOCK] =
                (uint8_t)exponent;
    }
}

/* A row, rounded to bf16, into the cache; slots below 0 skip it. All lanes of the warp come here. */
__device__ inline void store_entry(const entry_pool &pool, int64_t token, int64_t slot, const lane_row &given,
                                   int lane) {
    if (slot < 0) return;
    if (slot >= pool.slots) {
        if (lane == 0) tell_bad_slot(pool.bad_slot, token, slot);
        return;
    }
    const int64_t offset = slot & ((1 << pool.block_shift) - 1);
    char *block = pool.memory + (slot >> pool.block_shift) * pool.block_stride;
    char *row = block + offset * pool.token_stride, *words = block + pool.words_at;
    lane_row x;
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int e = 0; e < PART; e++) x[p][e] = to_float(from_float<__nv_bfloat16>(given[p][e]));
    }
    if (pool.mxfp4) {
        store_mxfp4_row(pool, slot, x, lane);
        return;
    }
    if (pool.dtype == CPA_FP8_T64) {
        store_power_tiles(row, (uint8_t *)words + offset * POWER_SCALES, x, lane);
    } else if (pool.dtype == CPA_FP8_E4M3) {
        store_codes_of_row(pool, row, (float *)words + offset, x, lane);
    } else {
        store_row((__nv_bfloat16 *)row, lane, x, pool.dim);
    }
}

} // namespace

#endif
