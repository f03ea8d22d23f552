/* qk_norm_rope for heads of 16-bit elements that are rotated whole, or not at all. A lane has 16 bytes of the first
 * half of a head and those of the same place in the second half: both columns of each of its pairs, whichever way they
 * are paired. It keeps the eight cosines and sines of these pairs for all of its heads. */
#ifndef CPA_CUDA_NN_QK_PAIRS_CUH
#define CPA_CUDA_NN_QK_PAIRS_CUH

#include <math.h>

#include "kernels/cuda/nn/qk_heads.cuh"

namespace {

constexpr int PAIRS = 8, PAIR_COLUMNS = 2 * PAIRS;

template <typename T>
using pair_part = head_part<T, PAIRS, 2>;

/* Those of a lane; past the end of heads that are narrower than the lanes of a group reach. */
__device__ lane_columns columns_of(int32_t dim, int32_t lane) {
    const int32_t first = lane * PAIRS, half = dim / 2;
    return {first < half ? first : dim, half};
}

struct pair_rotation {
    float cosine[PAIRS], sine[PAIRS];
};

__device__ void load_rotation(pair_rotation &by, const cpa_rope &rope, int64_t position, int32_t lane) {
    const int32_t half = rope.dim / 2, first = lane * PAIRS;
    if (first >= half) return;
    const float *row = rope.table + position * rope.dim;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const int32_t pair = rope.interleaved ? (first + part * half) / 2 : first + part * PAIRS / 2;
        *(float4 *)&by.cosine[part * PAIRS / 2] = *(const float4 *)(row + pair);
        *(float4 *)&by.sine[part * PAIRS / 2] = *(const float4 *)(row + half + pair);
    }
}

__device__ void rotate(float &x, float &y, float cosine, float sine) {
    const float turned = x * cosine - y * sine;
    y = y * cosine + x * sine;
    x = turned;
}

__device__ void rotate_pairs(float (&x)[2][PAIRS], const pair_rotation &by, bool interleaved) {
    if (interleaved) {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            float *const pair = &x[i / (PAIRS / 2)][2 * (i % (PAIRS / 2))];
            rotate(pair[0], pair[1], by.cosine[i], by.sine[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PAIRS; i++) rotate(x[0][i], x[1][i], by.cosine[i], by.sine[i]);
    }
}

template <typename T>
__device__ void load_part(pair_part<T> &part, const rope_args &a, const T *row, int32_t head, int32_t lane) {
    const head_place at = place_of(a, head);
    const lane_columns columns = columns_of(at.dim, lane);
    const T *from = row + offset_of(a, at) + columns.first;
    part = {};
    if (columns.first >= at.dim) return;
#pragma unroll
    for (int r = 0; r < 2; r++) part.unit[r] = *(const unit_of<T, PAIRS> *)(from + r * columns.apart);
}

/* A query or a key; others are left as they are. All lanes of the warp come here. */
template <typename T, int LANES>
__device__ void norm_and_rotate_pairs(const rope_args &a, head_place at, lane_columns columns, const pair_rotation &by,
                                      bool no_position, pair_part<T> &part) {
    const void *weight = at.kind == 0 ? a.q_weight : at.kind == 1 ? a.k_weight : NULL;
    float x[2][PAIRS], squares = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        widen<T, PAIRS>(x[r], part.unit[r]);
#pragma unroll
        for (int e = 0; e < PAIRS; e++) squares = fmaf(x[r][e], x[r][e], squares);
    }
    if (a.q_weight || a.k_weight) squares = group_sum(squares, LANES); /* the same for all lanes of the grid */
    if (at.kind > 1 || columns.first >= at.dim) return;
    if (weight) {
        const float scale = rsqrtf(__fdividef(squares, (float)a.k_dim) + a.eps);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float w[PAIRS];
            const T *from = (const T *)weight + columns.first + r * columns.apart;
            const unit_of<T, PAIRS> weights = *(const unit_of<T, PAIRS> *)from; /* in one access */
            widen<T, PAIRS>(w, weights);
#pragma unroll
            for (int e = 0; e < PAIRS; e++) x[r][e] = x[r][e] * scale * (w[e] + a.weight_offset);
        }
    }
    if (a.rope.table) rotate_pairs(x, by, a.rope.interleaved);
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int e = 0; e < PAIRS; e++) x[r][e] = no_position ? NAN : x[r][e];
        part.unit[r] = narrow<T, PAIRS>(x[r]);
    }
}

/* The CTAs of a row, in blockIdx.y, take its heads in turn, a group of lanes one after the other: that few registers
 * are needed, and many threads run, counts for more than several heads a lane. The first head is on its way before the
 * position of the row is known. */
template <typename T, int LANES>
__global__ void __launch_bounds__(THREADS, 6) qk_norm_rope_pairs(const __grid_constant__ rope_args a) {
    const int32_t lane = threadIdx.x % LANES, group = threadIdx.x / LANES, groups = THREADS / LANES;
    const int32_t heads = a.q_heads + 2 * a.kv_heads, step = groups * gridDim.y;
    const int64_t row = blockIdx.x;
    const T *qkv = (const T *)a.qkv + row * a.qkv_stride;
    pair_part<T> part;
    pair_rotation by = {};
    dependent_allow(); /* attention, which reads its plan meanwhile, and has the caches read keys and values */
    dependent_wait();
    const int64_t position = a.rope.table ? a.positions[row] : 0;
    int32_t base = blockIdx.y * groups;
    load_part<T>(part, a, qkv, base + group, lane);
    const int64_t slot = slot_of(a, row);
    const bool no_position = a.rope.table && (position < 0 || position >= a.rope.max_position);
    if (a.rope.table && !no_position) load_rotation(by, a.rope, position, lane);
    while (true) {
        const head_place at = place_of(a, base + group);
        const lane_columns columns = columns_of(at.dim, lane);
        norm_and_rotate_pairs<T, LANES>(a, at, columns, by, no_position, part);
        store_head<T, PAIRS, 2>(a, at, columns, LANES, row, slot, part);
        base += step;
        if (base >= heads) return;
        load_part<T>(part, a, qkv, base + group, lane);
    }
}

/* Whether heads that can be read 16 bytes at a time have their pairs where lanes look for them. */
bool in_pairs(const rope_args &a) {
    const cpa_rope &rope = a.rope;
    if (a.k_dim % PAIR_COLUMNS || a.v_dim % PAIR_COLUMNS) return false;
    return !rope.table || (rope.first == 0 && rope.dim == a.k_dim && (uintptr_t)rope.table % 16 == 0);
}

/* That with the lanes that the widest head needs. */
template <typename T>
auto pairs_kernel(const rope_args &a) -> void (*)(rope_args) {
    const int32_t widest = a.k_dim > a.v_dim ? a.k_dim : a.v_dim;
    static_assert(MOST_DIM <= 16 * PAIR_COLUMNS, "heads wider than 16 lanes");
    if (widest <= 4 * PAIR_COLUMNS) return qk_norm_rope_pairs<T, 4>;
    return widest <= 8 * PAIR_COLUMNS ? qk_norm_rope_pairs<T, 8> : qk_norm_rope_pairs<T, 16>;
}

} // namespace

#endif
