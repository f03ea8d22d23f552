/* What one of two warpgroups of the persistent kernel does: from piece to piece without a break. */
#ifndef CPA_CUDA_PERSISTENT_FLOW_CUH
#define CPA_CUDA_PERSISTENT_FLOW_CUH

#include "kernels/cuda/attend/persistent_rows.cuh"

namespace {

/* The way of one of two warpgroups, which take turns, through the tiles of all pieces, `n` counting all of them. The values
 * of a tile are due while the scores of the next one are multiplied, be that of the same piece or of the one behind. */
template <typename C>
struct tile_flow {
    using work = typename C::work;
    using row_ends = typename work::row_ends;
    const typename C::args &args;
    persistent_shared<C> &shared;
    const uint32_t tiles;
    const int consumer;
    thread_state<C> state;
    uint32_t p[C::KEYS / 16][4];
    uint32_t n = 0, taken = 0; /* tiles of keys, and tiles of queries, so far */
    int due_piece = -1;        /* the piece whose values of tile n - 1 are still to be multiplied; -1: none */

    __device__ tile_flow(const typename C::args &all, persistent_shared<C> &memory, uint32_t at, int number)
        : args(all), shared(memory), tiles(at), consumer(number) {
        static_assert(C::CONSUMERS == 2, "two warpgroups");
        clear_state<C>(state, all.pools.a.scale_log2);
#pragma unroll
        for (int k = 0; k < C::KEYS / 16; k++) p[k][0] = p[k][1] = p[k][2] = p[k][3] = 0;
    }
    __device__ uint32_t k_tile(uint32_t m) const { return tiles + C::K_AT + shared.k.stage(m) * C::K_BYTES; }
    __device__ uint32_t v_tile(uint32_t m) const { return tiles + C::V_AT + shared.v.stage(m) * C::V_BYTES; }
    /* The first row of a thread. */
    __device__ int row_of(const fetched_piece &fetched, int thread) const {
        return fetched.piece.row_begin + consumer * GROUP_ROWS + thread / 32 * 16 + thread % 32 / 4;
    }

    /* The values that are due, of tile m, begun. FIRST: they are of another piece than the scores, or none are, and what is
     * multiplied is dropped. */
    template <bool FIRST>
    __device__ void begin_due(uint32_t m) {
        if (!FIRST || due_piece >= 0) shared.v.wait_full(m);
        begin_values<C>(state, p, v_tile(m));
    }
    /* Waits until the values that are due, of tile m, have been multiplied. */
    template <bool FIRST>
    __device__ void end_due(uint32_t m, int thread) {
        wgmma_wait<0>();
        hold_values<C>(state);
        if (!FIRST || due_piece >= 0) shared.v.release(m, thread % 32);
    }
    /* Those of their piece are complete. */
    __device__ void store_due(const row_ends &ends, int thread) {
        if (due_piece < 0) return;
        const fetched_piece &fetched = shared.pieces[due_piece];
        work::store(args, fetched, shared.walks[due_piece], state, ends, row_of(fetched, thread), thread % 32);
        __syncwarp();
        shared.fetched.release(due_piece, thread % 32);
        due_piece = -1;
    }
    /* The piece that is due has all its scores; the state becomes that of rows that have seen nothing. */
    __device__ row_ends end_rows(int thread) {
        row_ends ends = {};
        if (due_piece >= 0) {
            const fetched_piece &fetched = shared.pieces[due_piece];
            ends = work::end(args, fetched, shared.walks[due_piece], state, row_of(fetched, thread), thread % 32);
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
            state.max[half] = lowest_max(args.pools.a.scale_log2), state.sum[half] = 0;
        return ends;
    }
    /* Without scores of another piece. */
    __device__ void flush(int thread) {
        if (due_piece < 0) return;
        const row_ends ends = end_rows(thread);
        begin_due<true>(same_in_warp(n - 1));
        end_due<true>(n - 1, thread);
        store_due(ends, thread);
    }

    /* Tile m of a piece, whose walk ends before `end`; of its keys the first N are taken. */
    template <bool FIRST, int N>
    __device__ void step(const query_operand<C, NO_RULES> &q, int at, uint32_t m, uint32_t end, bool is_masked,
                         int thread) {
        const fetched_piece &fetched = shared.pieces[at];
        const typename C::walk &walk = shared.walks[at];
        float s[N / 2], keep[2];
        row_ends ends = {};
        typename work::looked_up seen = {};
        if (is_masked) seen = work::look_up(args, fetched, walk, end - 1 - m, row_of(fetched, thread), thread % 32);
        shared.k.wait_full(m);
        if (C::TURNS && !FIRST) take_turn(consumer); /* who ends a piece does not keep the other waiting */
        begin_scores<C, NO_RULES>(s, q, k_tile(m));
        begin_due<FIRST>(m - 1);
        if (C::TURNS && !FIRST) pass_turn(consumer);
        wgmma_wait<1>();
        wgmma_hold(s);
        shared.k.release(m, thread % 32);
        if (FIRST) ends = end_rows(thread);
        if (is_masked) work::hide(s, args, fetched, walk, seen, end - 1 - m, row_of(fetched, thread), thread % 32);
        const bool grown = lagging_softmax<C>(s, state, keep, args.pools.a.scale_log2);
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], tiles);
        end_due<FIRST>(m - 1, thread);
        if (!FIRST && grown) rescale<C>(state, keep);
        pack_probabilities<C>(*(uint32_t(*)[N / 16][4])p, s);
#pragma unroll
        for (int k = N / 16; k < C::KEYS / 16; k++) p[k][0] = p[k][1] = p[k][2] = p[k][3] = 0;
        if (!FIRST) return;
        store_due(ends, thread); /* when the scores take half of their registers */
        clear_values(state);
    }

    /* The tiles of a piece that has some, the last keys first. */
    __device__ void attend(int at, int thread) {
        const fetched_piece &fetched = shared.pieces[at];
        const cpa_cuda_piece &piece = fetched.piece;
        const typename C::walk &walk = shared.walks[at];
        const int lane = thread % 32;
        ring_barriers<C::Q_STAGES> &q_ring = shared.q[consumer];
        q_ring.wait_full(taken);
        const uint32_t begin = same_in_warp(n); /* that they are the same lets descriptors stay in uniform registers */
        const query_operand<C, NO_RULES> q(
            tiles + (consumer * C::Q_STAGES + q_ring.stage(same_in_warp(taken))) * C::Q_BYTES, thread);
        __syncwarp();
        if (C::Q_HELD) q_ring.release(taken++, lane);
        const uint32_t end = same_in_warp(begin + walk.count);
        const typename work::masked_steps is_masked(walk, begin);
        const int last_key = walk.tile(walk.count - 1) * C::KEYS;
        if (C::FEW_KEYS < C::KEYS && same_in_warp(walk.high.end - last_key) <= C::FEW_KEYS) {
            step<true, C::FEW_KEYS>(q, at, begin, end, true, thread);
        } else {
            step<true, C::KEYS>(q, at, begin, end, is_masked(begin), thread);
        }
        due_piece = at;
        if (piece.k_end - last_key < C::KEYS) {
            shared.v.wait_full(begin);
            clear_values<C>(v_tile(begin), piece.k_end - last_key, thread);
            async_proxy_fence();
            named_sync(1 + consumer, WARPGROUP);
        }
        for (uint32_t m = begin + 1; m != end; m++) step<false, C::KEYS>(q, at, m, end, is_masked(m), thread);
        if (!C::Q_HELD) q_ring.release(taken++, lane);
        n = end;
    }

    /* A piece of which no row sees a key. */
    __device__ void store_nothing(int at, int thread) {
        const fetched_piece &fetched = shared.pieces[at];
        const int lane = thread % 32, row = row_of(fetched, thread);
        clear_state<C>(state, args.pools.a.scale_log2);
        shared.q[consumer].wait_full(taken);
        __syncwarp();
        shared.q[consumer].release(taken++, lane);
        typename C::walk &walk = shared.walks[at];
        work::store(args, fetched, walk, state, work::end(args, fetched, walk, state, row, lane), row, lane);
        __syncwarp();
        shared.fetched.release(at, lane);
    }
};

/* All pieces of the CTA. */
template <typename C>
__device__ void take_pieces(const typename C::args &args, persistent_shared<C> &shared, uint32_t tiles, int consumer,
                            int thread) {
    tile_flow<C> flow(args, shared, tiles, consumer);
    if (C::TURNS && consumer == 1) pass_turn(consumer);
    for (uint32_t n = 0;; n++) {
        const int at = n % C::PIECES;
        asm volatile("" : "+r"(thread)); /* nothing that follows from it is kept from piece to piece: registers are few */
        shared.fetched.wait_full(n);
        if (shared.pieces[at].none_left) break;
        if (same_in_warp(shared.walks[at].count) > 0) {
            flow.attend(at, thread);
        } else {
            flow.flush(thread);
            flow.store_nothing(at, thread);
        }
    }
    flow.flush(thread);
    if (C::TURNS && consumer == 0) take_turn(consumer); /* as often as the other has passed it */
}

} // namespace

#endif
