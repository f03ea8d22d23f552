/* What the two warpgroups that multiply do in attend_latent.cu and sparse_latent.cu: scores, softmax and values of 64
 * packed rows, tile by tile, and where the results go. */
#ifndef CPA_CUDA_LATENT_ROWS_CUH
#define CPA_CUDA_LATENT_ROWS_CUH

#include "kernels/cuda/attend/hopper_scores.cuh"
#include "kernels/cuda/attend/latent_tiles.cuh"

namespace {

/* Named barriers: of both warpgroups that multiply, and of what one of them has handed on. 1 and 2 are those of each
 * alone. */
constexpr int BOTH = 5, BOTH_THREADS = 2 * WARPGROUP;
__device__ int handed_barrier(int consumer) {
    return 3 + consumer;
}

/* The queries of the scores: those of the first steps of the columns that only keys have, which are multiplied first,
 * in registers; the others in their tile in shared memory. */
template <typename C>
struct latent_queries {
    static constexpr int FIRST_COLUMN = C::first_of(KEYS_ALONE) - C::FIRST_OF_KEYS;
    uint64_t tile;
    uint32_t part[C::REGISTER_STEPS + 1][4];

    __device__ latent_queries(uint32_t shared, int thread) : tile(wgmma_descriptor(shared, 0)) {
        const int row = thread / 32 * 16 + (thread & 15), chunk = FIRST_COLUMN * (COLUMNS / 8) + (thread / 16 & 1);
#pragma unroll
        for (int step = 0; step < C::REGISTER_STEPS; step++)
            load_matrices(part[step], shared + chunk_at<C>(row, 2 * step + chunk));
    }
    /* A step's, of those from a tile of COLUMNS on. */
    __device__ uint64_t step(int column, int step) const {
        constexpr int STEPS = COLUMNS / 16;
        return wgmma_advance(tile, (column + step / STEPS) * (GROUP_ROWS * COLUMNS * 2) + step % STEPS * 32);
    }
};

/* What one of the two warpgroups does with the tiles of a piece, `first` being the number of the first of them. */
template <typename C>
struct latent_rows {
    latent_shared_of<C> &shared;
    const uint32_t tiles;
    const int consumer, thread;
    const uint32_t first;
    const float scale_log2;
    thread_state<C> &state;
    uint32_t p[C::KEYS / 16][4];

    __device__ int lane() const { return thread % 32; }
    __device__ uint32_t tile(int i) const {
        return tiles + C::STAGES_AT + (first + i) % C::STAGES * C::STAGE_BYTES;
    }
    __device__ uint32_t handed() const { return tiles + C::P_AT + thread * 16; }
    __device__ uint32_t maxima() const { return tiles + C::MAX_AT + thread * 8; }
    /* The first part of this warpgroup's half of the values, and of the other one's. */
    __device__ int own_half() const { return consumer * HALF_PARTS; }
    __device__ int other_half() const { return RIGHT_VALUES - own_half(); }
    __device__ uint32_t values(int i) const { return tile(i) + consumer * (C::V_COLUMNS / COLUMNS) * COLUMNS_BYTES; }

    /* Adds to S what `COUNT` tiles of COLUMNS give, from `column` on of those of the keys. FIRST: they begin it. */
    template <bool FIRST, int COUNT>
    __device__ void multiply_columns(float (&s)[C::KEYS / 2], const latent_queries<C> &q, uint64_t k, int column) {
        constexpr int STEPS = COLUMNS / 16;
        const uint64_t keys = wgmma_advance(k, column * COLUMNS_BYTES);
#pragma unroll
        for (int step = 0; step < STEPS * COUNT; step++) {
            const uint64_t of_step = wgmma_advance(keys, step / STEPS * COLUMNS_BYTES + step % STEPS * 32);
            if (FIRST && step < C::REGISTER_STEPS)
                wgmma<typename C::element>::multiply_rows(s, q.part[step], of_step, step > 0);
            else
                wgmma<typename C::element>::multiply(s, q.step(column, step), of_step, !FIRST || step > 0);
        }
    }

    __device__ uint64_t keys(int i) const {
        return wgmma_descriptor(same_in_warp(tile(i)) + C::FIRST_OF_KEYS * COLUMNS_BYTES, 0);
    }
    /* Adds what a half of the values gives, part by part, as they come. */
    __device__ void multiply_half(float (&s)[C::KEYS / 2], const latent_queries<C> &q, int i, int half) {
#pragma unroll
        for (int part = 0; part < HALF_PARTS; part++) {
            shared.wait_full(first + i, half + part);
            wgmma_fence();
            multiply_columns<false, C::count_of(LEFT_VALUES)>(s, q, keys(i), C::first_of(half + part));
        }
    }
    /* S = Q K^T of tile i, begun: with what only keys have, which comes first, and with the half of the values with
     * which this warpgroup was done by itself in the stage's last tile. */
    __device__ void begin_scores_of(float (&s)[C::KEYS / 2], const latent_queries<C> &q, int i) {
        shared.wait_full(first + i, KEYS_ALONE);
        wgmma_fence();
        multiply_columns<true, C::count_of(KEYS_ALONE)>(s, q, keys(i), C::first_of(KEYS_ALONE) - C::FIRST_OF_KEYS);
        if (!C::APART) multiply_half(s, q, i, own_half());
        wgmma_commit();
    }
    /* The rest of it. */
    __device__ void complete_scores_of(float (&s)[C::KEYS / 2], const latent_queries<C> &q, int i) {
        if (!C::APART) {
            multiply_half(s, q, i, other_half());
            wgmma_commit();
        }
        wgmma_wait<0>();
        wgmma_hold(s);
        if constexpr (C::LISTED) hide_unlisted(s, i);
        shared.release(first + i, KEYS_ALONE, lane());
    }

    /* Where a list names no key; and the largest scores, if they are asked for. */
    __device__ void hide_unlisted(float (&s)[C::KEYS / 2], int i) {
        uint32_t shown[C::KEYS / 16];
        shared.load_shown(shown, first + i);
        if ((shown[0] & shown[1] & shown[2] & shown[3]) != 0xffff) {
#pragma unroll
            for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!(shown[n / 2] >> (8 * (n % 2) + 2 * (lane() % 4) + e % 2) & 1)) s[4 * n + e] = -INFINITY;
        }
        if (!shared.wants_top) return;
#pragma unroll
        for (int j = 0; j < C::KEYS / 2; j++) state.top[j / 2 % 2] = fmaxf(state.top[j / 2 % 2], s[j]);
    }

    __device__ void mask_tile(float (&s)[C::KEYS / 2], int i) {
        const key_walk<C::KEYS> &walk = shared.walks[MULTIPLYING];
        const int tile_of_keys = walk.tile(walk.count - 1 - i);
        if (walk.masked(tile_of_keys))
            mask_scores<C>(s, state, walk.sinks, tile_of_keys * C::KEYS + 2 * (lane() % 4));
    }

    /* Past the last key of a piece, which its first tile has: see clear_values. */
    __device__ void clear_rest(int i) {
        if constexpr (C::LISTED) return; /* zeros came there */
        else clear_rest_of_piece(i);
    }
    __device__ void clear_rest_of_piece(int i) {
        const cpa_cuda_piece &piece = shared.pieces[MULTIPLYING];
        const key_walk<C::KEYS> &walk = shared.walks[MULTIPLYING];
        const int keys = piece.k_end - walk.tile(walk.count - 1) * C::KEYS;
        if (i > 0 || keys >= C::KEYS) return;
        clear_values<C>(values(i), keys, thread);
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
    }

    __device__ void hand_on() const {
#pragma unroll
        for (int k = 0; k < C::KEYS / 16; k++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(handed() + k * WARPGROUP * 16), "r"(p[k][0]),
                         "r"(p[k][1]), "r"(p[k][2]), "r"(p[k][3])
                         : "memory");
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(maxima()), "f"(state.max[0]), "f"(state.max[1])
                     : "memory");
        named_arrive(handed_barrier(consumer), BOTH_THREADS);
    }

    /* Takes over what the other warpgroup has made of tile i. What lies there is overwritten by the same thread, with
     * what it makes of the next tile. */
    __device__ void take_over(int i) {
        float max[2], keep[2];
        named_sync(handed_barrier(1 - consumer), BOTH_THREADS);
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(max[0]), "=f"(max[1]) : "r"(maxima()) : "memory");
#pragma unroll
        for (int k = 0; k < C::KEYS / 16; k++)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(p[k][0]), "=r"(p[k][1]), "=r"(p[k][2]), "=r"(p[k][3])
                         : "r"(handed() + k * WARPGROUP * 16)
                         : "memory");
#pragma unroll
        for (int half = 0; half < 2; half++) {
            keep[half] = worth_of(state.max[half], max[half], scale_log2);
            state.max[half] = max[half];
            state.sum[half] *= keep[half];
        }
        if (__any_sync(0xffffffff, keep[0] != 1 || keep[1] != 1)) rescale<C>(state, keep);
        wait_values(i);
        clear_rest(i);
    }

    __device__ void wait_values(int i) {
#pragma unroll
        for (int part = 0; part < HALF_PARTS; part++) shared.wait_full(first + i, own_half() + part);
    }
    /* O += P V of tile i, part by part, so that there is room for the next one's as early as may be. */
    __device__ void add_values(int i) {
        const uint64_t v = wgmma_descriptor(values(i), C::KEYS * COLUMNS * 2);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < HALF_PARTS; part++) {
#pragma unroll
            for (int step = 0; step < C::KEYS / 16; step++) multiply_values<C>(state, p[step], v, step, part);
            wgmma_commit();
        }
        wgmma_wait<1>();
        shared.release(first + i, own_half(), lane());
        wgmma_wait<0>();
        hold_values<C>(state);
        shared.release(first + i, own_half() + 1, lane());
    }

    /* Tile i, whose scores this warpgroup multiplies; of the one before it, the values alone. FIRST: there is none. The
     * scores begin before the other warpgroup has handed on that one, and its values are multiplied before they go on:
     * what copies tiles is waiting to overwrite these. */
    template <bool FIRST>
    __device__ void attend_tile(const latent_queries<C> &q, int i) {
        float s[C::KEYS / 2], keep[2];
        if (FIRST || !C::APART) begin_scores_of(s, q, i);
        if (!FIRST) {
            take_over(i - 1);
            add_values(i - 1);
        }
        if (!FIRST && C::APART) begin_scores_of(s, q, i); /* with one stage, no tile is ahead */
        complete_scores_of(s, q, i);
        if constexpr (!C::LISTED) mask_tile(s, i);
        const bool grown = lagging_softmax<C>(s, state, keep, scale_log2);
        pack_probabilities<C>(p, s);
        hand_on();
        if (C::APART) wait_values(i);
        if (FIRST) clear_rest(i);
        if (grown) rescale<C>(state, keep);
        add_values(i);
    }

    /* All tiles of the piece, the last keys first. */
    __device__ void attend_tiles(int count) {
        if (count == 0) return;
        const latent_queries<C> q(tiles, thread);
        int i = consumer;
        if (i == 0) {
            attend_tile<true>(q, 0);
            i = C::CONSUMERS;
        }
        for (; i < count; i += C::CONSUMERS) attend_tile<false>(q, i);
        if (i > count) return;
        take_over(count - 1); /* the other had the last */
        add_values(count - 1);
    }
};

/* The queries of a piece, by both warpgroups; zeros past the last row. */
template <typename C>
__device__ void load_packed_queries(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_head,
                                    uint32_t tile, int thread) {
    constexpr int CHUNKS = C::K_DIM / 8;
    const char *of_piece = queries_of(a, piece);
    for (int i = thread; i < GROUP_ROWS * CHUNKS; i += BOTH_THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = piece.row_begin + row < piece.row_end && chunk * 8 < a.k_dim;
        row_place place(a, piece.q_row, valid ? piece.row_begin + row : piece.row_begin, kv_head);
        const char *q = of_piece;
        if (a.rows) {
            const cpa_cuda_listed_row &listed = a.rows[place.state_row];
            place.state_row = listed.row;
            if (listed.ready) q = a.ready_q;
        }
        const char *from =
            q + (place.state_row * a.q_row_stride + place.head * a.q_head_stride + (valid ? chunk * 8 : 0)) * 2;
        copy_async_16(tile + chunk_at<C>(row, chunk), from, valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
    async_proxy_fence();
}

/* The sums of both warpgroups, each of which has those of the tiles that were its turn; where the queries lay, which
 * nobody needs any more. */
template <typename C>
__device__ void join_sums(thread_state<C> &state, uint32_t tile, int consumer, int thread) {
    const auto place_of = [&](int warpgroup) { return tile + (warpgroup * WARPGROUP + thread) * 8; };
    const uint32_t own = place_of(consumer), other = place_of(1 - consumer);
    float sum[2];
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own), "f"(state.sum[0]), "f"(state.sum[1]) : "memory");
    named_sync(BOTH, BOTH_THREADS);
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(sum[0]), "=f"(sum[1]) : "r"(other) : "memory");
    state.sum[0] += sum[0], state.sum[1] += sum[1];
}

/* The row of the work space that a row of a piece which is one of several has there. */
__device__ inline int64_t partial_row(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int row) {
    if (!a.rows) return piece.partial + row - piece.row_begin;
    const int token = token_of_row(a, row);
    const cpa_cuda_listed_row &listed = a.rows[piece.q_row + token];
    return listed.partial + piece.partial * listed.stride + row - token * a.group;
}

/* Where a row goes. A listed one has no place in the state. */
__device__ inline row_sink sink_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int row, int kv_head,
                                   float lse) {
    row_sink sink(a, a.rows ? 0 : piece.q_row, piece.state_shift, row, kv_head, lse);
    if (piece.partial >= 0)
        sink.place_in_work_space(a, kv_head * a.partial_rows + partial_row(a, piece, row), lse);
    return sink;
}

constexpr int PAIRS = 4; /* of columns of a row of a thread, whose old values are loaded together */

/* A warpgroup's columns of the rows, and by the first one their LSEs; code_scale: that of codes, 1 of elements. */
template <typename C>
__device__ void store_columns(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const thread_state<C> &state,
                              float code_scale, int kv_head, int consumer, int thread) {
    const int lane = thread % 32, first_row = piece.row_begin + thread / 32 * 16 + lane / 4;
    float *lse_at[2] = {}, lses[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = first_row + 8 * half;
        const float max = state.max[half], sum = counted_sum(quad_sum(state.sum[half]), max, a.scale_log2 * code_scale);
        const float inverse = inverse_of_sum(sum) * code_scale;
        const float lse = piece.refused ? NAN : lse_of(sum, max * (a.scale * code_scale) + logf(sum));
        if (row >= piece.row_end) continue;
        const row_sink sink = sink_of(a, piece, row, kv_head, lse);
        const auto column_of = [&](int n) { return consumer * C::V_COLUMNS + 8 * n + 2 * (lane % 4); };
        lse_at[half] = sink.lse;
        lses[half] = sink.weights.lse;
#pragma unroll
        for (int first = 0; first < C::V_COLUMNS / 8; first += PAIRS) {
            float old[PAIRS][2];
#pragma unroll
            for (int n = first; n < first + PAIRS; n++)
                if (column_of(n) < a.v_dim) sink.load_old(column_of(n), old[n - first]);
#pragma unroll
            for (int n = first; n < first + PAIRS; n++) {
                const float *from = &state.o[8 * n / C::PART][4 * (n % (C::PART / 8)) + 2 * half];
                const float o[2] = {from[0] * inverse, from[1] * inverse};
                if (column_of(n) < a.v_dim) sink.template store<typename C::element>(column_of(n), o, old[n - first]);
            }
        }
    }
    named_sync(BOTH, BOTH_THREADS); /* both have read the LSEs that are there */
    if (consumer > 0 || lane % 4 > 0) return;
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (lse_at[half]) *lse_at[half] = lses[half];
}

} // namespace

#endif
