/* The walk of attend_blocks.cu through the tiles of keys of which some row of a CTA attends a key. */
#ifndef CPA_CUDA_BLOCKS_WALK_CUH
#define CPA_CUDA_BLOCKS_WALK_CUH

#include "kernels/cuda/attend/attend_blocks.h"
#include "kernels/cuda/attend/score.cuh"

/* The bits of the blocks of each row of a CTA. Lies in shared memory. */
struct block_rows {
    const uint32_t *bits[CPA_CUDA_BLOCKS_ROWS]; /* NULL: the row attends all keys */
    int32_t first[CPA_CUDA_BLOCKS_ROWS];        /* the rows with which others bits begin */
    int32_t differing;                          /* how many */
    bool in_runs;                               /* 32 keys of the item from a multiple of 32 on are neighbours */

    /* By all threads of the CTA, which see it behind the next barrier. */
    __device__ void fill(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const cpa_key_blocks &blocks,
                         int32_t head) {
        const int32_t rows = piece.row_end - piece.row_begin;
        for (int32_t i = threadIdx.x; i < CPA_CUDA_BLOCKS_ROWS; i += blockDim.x) {
            const int64_t row = piece.q_row + piece.row_begin + min(i, rows - 1);
            const int64_t word = blocks.row_word[blocks.row_map ? blocks.row_map[row] : row];
            bits[i] = word < 0 ? NULL : blocks.bits + word + head * blocks.head_stride;
        }
        if (threadIdx.x == 0) differing = 0, in_runs = runs_of(a, piece, 32);
        __syncthreads();
        for (int32_t i = threadIdx.x; i < rows; i += blockDim.x)
            if (i == 0 || bits[i] != bits[i - 1]) first[atomicAdd(&differing, 1)] = i;
    }
    static __device__ uint32_t has(const uint32_t *of, int32_t width, uint32_t block) {
        return block < (uint32_t)width ? of[block / 32] >> block % 32 & 1 : 0;
    }
    /* Which of 32 keys of the item from `key` on a row attends, as far as its blocks say. */
    __device__ uint32_t shown(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const cpa_key_blocks &blocks,
                              int32_t row, int32_t key) const {
        const uint32_t *of = bits[row];
        if (!of) return ~0u;
        const uint32_t index = (uint32_t)key_index(a, piece, key), size = (uint32_t)blocks.block;
        if (in_runs && index / size == (index + 31) / size) return has(of, blocks.width, index / size) ? ~0u : 0;
        uint32_t seen = 0;
#pragma unroll 1
        for (int32_t i = 0; i < 32; i++)
            seen |= has(of, blocks.width, (uint32_t)key_index(a, piece, key + i) / size) << i;
        return seen;
    }
};

/* MOST: tiles that are looked through once, before the walk; of a walk of more none is left out. */
template <int TILE, int MOST>
struct blocks_walk : key_walk<TILE> {
    static constexpr int GROUPS = TILE / 32;
    static constexpr uint16_t TESTED = 1 << 15;
    static_assert(MOST <= TESTED, "a tile and a bit");
    bool listed;
    uint16_t list[MOST]; /* tiles, by their number in the whole walk, and whether some row does not see all of them */
    uint32_t some[MOST / 32], all[MOST / 32];

    /* Called by all threads of the CTA; ends with a barrier. `rows` are filled. */
    __device__ void start(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const cpa_key_blocks &blocks,
                          const block_rows &rows) {
        key_walk<TILE>::start(a, piece);
        if (threadIdx.x == 0) listed = this->count <= MOST;
        __syncthreads();
        if (!listed) return;
        const int32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int32_t words = (this->count + 31) / 32;
        for (int32_t word = warp; word < words; word += warps) {
            const int32_t i = 32 * word + lane;
            bool any = false, every = true;
            if (i < this->count) look_at(a, piece, blocks, rows, key_walk<TILE>::tile(i), any, every);
            const uint32_t with_some = __ballot_sync(0xffffffff, any), with_all = __ballot_sync(0xffffffff, every);
            if (lane == 0) some[word] = with_some, all[word] = with_all;
        }
        __syncthreads();
        if (threadIdx.x < 32) enlist(words, lane);
        __syncthreads();
    }
    __device__ void look_at(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const cpa_key_blocks &blocks,
                            const block_rows &rows, int32_t tile, bool &any, bool &every) const {
        for (int32_t d = 0; d < rows.differing; d++) {
#pragma unroll 1
            for (int32_t g = 0; g < GROUPS; g++) {
                const int32_t key = tile * TILE + 32 * g;
                if (key >= piece.k_end) break;
                const uint32_t shown = rows.shown(a, piece, blocks, rows.first[d], key) | ~low_bits(piece.k_end - key);
                const uint32_t real = shown & low_bits(piece.k_end - key);
                any |= real != 0, every &= shown == ~0u;
            }
        }
    }
    __device__ void enlist(int32_t words, int32_t lane) {
        int32_t at = 0;
        for (int32_t word = 0; word < words; word++) {
            const int32_t i = 32 * word + lane;
            const uint32_t with = some[word];
            if (with >> lane & 1) {
                const bool whole = all[word] >> lane & 1 && !this->masked(key_walk<TILE>::tile(i));
                list[at + __popc(with & low_bits(lane))] = (uint16_t)(i | (whole ? 0 : TESTED));
            }
            at += __popc(with);
        }
        __syncwarp();
        if (lane == 0) this->count = at;
    }
    /* The i-th tile that is left, and whether some row does not see all of it. */
    __device__ int32_t tile(int32_t i) const { return key_walk<TILE>::tile(listed ? list[i] & ~TESTED : i); }
    __device__ bool tested(int32_t i) const { return !listed || (list[i] & TESTED) != 0; }
};

#endif
