/* The warpgroup of sparse_entries.cu that multiplies queries and keys, and makes probabilities of scores. */
#ifndef CPA_CUDA_ENTRY_SCORES_CUH
#define CPA_CUDA_ENTRY_SCORES_CUH

#include "kernels/cuda/attend/entry_tiles.cuh"

namespace {

__device__ inline void store_matrices(uint32_t address, const uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
                 "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

/* Tiles [first, end) of COLUMNS of a unit's queries; zeros past the last head, and past their width. */
template <typename C>
__device__ void copy_queries(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, uint32_t tiles, int first,
                             int end, int thread) {
    constexpr int CHUNKS = COLUMNS / 8, AT_ONCE = WARPGROUP / CHUNKS;
    const int chunk = thread % CHUNKS, row = thread / CHUNKS;
    const char *q = a.q + (piece.q_row * a.q_row_stride + piece.row_begin * a.q_head_stride) * 2;
    for (int tile = first; tile < end; tile++) {
        const int column = tile * COLUMNS + chunk * 8;
#pragma unroll
        for (int i = 0; i < GROUP_ROWS; i += AT_ONCE) {
            const bool valid = piece.row_begin + row + i < piece.row_end && column < a.k_dim;
            const char *from = q + ((row + i) * a.q_head_stride + column) * 2;
            copy_async_16(tiles + tile * C::TILE_BYTES + swizzled<COLUMNS>(row + i, chunk), valid ? from : a.q, valid);
        }
    }
    copy_async_commit();
}

template <typename C>
struct entry_scores {
    entry_shared<C> &shared;
    const uint32_t tiles;
    const int thread;
    const float scale_log2;
    thread_state<C> state; /* no columns of O */
    uint32_t q[C::QUERY_TILES * (COLUMNS / 16)][4];

    __device__ int lane() const { return thread % 32; }
    __device__ int warp() const { return thread / 32; }
    __device__ uint32_t tile(uint32_t n) const { return tiles + C::STAGES_AT + n % C::STAGES * C::STAGE_BYTES; }

    /* Those of a unit, before its first tile, the n-th of all. */
    __device__ void load_queries(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, uint32_t n) {
        copy_queries<C>(a, piece, tiles, C::STAGES, C::K_DIM / COLUMNS, thread);
        for (int i = 0; i < C::STAGES; i++) shared.wait_added(n + i); /* whose probabilities lie in the first tiles */
        copy_queries<C>(a, piece, tiles, 0, C::STAGES, thread);
        copy_async_wait<0>();
        async_proxy_fence();
        named_sync(SCORES_ALONE, WARPGROUP);
        const int row = warp() * 16 + (lane() & 15);
#pragma unroll
        for (int step = 0; step < C::QUERY_TILES * (COLUMNS / 16); step++)
            load_matrices(q[step], tiles + chunk_at<C>(row, 2 * step + (lane() >> 4)));
    }

    /* S = Q K^T of tile n, as its parts come: the first of either half, and then the others. */
    __device__ void multiply_tile(float (&s)[C::KEYS / 2], uint32_t n) {
        constexpr int STEPS = COLUMNS / 16;
        const uint64_t queries = wgmma_descriptor(tiles, 0), keys = wgmma_descriptor(same_in_warp(tile(n)), 0);
#pragma unroll
        for (int at = 0; at < ENTRY_PARTS; at++) {
            const int first = C::part_at(at) * C::PART_TILES;
            if (at % 2 == 0) wait_parts(n, at);
#pragma unroll
            for (int i = 0; i < C::PART_TILES * STEPS; i++) {
                const int column = first + i / STEPS, step = i % STEPS;
                const uint32_t of_step = column * C::TILE_BYTES + step * 32;
                if (column < C::QUERY_TILES)
                    wgmma<typename C::element>::multiply_rows(s, q[column * STEPS + step],
                                                              wgmma_advance(keys, of_step), at > 0 || i > 0);
                else
                    wgmma<typename C::element>::multiply(s, wgmma_advance(queries, of_step),
                                                         wgmma_advance(keys, of_step), at > 0 || i > 0);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(s);
    }
    /* Until two parts of tile n are there. */
    __device__ void wait_parts(uint32_t n, int at) {
        shared.wait_full(n, C::part_at(at));
        shared.wait_full(n, C::part_at(at + 1));
        if (C::PAIRED) async_proxy_fence(); /* what the other CTA stored */
        wgmma_fence();
    }

    /* Where a list names no key; and the largest scores, if they are asked for. */
    __device__ void hide_unlisted(float (&s)[C::KEYS / 2], uint32_t n) {
        const uint64_t shown = *(volatile uint64_t *)&shared.shown[n % C::STAGES];
        const uint32_t halves[] = {(uint32_t)shown, (uint32_t)(shown >> 32)};
        if ((halves[0] & halves[1]) != 0xffffffff) {
#pragma unroll
            for (int i = 0; i < C::KEYS / 8; i++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!(halves[i / 4] >> (8 * (i % 4) + 2 * (lane() % 4) + e % 2) & 1)) s[4 * i + e] = -INFINITY;
        }
        if (!shared.wants_top) return;
#pragma unroll
        for (int j = 0; j < C::KEYS / 2; j++) state.top[j / 2 % 2] = fmaxf(state.top[j / 2 % 2], s[j]);
    }

    /* Probabilities of tile n, and what older O is worth beside them, to those who add its values. */
    __device__ void hand_on(const uint32_t (&p)[C::KEYS / 16][4], const float (&keep)[2], bool grown, uint32_t n) {
        const int stage = n % C::STAGES, row = warp() * 16 + (lane() & 15);
        const uint32_t to = tiles + stage * C::TILE_BYTES;
        shared.wait_added(n);
#pragma unroll
        for (int step = 0; step < C::KEYS / 16; step++)
            store_matrices(to + swizzled<COLUMNS>(row, 2 * step + (lane() >> 4)), p[step]);
        if (grown && lane() % 4 == 0) {
            shared.keep[stage][warp() * 16 + lane() / 4] = keep[0];
            shared.keep[stage][warp() * 16 + lane() / 4 + 8] = keep[1];
        }
        if (lane() == 0) shared.grown[stage][warp()] = grown;
        async_proxy_fence();
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.at(shared.softened[stage]));
    }

    __device__ void take_tile(uint32_t n) {
        float s[C::KEYS / 2], keep[2];
        uint32_t p[C::KEYS / 16][4];
        multiply_tile(s, n);
        hide_unlisted(s, n);
        const bool grown = lagging_softmax<C>(s, state, keep, scale_log2);
        pack_probabilities<C>(p, s);
        hand_on(p, keep, grown, n);
    }

    /* Those of the unit-th unit of this CTA. */
    __device__ void end(const cpa_cuda_sparse_args &args, const cpa_cuda_piece &piece, uint32_t unit) {
        barrier_wait(shared.at(shared.stored), (unit & 1) ^ 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = warp() * 16 + lane() / 4 + 8 * half;
            const float sum = quad_sum(state.sum[half]), top = quad_max(state.top[half]);
            if (lane() % 4 > 0) continue;
            if constexpr (C::SPLIT) {
                shared.ends.max[row] = state.max[half];
                shared.ends.sum[row] = sum;
                shared.ends.top[row] = top;
            } else if (piece.row_begin + row < piece.row_end) {
                shared.rows[row] = ended_row(args, piece, row, state.max[half], sum, top);
            }
        }
        __syncwarp();
        if (lane() == 0) barrier_arrive(shared.at(shared.ended));
    }
};

/* All units of the CTA. */
template <typename C>
__device__ void score_units(const cpa_cuda_sparse_args &args, entry_shared<C> &shared, uint32_t tiles, int thread) {
    const cpa_cuda_attend_args &a = args.a[0];
    entry_scores<C> scores{shared, tiles, thread, a.scale_log2};
    uint32_t n = 0, units = 0;
    for_units<C>(args, shared, SCORING, SCORES_ALONE, WARPGROUP, thread == 0, [&](const listed_work &work) {
        thread_state<C> &state = scores.state;
        state.max[0] = state.max[1] = lowest_max(scores.scale_log2);
        state.sum[0] = state.sum[1] = 0;
        state.top[0] = state.top[1] = -INFINITY;
        const uint32_t end = same_in_warp(n + work.count);
        if (n < end) scores.load_queries(a, work.row.piece, n);
#pragma unroll 1
        for (; n < end; n++) scores.take_tile(n);
        if (same_in_warp(work.row.any)) scores.end(args, work.row.piece, units++);
    });
}

} // namespace

#endif
