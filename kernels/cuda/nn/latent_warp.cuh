/* latent_norm_rope by a warp a row, for latents that rmsnorm norms by one warp and rotated parts of as many units at
 * most. A row stays in registers, all of it on its way before its position and its slot are known: a lane has two units
 * of the latent, as warp_rows.cuh gives them, and those of its pairs. */
#ifndef CPA_CUDA_NN_LATENT_WARP_CUH
#define CPA_CUDA_NN_LATENT_WARP_CUH

#include "kernels/cuda/nn/latent_pool.cuh"
#include "kernels/cuda/nn/warp_rows.cuh"

namespace {

/* What a lane has of a row. */
template <typename T>
struct lane_latent {
    static constexpr int UNIT = VECTOR<T>, UNITS = NORM_KEPT + 2;
    using unit = unit_of<T, UNIT>;
    unit part[UNITS];
    int32_t column[UNITS]; /* of each unit in the row; -1: the lane has no such unit */

    template <typename Visit>
    __device__ void for_units(const Visit &visit) const {
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            if (column[i] >= 0) visit(i, column[i]);
    }
};

/* Over `lanes` neighbouring ones, a power of two. */
__device__ float lanes_max(float x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    return x;
}

/* The scale words of the units of a lane: of the row, or of the tile that a unit of the latent lies in. All lanes come
 * here. */
template <typename T>
__device__ void find_words(const latent_pool &pool, const lane_latent<T> &row,
                           uint32_t (&word)[lane_latent<T>::UNITS]) {
    constexpr int UNITS = lane_latent<T>::UNITS;
    float low[UNITS] = {}, high[UNITS] = {};
    row.for_units([&](int i, int32_t) {
#pragma unroll
        for (int e = 0; e < row.UNIT; e++) {
            const float finite = finite_or_zero(coded_element(pool, to_float(row.part[i].element[e])));
            low[i] = fminf(low[i], finite), high[i] = fmaxf(high[i], finite);
        }
    });
    if (pool.tail) {
        const int lanes = pool.tile / row.UNIT;
#pragma unroll
        for (int i = 0; i < NORM_KEPT; i++)
            word[i] = tile_word(pool, -lanes_max(-low[i], lanes), lanes_max(high[i], lanes));
        return;
    }
#pragma unroll
    for (int i = 1; i < UNITS; i++) low[0] = fminf(low[0], low[i]), high[0] = fmaxf(high[0], high[i]);
    const uint32_t of_row = tile_word(pool, -lanes_max(-low[0], WARP_LANES), lanes_max(high[0], WARP_LANES));
#pragma unroll
    for (int i = 0; i < UNITS; i++) word[i] = of_row;
}

/* Elements as codes, or, of the tail, in bf16. */
template <typename T>
__device__ void store_codes(const latent_pool &pool, const lane_latent<T> &row, const latent_place &to,
                            const uint32_t (&word)[lane_latent<T>::UNITS]) {
    constexpr int UNIT = lane_latent<T>::UNIT;
    const int32_t coded = pool.tile * pool.tiles;
    const cpa_dtype codes = codes_of(pool);
    row.for_units([&](int i, int32_t column) {
        if (column >= coded) {
            unit_of<__nv_bfloat16, UNIT> tail;
#pragma unroll
            for (int e = 0; e < UNIT; e++) tail.element[e] = converted<__nv_bfloat16>(row.part[i].element[e]);
            *(unit_of<__nv_bfloat16, UNIT> *)(to.row + pool.tail_at + 2 * (column - coded)) = tail;
            return;
        }
        unit_of<uint8_t, UNIT> unit;
#pragma unroll
        for (int e = 0; e < UNIT; e++)
            unit.element[e] = code_of(codes, word[i], coded_element(pool, to_float(row.part[i].element[e])));
        *(unit_of<uint8_t, UNIT> *)(to.row + column) = unit;
        if (pool.scales_at && column % pool.tile == 0)
            ((uint32_t *)(to.row + pool.scales_at))[column / pool.tile] = word[i];
        if (pool.bytes_at && column % pool.tile == 0) to.store_byte(pool, column / pool.tile, word[i]);
        if (pool.words_at && column == 0) *to.word(pool) = word[i];
    });
}

template <typename To, typename T>
__device__ void store_converted(const lane_latent<T> &row, char *to) {
    constexpr int UNIT = lane_latent<T>::UNIT;
    row.for_units([&](int i, int32_t column) {
        unit_of<To, UNIT> unit;
#pragma unroll
        for (int e = 0; e < UNIT; e++) unit.element[e] = converted<To>(row.part[i].element[e]);
        *(unit_of<To, UNIT> *)((To *)to + column) = unit;
    });
}

/* To the rows, and to the cache. All lanes come here. */
template <typename T>
__device__ void store_latent(const latent_args &a, int64_t at, int64_t slot, const lane_latent<T> &row) {
    const latent_pool &pool = a.pool;
    if (a.out) store_converted<T>(row, (char *)((T *)a.out + at * a.out_stride));
    if (slot < 0) return;
    const latent_place to(pool, slot);
    bool nonfinite = false;
    row.for_units([&](int i, int32_t) {
#pragma unroll
        for (int e = 0; e < row.UNIT; e++) nonfinite |= is_nonfinite(to_float(row.part[i].element[e]));
    });
    if (nonfinite && pool.nonfinite) pool.nonfinite[at] = 1;
    if (pool.tiles) {
        uint32_t word[lane_latent<T>::UNITS];
        find_words(pool, row, word);
        store_codes(pool, row, to, word);
    } else if (pool.dtype == CPA_F32) {
        store_converted<float>(row, to.row);
    } else if (pool.dtype == CPA_BF16) {
        store_converted<__nv_bfloat16>(row, to.row);
    } else {
        store_converted<__half>(row, to.row);
    }
}

/* Norms and rotates the units that a lane has. */
template <typename T>
__device__ void make_latent(const latent_args &a, int64_t at, lane_latent<T> &row) {
    constexpr int UNIT = lane_latent<T>::UNIT;
    const cpa_rope &rope = a.key.rope;
    const int32_t lane = threadIdx.x % WARP_LANES, pairs = rope.dim / 2 / UNIT;
    const int32_t u = min(lane, pairs - 1); /* lanes without pairs read those of the last one */
    const row_position<true> position(a.key, at);
    warp_row<T, T, 1> norm(a.norm);
    pair_units<T, UNIT> pair;
    norm.load(a.norm, at);
    pair.load(rope, (const T *)a.key.x + at * a.key.x_stride, u);
    const bool inside = position.is_inside(a.key, at);
    const rotation_of_pairs<UNIT> by(a.key, position, inside, at, u);
    const float scale = norm.scale(a.norm);
#pragma unroll
    for (int i = 0; i < row.UNITS; i++) row.column[i] = -1;
    norm.for_units([&](int, int i, int32_t at_unit) {
        const auto weight = read_constant((const unit_of<T, UNIT> *)a.norm.weight + at_unit);
        row.column[i] = at_unit * UNIT;
        row.part[i] = norm.normed(a.norm, norm.kept[0][i], weight, scale);
    });
    if (lane >= pairs) return;
    pair.rotate(by, rope.interleaved, inside);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row.column[NORM_KEPT + h] = a.norm.width + pair.column(rope, u, h);
        row.part[NORM_KEPT + h] = pair.half[h];
    }
    if (!inside && a.key.outside) a.key.outside[at] = 1;
}

/* blockIdx.y: 0 the latents of ROWS_OF_CTA rows, and from 1 on the queries of one of them. */
template <typename T>
__global__ void __launch_bounds__(ROW_WARPS_THREADS) latent_norm_rope_warps(const __grid_constant__ latent_args a) {
    const bool queries = blockIdx.y > 0;
    const int64_t at = (int64_t)blockIdx.x * ROWS_OF_CTA + (queries ? blockIdx.y - 1 : threadIdx.x / WARP_LANES);
    dependent_allow();
    dependent_wait();
    if (at >= a.key.rows) return;
    if (queries) {
        rotate_row<T, VECTOR<T>, true>(a.queries, at, {(int32_t)threadIdx.x, ROW_WARPS_THREADS});
        return;
    }
    const int64_t slot = given_slot(a.pool, at);
    lane_latent<T> row;
    make_latent(a, at, row);
    store_latent(a, at, checked_slot(a.pool, at, slot, threadIdx.x % WARP_LANES == 0), row);
}

/* Whether rows that can be read in units of vectors are such; and their cache takes these units. */
inline bool is_latent_of_warp(const latent_args &a, cpa_dtype dtype) {
    const int32_t unit = 16 / (int32_t)cpa_dtype_bytes(dtype);
    const cpa_rope &rope = a.key.rope;
    const latent_pool &pool = a.pool;
    const int64_t cache =
        (int64_t)(uintptr_t)pool.memory | pool.block_stride | pool.token_stride | (pool.tail ? pool.tail_at : 0);
    if (!is_warp_row(a.norm, dtype, 1) || cpa_rope_streams(&rope) > 1) return false;
    if (rope.dim != a.key.dim || rope.dim / 2 > WARP_LANES * unit) return false;
    if (a.out && !in_vectors(dtype, a.out_stride, (uintptr_t)a.out)) return false;
    if (!pool.tail) return cache % 16 == 0 && (!pool.tiles || pool.tile == a.k_dim);
    const int32_t lanes = pool.tile / unit;
    return cache % 16 == 0 && pool.tile * pool.tiles == a.norm.width && lanes <= WARP_LANES && !(lanes & (lanes - 1));
}

} // namespace

#endif
