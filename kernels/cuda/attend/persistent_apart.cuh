/* What one of three warpgroups of the persistent kernel does: each goes at its own pace. While one begins a piece or stores
 * its rows, the others multiply. */
#ifndef CPA_CUDA_PERSISTENT_APART_CUH
#define CPA_CUDA_PERSISTENT_APART_CUH

#include "kernels/cuda/attend/persistent_rows.cuh"

namespace {

/* All tiles of the piece, `n` and on, for 64 rows from `first_row` on, the last keys first. */
template <typename C>
__device__ void attend_group(const persistent_args &args, const cpa_cuda_piece &piece, const key_walk<C::KEYS> &walk,
                             thread_state<C> &state, persistent_shared<C> &shared, uint32_t tiles, uint32_t n,
                             uint32_t taken, int first_row, int consumer, int thread) {
    const int lane = thread % 32;
    ring_barriers<C::Q_STAGES> &q_ring = shared.q[consumer];
    const uint32_t end = same_in_warp(n + walk.count);
    const query_operand<C, NO_RULES> q(tiles + (consumer * C::Q_STAGES + q_ring.stage(taken)) * C::Q_BYTES, thread);
    const float scale_log2 = args.pools.a.scale_log2;
    float s[C::KEYS / 2], keep[2];
    uint32_t p[C::KEYS / 16][4];
    auto k_tile = [&] { return tiles + C::K_AT + shared.k.stage(n) * C::K_BYTES; };
    auto v_tile = [&](uint32_t m) { return tiles + C::V_AT + shared.v.stage(m) * C::V_BYTES; };
    auto tile_of = [&] { return walk.tile(end - 1 - n); };
    const row_keys full = walk.full_steps();
    const uint32_t full_first = n + full.first, full_end = n + full.end;
    auto mask = [&](auto &scores) {
        if ((int)(n - full_first) >= 0 && (int)(n - full_end) < 0) return;
        hide_unseen(scores, args, piece, tile_of() * C::KEYS, first_row + thread / 32 * 16 + lane / 4, lane);
    };
    auto score = [&](auto &scores) {
        shared.k.wait_full(n);
        begin_scores<C, NO_RULES>(scores, q, k_tile());
        wgmma_wait<0>();
        wgmma_hold(scores);
        shared.k.release(n, lane);
    };
    auto softmax = [&](auto &scores) { return lagging_softmax<C>(scores, state, keep, scale_log2); };
    auto clear = [&](auto rows, int keys) {
        constexpr int ROWS = decltype(rows)::value;
        if (keys >= ROWS) return;
        clear_values<C, ROWS>(v_tile(n), keys, thread);
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
    };

    const int last_keys = piece.k_end - tile_of() * C::KEYS;
    bool is_first = true;
    if (last_keys <= C::FEW_KEYS) {
        float few[C::FEW_KEYS / 2];
        uint32_t p_few[C::FEW_KEYS / 16][4];
        score(few);
        mask(few);
        (void)softmax(few);
        pack_probabilities<C>(p_few, few);
        shared.v.wait_full(n);
        clear(std::integral_constant<int, C::FEW_KEYS>(), last_keys);
        begin_values<C>(state, p_few, v_tile(n));
        wgmma_wait<0>();
        hold_values<C>(state);
        shared.v.release(n, lane);
        if (++n == end) return;
        is_first = false;
    }
    score(s);
    mask(s);
    if (softmax(s)) rescale<C>(state, keep);
    pack_probabilities<C>(p, s);
    if (is_first && last_keys < C::KEYS) {
        shared.v.wait_full(n);
        clear(std::integral_constant<int, C::KEYS>(), last_keys);
    }
    while (++n < end) {
        shared.k.wait_full(n);
        begin_scores<C, NO_RULES>(s, q, k_tile());
        shared.v.wait_full(n - 1);
        begin_values<C>(state, p, v_tile(n - 1));
        wgmma_wait<1>();
        wgmma_hold(s);
        shared.k.release(n, lane);
        mask(s);
        const bool grown = softmax(s);
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], tiles);
        wgmma_wait<0>();
        hold_values<C>(state);
        shared.v.release(n - 1, lane);
        if (grown) rescale<C>(state, keep);
        pack_probabilities<C>(p, s);
    }
    shared.v.wait_full(n - 1);
    begin_values<C>(state, p, v_tile(n - 1));
    wgmma_wait<0>();
    hold_values<C>(state);
    shared.v.release(n - 1, lane);
}

/* Passes the tiles of a piece over, `n` and on. */
template <typename C>
__device__ void skip_tiles(persistent_shared<C> &shared, uint32_t n, int count, int lane) {
    for (const uint32_t end = n + count; n != end; n++) {
        shared.k.wait_full(n);
        shared.k.release(n, lane);
        shared.v.wait_full(n);
        shared.v.release(n, lane);
    }
}

/* All pieces of the CTA. */
template <typename C>
__device__ void take_pieces_apart(const persistent_args &args, persistent_shared<C> &shared, uint32_t tiles, int consumer,
                        int in_warpgroup) {
    uint32_t n = 0, taken = 0; /* tiles, and pieces with rows for it */
    for_pieces(shared, in_warpgroup % 32, [&](const fetched_piece &fetched, const key_walk<C::KEYS> &walk) {
        int thread = in_warpgroup; /* nothing that follows from it is kept from piece to piece: registers are few */
        asm volatile("" : "+r"(thread));
        const int lane = thread % 32;
        const int first_row = fetched.piece.row_begin + group_of<C>(fetched, consumer) * GROUP_ROWS;
        if (first_row >= fetched.piece.row_end) {
            skip_tiles(shared, n, walk.count, lane);
        } else {
            thread_state<C> state;
            clear_state<C>(state, args.pools.a.scale_log2);
            shared.q[consumer].wait_full(taken);
            if (walk.count > 0)
                attend_group<C>(args, fetched.piece, walk, state, shared, tiles, same_in_warp(n), same_in_warp(taken),
                                first_row, consumer, thread);
            shared.q[consumer].release(taken++, lane);
            const int row = first_row + thread / 32 * 16 + lane / 4;
            store_rows<C>(args, fetched, state, store_lses<C>(args, fetched, state, row, lane), row, lane);
        }
        n += walk.count;
    });
}

} // namespace

#endif
