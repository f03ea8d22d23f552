/* What the warps of the Hopper kernel do that leaves out tiles of keys (attend_hopper_skip.cu). */
#ifndef CPA_CUDA_HOPPER_SKIP_CUH
#define CPA_CUDA_HOPPER_SKIP_CUH

#include "kernels/cuda/attend/attend_skip.h"
#include "kernels/cuda/attend/hopper_rows.cuh"
#include "kernels/cuda/attend/persistent_loads.cuh"
#include "kernels/cuda/attend/skip_votes.cuh"

namespace {

template <typename Element>
struct skip_config : config<Element, SQUARE, BOXES, false> {
    using base = config<Element, SQUARE, BOXES, false>;
    static constexpr int RING = 3, V_AT = base::K_AT + RING * base::K_BYTES;
    static constexpr int SHARED_BYTES = V_AT + RING * base::V_BYTES + TILE_ALIGNMENT;
    static constexpr int LOADER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static constexpr int CONSUMER_WARPS = base::CONSUMERS * WARPGROUP / 32;
};

struct skip_args {
    hopper_args pools;
    cpa_cuda_tile_skip skip;
};

template <typename C>
struct skip_shared {
    cpa_cuda_piece piece;
    key_walk<C::KEYS> walk;
    ring_barriers<C::RING> k, v;
    group_votes votes[C::CONSUMERS];

    /* Called by one thread. */
    __device__ void start() {
        k.start(C::CONSUMER_WARPS);
        v.start(C::CONSUMER_WARPS);
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++) votes[consumer].start();
    }
};

/* All tiles of keys, or those of values that are wanted, the last ones first: a lane copies the box from `row` on. The
 * stage of a tile of values that nobody wants is full as it is. */
template <typename C, cpa_kv_part PART>
__device__ void copy_tiles(const hopper_args &args, const CUtensorMap *map, skip_shared<C> &shared,
                           ring_barriers<C::RING> &ring, int kv_head, uint32_t tiles, int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_DIM, BYTES = C::KEYS * DIM * 2;
    const int count = shared.walk.count, row = lane * args.box;
    heard_votes votes = {shared.votes};
    for (int n = 0; n < count; n++) {
        const int tile = shared.walk.tile(count - 1 - n);
        const box_place place = place_of<C>(args, shared.piece, shared.piece.k_end, tile, row);
        const uint32_t barrier = ring.full_at(n), to = tiles + ring.stage(n) * BYTES;
        ring.wait_empty(n);
        if (PART == CPA_VALUES && !votes.wants(n, count)) {
            __syncwarp();
            if (lane == 0) barrier_arrive(barrier);
            continue;
        }
        if (lane == 0) barrier_expect(barrier, BYTES);
        __syncwarp();
        if (row < C::KEYS) {
#pragma unroll
            for (int part = 0; part < DIM / COLUMNS; part++)
                copy_box(to + (part * C::KEYS + row) * COLUMNS * 2, map, barrier, part * COLUMNS, place.token, kv_head,
                         place.block);
        }
        __syncwarp();
    }
}

/* The way of one of two warpgroups, which take turns, through the tiles of a piece, the last keys first. The values of
 * a tile are multiplied while the scores of the next are, if the warpgroup has kept it; the first and the last are. */
template <typename C>
struct skip_flow {
    const skip_args &args;
    skip_shared<C> &shared;
    group_votes &votes;
    const uint32_t tiles;
    const int consumer, thread, first_row;
    thread_state<C> state; /* whose `top` leads, where max lags */
    uint32_t p[C::KEYS / 16][4];
    int skipped = 0;
    int resting = 0;          /* spans in which no tile is left out, from this one on */
    bool has_left_out = true; /* tiles of the span of the tile before might be */

    __device__ skip_flow(const skip_args &all, skip_shared<C> &memory, uint32_t at, int number, int in_warpgroup)
        : args(all), shared(memory), votes(memory.votes[number]), tiles(at), consumer(number), thread(in_warpgroup),
          first_row(memory.piece.row_begin + number * GROUP_ROWS) {
        const cpa_cuda_attend_args &a = all.pools.a;
        clear_state<C>(state, a.scale_log2);
#pragma unroll
        for (int half = 0; half < 2; half++)
            state.keys[half] = shared.walk.keys_of(a, shared.piece, row_of_thread() + 8 * half);
    }
    __device__ int row_of_thread() const { return first_row + thread / 32 * 16 + thread % 32 / 4; }
    __device__ uint32_t k_tile(int n) const { return tiles + C::K_AT + shared.k.stage(n) * C::K_BYTES; }
    __device__ uint32_t v_tile(int n) const { return tiles + C::V_AT + shared.v.stage(n) * C::V_BYTES; }
    __device__ void mask(float (&s)[C::KEYS / 2], int n) {
        const key_walk<C::KEYS> &walk = shared.walk;
        mask_scores<C>(s, state, walk.sinks, walk.tile(walk.count - 1 - n) * C::KEYS + 2 * (thread % 4));
    }

    /* The first tile. */
    __device__ void first(const query_operand<C, NO_RULES> &q, bool is_masked) {
        float s[C::KEYS / 2], keep[2];
        shared.k.wait_full(0);
        begin_scores<C, NO_RULES>(s, q, k_tile(0));
        wgmma_wait<0>();
        wgmma_hold(s);
        shared.k.release(0, thread % 32);
        if (is_masked) mask(s, 0);
        (void)lagging_softmax<C>(s, state, keep, args.pools.a.scale_log2);
        pack_probabilities<C>(p, s);
#pragma unroll
        for (int half = 0; half < 2; half++) /* rows that are none are never in the way */
            state.top[half] = row_of_thread() + 8 * half < shared.piece.row_end ? state.max[half] : INFINITY;
        if (thread % 32 == 0) votes.vote(0, thread / 32, true);
    }

    /* Scores become probabilities. Returns whether O has to be rescaled by `keep`. */
    __device__ bool softmax(float (&s)[C::KEYS / 2], const float (&largest)[2], float (&keep)[2]) {
        float max[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.top[half] = fmaxf(state.top[half], largest[half]);
            max[half] = fmaxf(state.max[half], largest[half]);
        }
        return lagging_softmax<C>(s, state, max, keep, args.pools.a.scale_log2);
    }
    /* Gives the values of tile n back, loaded or not; two tiles later, when both warpgroups have voted on it and the
     * loader is not waited for. */
    __device__ void retire(int n) {
        shared.v.wait_full(n);
        __syncwarp();
        shared.v.release(n, thread % 32);
    }

    /* Tile n, not the first. may: be left out. */
    __device__ void step(const query_operand<C, NO_RULES> &q, int n, bool may, bool is_masked, bool passes) {
        float s[C::KEYS / 2], keep[2], largest[2] = {-INFINITY, -INFINITY};
        bool grown = false;
        shared.k.wait_full(n);
        take_turn(consumer);
        const bool due = votes.kept(n - 1); /* all warps have met behind their votes */
        skipped += !due;
        begin_scores<C, NO_RULES>(s, q, k_tile(n));
        if (due) {
            shared.v.wait_full(n - 1);
            begin_values<C>(state, p, v_tile(n - 1));
        } else {
            wgmma_fence();
            wgmma_commit(); /* of nothing */
        }
        if (passes) pass_turn(consumer);
        wgmma_wait<1>();
        wgmma_hold(s);
        shared.k.release(n, thread % 32);
        if (is_masked) mask(s, n);
        raise_to_scores(largest, s);
        const bool left_out = may && __all_sync(0xffffffff, largest[0] < state.top[0] - args.skip.below &&
                                                                largest[1] < state.top[1] - args.skip.below);
        if (thread % 32 == 0) votes.vote(n, thread / 32, !left_out);
        if (!left_out) {
#pragma unroll
            for (int half = 0; half < 2; half++) largest[half] = quad_max(largest[half]);
            grown = softmax(s, largest, keep);
        }
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], tiles);
        wgmma_wait<0>();
        hold_values<C>(state);
        if (n > 1) retire(n - 2);
        if (left_out) {
#pragma unroll
            for (int k = 0; k < C::KEYS / 16; k++) p[k][0] = p[k][1] = p[k][2] = p[k][3] = 0;
        } else {
            if (grown) rescale<C>(state, keep);
            pack_probabilities<C>(p, s);
        }
    }
    /* The same where neither the tile may be left out, nor the one before might, and rows see all keys. */
    __device__ void step_over_all(const query_operand<C, NO_RULES> &q, int n, bool passes) {
        float s[C::KEYS / 2], keep[2];
        shared.k.wait_full(n);
        take_turn(consumer);
        begin_scores<C, NO_RULES>(s, q, k_tile(n));
        shared.v.wait_full(n - 1);
        begin_values<C>(state, p, v_tile(n - 1));
        if (passes) pass_turn(consumer);
        wgmma_wait<1>();
        wgmma_hold(s);
        shared.k.release(n, thread % 32);
        if (thread % 32 == 0) votes.vote(n, thread / 32, true);
        const bool grown = lagging_softmax<C>(s, state, keep, args.pools.a.scale_log2);
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], tiles);
        wgmma_wait<0>();
        hold_values<C>(state);
        retire(n - 2);
        if (grown) rescale<C>(state, keep);
        pack_probabilities<C>(p, s);
    }
    /* The one or the other. */
    __device__ void take(const query_operand<C, NO_RULES> &q, int n, int count, bool is_masked) {
        const bool passes = consumer == 0 || n + 1 < count;
        if (n % SPAN == 0) {
            if (resting > 0) {
                resting--;
#pragma unroll
                for (int half = 0; half < 2; half++) state.top[half] = fmaxf(state.top[half], state.max[half]);
            } else if (!votes.have_left_out(n)) {
                resting = REST;
            }
        }
        if (resting > 0 && !has_left_out && !is_masked) {
            step_over_all(q, n, passes);
        } else {
            step(q, n, resting == 0 && n + 1 < count, is_masked, passes);
        }
        has_left_out = resting == 0;
    }

    /* All tiles of a piece that has some; the queries are in shared memory. */
    __device__ void attend() {
        const key_walk<C::KEYS> &walk = shared.walk;
        const query_operand<C, NO_RULES> q(tiles + consumer * C::Q_BYTES, thread);
        const row_keys full = walk.full_steps();
        const int count = same_in_warp(walk.count);
        const int keys = shared.piece.k_end - walk.tile(count - 1) * C::KEYS;
        auto is_masked = [&](int n) { return n < full.first || n >= full.end; };
        first(q, is_masked(0));
        if (keys < C::KEYS) {
            shared.v.wait_full(0);
            clear_values<C>(v_tile(0), keys, thread);
            async_proxy_fence();
            named_sync(1 + consumer, WARPGROUP);
        }
        if (consumer == 1 && count > 1) pass_turn(consumer);
        for (int n = 1; n < count; n++) take(q, n, count, is_masked(n));
        shared.v.wait_full(count - 1);
        begin_values<C>(state, p, v_tile(count - 1));
        wgmma_wait<0>();
        hold_values<C>(state);
        if (count > 1) shared.v.wait_full(count - 2); /* they may be on their way, and no CTA ends before */
        count_tiles(count);
    }
    /* To the caller's counts, by one thread of a warpgroup that has rows. */
    __device__ void count_tiles(int count) const {
        if (!args.skip.counts || thread != 0 || first_row >= shared.piece.row_end) return;
        atomicAdd(&args.skip.counts[0], (unsigned long long)count);
        atomicAdd(&args.skip.counts[1], (unsigned long long)skipped);
    }
};

} // namespace

#endif
