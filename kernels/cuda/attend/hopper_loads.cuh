/* The loading warps of the Hopper kernel: keys and values, tile by tile, into the stages of shared memory. */
#ifndef CPA_CUDA_HOPPER_LOADS_CUH
#define CPA_CUDA_HOPPER_LOADS_CUH

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/hopper_tiles.cuh"
#include "kernels/cuda/attend/listed_walk.cuh"

namespace {

constexpr int NO_BLOCK = -1; /* outside the pool: reads zeros */

struct hopper_args {
    cpa_cuda_hopper_maps maps;
    cpa_cuda_attend_args a;
    int32_t box;  /* tokens in a box of the maps */
    int32_t flat; /* tensors without pages: the maps have one block, and tables hold the first row of an item */
};

template <typename C>
using hopper_walk = typename std::conditional<C::RULED, listed_walk<C::KEYS>, key_walk<C::KEYS>>::type;

/* Barriers of the stages: full when the bytes are there, empty when all consumers are done with them. */
template <typename C>
struct stage_barriers {
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[C::V_STAGES], v_empty[C::V_STAGES];
};

/* The n-th tile in the order of the walk backwards: stage n mod N of N, in its n / N-th phase. */
template <int N>
__device__ inline uint32_t phase_of(int n) {
    return (n / N) & 1;
}

/* What all lanes have alike, and the compiler then knows that they do: it may go to uniform registers. */
__device__ inline int same_in_warp(int value) {
    return __shfl_sync(0xffffffff, value, 0);
}

/* ---- the loading warps, one or two for keys, and as many for values ---- */

/* Where a box of tokens of a tile lies. */
struct box_place {
    int block, token;
};

/* The box from a row of a tile on. Boxes past the last key, before `end`, lie nowhere. */
template <typename C>
__device__ box_place place_of(const hopper_args &args, const cpa_cuda_piece &piece, int end, int tile, int row) {
    const int key = tile * C::KEYS + row;
    const bool inside = row < C::KEYS && key < end;
    const int block = inside ? __ldg(args.a.tables + piece.table + (key >> args.a.block_shift)) : NO_BLOCK;
    if (args.flat) return {min(block, 0), block + key};
    return {block, key & ((1 << args.a.block_shift) - 1)};
}

/* The tiles of keys, or of values, of DIM columns: a lane copies the box from `row` on, one copy for every 64 columns
 * and one for the rest, and the scales of its keys if they have any (of a box that lies nowhere, those of some others:
 * nobody sees it). */
template <typename C, int DIM, bool SCALES>
__device__ void load_tiles(const hopper_args &args, const CUtensorMap *map, const CUtensorMap *tail_map,
                           const cpa_cuda_piece &piece, const hopper_walk<C> &walk, int kv_head, uint32_t tiles,
                           uint32_t scales, uint64_t (&full)[STAGES], uint64_t (&empty)[STAGES], int row) {
    constexpr int BYTES = C::KEYS * DIM * 2;
    const int count = walk.count;
    if (count == 0) return;
    box_place next = place_of<C>(args, piece, piece.k_end, walk.tile(count - 1), row);
    for (int n = 0; n < count; n++) {
        const int stage = n % STAGES;
        const uint32_t barrier = shared_address(&full[stage]), shared = tiles + stage * BYTES;
        const box_place place = next;
        if (n + 1 < count) /* before the waiting */
            next = place_of<C>(args, piece, piece.k_end, walk.tile(count - 2 - n), row);
        barrier_wait(shared_address(&empty[stage]), phase_of<STAGES>(n) ^ 1);
        if (row == 0) barrier_expect(barrier, BYTES + (SCALES ? C::SCALE_BYTES : 0));
        __syncwarp();
        if (SCALES && row < C::KEYS) {
            const int64_t head_of_block = (int64_t)max(place.block, 0) * args.a.kv_heads + kv_head;
            copy_row(scales + stage * C::SCALE_BYTES + row * 4,
                     args.a.k_scales + (head_of_block << args.a.block_shift) + place.token, args.box * 4, barrier);
        }
        if (row < C::KEYS) {
#pragma unroll
            for (int part = 0; part < DIM / COLUMNS; part++)
                copy_box(shared + (part * C::KEYS + row) * COLUMNS * 2, map, barrier, part * COLUMNS, place.token,
                         kv_head, place.block);
            if constexpr (DIM % COLUMNS > 0)
                copy_box(shared + C::KEYS * (DIM - C::TAIL) * 2 + row * C::TAIL * 2, tail_map, barrier, DIM - C::TAIL,
                         place.token, kv_head, place.block);
        }
        __syncwarp();
    }
}

/* ---- the same where pages are of few tokens ---- */

/* The tiles of keys, or of values, swizzled as bulk copies write them: 8 lanes copy 64 columns of a row, a warp those
 * of 4 rows at once. A lane looks up every eighth row of those that its eight copy, and the others learn of it by
 * shuffles: three instructions a copy, since the products wait where a tile takes many. Past the width of the head are
 * zeros; past the last key, that key again. */
template <typename C, cpa_kv_part PART, int N>
__device__ void load_rows(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const hopper_walk<C> &walk,
                          int kv_head, uint32_t tiles, uint64_t (&full)[N], uint64_t (&empty)[N], int warp, int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_DIM, BYTES = C::KEYS * DIM * 2;
    constexpr int LANES = COLUMNS / 8, ROWS = 32 / LANES, SHARE = C::KEYS / LOADING_PAIR, EACH = SHARE / 32;
    const int count = walk.count, chunk = lane % LANES, within = lane / LANES;
    if (count == 0) return;
    /* The chunks of a row change places by the row's last three bits, of which `within` has two. */
    const uint32_t row_at = tiles + (warp * SHARE + within) * (COLUMNS * 2);
    const uint32_t even = row_at + (chunk ^ within) * 16, odd = row_at + (chunk ^ within ^ ROWS) * 16;
    const int64_t block_bytes = (PART == CPA_KEYS ? a.k_block_stride : a.v_block_stride) * 2,
                  token_bytes = (PART == CPA_KEYS ? a.k_token_stride : a.v_token_stride) * 2;
    const int shift = a.block_shift, dim = PART == CPA_KEYS ? a.k_dim : a.v_dim;
    const char *pool = PART == CPA_KEYS ? a.k : a.v;
    pool += kv_head * (PART == CPA_KEYS ? a.k_head_stride : a.v_head_stride) * 2;
    const int32_t *table = a.tables + piece.table;
    const int first = warp * SHARE + chunk * ROWS + within;
    const char *mine[EACH]; /* of every 32 rows, the one that this lane looks up */
    auto look_up = [&](int tile) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int key = min(tile * C::KEYS + first + i * 32, piece.k_end - 1);
            mine[i] = pool + __ldg(table + (key >> shift)) * block_bytes + (key & ((1 << shift) - 1)) * token_bytes;
        }
    };
    look_up(walk.tile(count - 1));
    for (int n = 0; n < count; n++) {
        const int stage = n % N;
        barrier_wait(shared_address(&empty[stage]), phase_of<N>(n) ^ 1);
#pragma unroll
        for (int row = 0; row < SHARE; row += ROWS) {
            const uint64_t at = __shfl_sync(0xffffffff, (uint64_t)mine[row / 32], row / ROWS % LANES, LANES);
            const uint32_t to = (row / ROWS % 2 ? odd : even) + stage * BYTES + row * (COLUMNS * 2);
#pragma unroll
            for (int part = 0; part < DIM / COLUMNS; part++)
                copy_async_16(to + part * (C::KEYS * COLUMNS * 2), (const char *)at + chunk * 16 + part * (COLUMNS * 2),
                              part * COLUMNS + chunk * 8 < dim);
        }
        copy_async_commit();
        if (n + 1 < count) look_up(walk.tile(count - 2 - n));
        copy_async_wait<0>();
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&full[stage]));
    }
}

} // namespace

#endif
