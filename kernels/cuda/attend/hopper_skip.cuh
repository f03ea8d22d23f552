/* What the warps of the Hopper kernel do that leaves out tiles of keys (attend_hopper_skip.cu). */
#ifndef CPA_CUDA_HOPPER_SKIP_CUH
#define CPA_CUDA_HOPPER_SKIP_CUH

#include <float.h>

#include "kernels/cuda/attend/attend_skip.h"
#include "kernels/cuda/attend/hopper_rows.cuh"
#include "kernels/cuda/attend/persistent_loads.cuh"

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

/* When a warpgroup votes on a tile, the loader has heard the votes on the one that is so many before it. */
constexpr int VOTES = 8;
/* Values are loaded before the votes on their tile are known if a warpgroup has kept so many tiles, of those up to two
 * before it, without leaving one out. */
constexpr uint32_t STREAK = 2;

template <typename C>
struct skip_shared {
    cpa_cuda_piece piece;
    key_walk<C::KEYS> walk;
    ring_barriers<C::RING> k, v;
    uint64_t voted[C::CONSUMERS][VOTES];
    uint32_t votes[C::CONSUMERS][VOTES]; /* a byte of each warp: whether it keeps the tile */

    /* Called by one thread. */
    __device__ void start() {
        k.start(C::CONSUMER_WARPS);
        v.start(C::CONSUMER_WARPS);
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++)
            for (int i = 0; i < VOTES; i++) barrier_init(shared_address(&voted[consumer][i]), WARPGROUP / 32);
    }
    /* Called by one thread of each warp. */
    __device__ void vote(int consumer, int warp, int n, bool keeps) {
        ((uint8_t *)&votes[consumer][n % VOTES])[warp] = keeps;
        barrier_arrive(shared_address(&voted[consumer][n % VOTES]));
    }
    /* Whether some warp of the warpgroup keeps the n-th tile, when all have voted. */
    __device__ bool keeps(int consumer, int n) { return same_in_warp(votes[consumer][n % VOTES]) != 0; }
    /* The same for the loader, which waits for that. */
    __device__ bool hear(int consumer, int n) {
        barrier_wait(shared_address(&voted[consumer][n % VOTES]), phase_of<VOTES>(n));
        return keeps(consumer, n);
    }
};

/* What the loader knows of the votes: which values it is to load. */
template <typename C>
struct heard_votes {
    skip_shared<C> &shared;
    uint32_t streaks[C::CONSUMERS] = {}; /* tiles that each has kept since it left one out */
    int heard = 0;

    /* No vote is waited for that does not matter any more. */
    __device__ bool wants(int n) {
        for (; heard < n - 1; heard++)
            for (int consumer = 0; consumer < C::CONSUMERS; consumer++)
                streaks[consumer] = shared.hear(consumer, heard) ? streaks[consumer] + 1 : 0;
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++)
            if (streaks[consumer] >= STREAK) return true;
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++)
            if (shared.hear(consumer, n)) return true;
        return false;
    }
};

/* All tiles of keys, or those of values that are wanted, the last ones first: a lane copies the box from `row` on. The
 * stage of a tile of values that nobody wants is full as it is. */
template <typename C, cpa_kv_part PART>
__device__ void copy_tiles(const hopper_args &args, const CUtensorMap *map, skip_shared<C> &shared,
                           ring_barriers<C::RING> &ring, int kv_head, uint32_t tiles, int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_DIM, BYTES = C::KEYS * DIM * 2;
    const int count = shared.walk.count, row = lane * args.box;
    heard_votes<C> votes = {shared};
    for (int n = 0; n < count; n++) {
        const box_place place = place_of<C>(args, shared.piece, shared.piece.k_end, shared.walk.tile(count - 1 - n), row);
        const uint32_t barrier = ring.full_at(n), to = tiles + ring.stage(n) * BYTES;
        ring.wait_empty(n);
        if (PART == CPA_VALUES && !votes.wants(n)) {
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

/* The way of one of two warpgroups, which take turns, through the tiles of a piece, the last keys first. */
template <typename C>
struct skip_flow {
    const skip_args &args;
    skip_shared<C> &shared;
    const uint32_t tiles;
    const int consumer, thread, first_row;
    thread_state<C> state; /* whose `top` leads, where max lags */
    uint32_t p[C::KEYS / 16][4];
    int skipped = 0;

    __device__ skip_flow(const skip_args &all, skip_shared<C> &memory, uint32_t at, int number, int in_warpgroup)
        : args(all), shared(memory), tiles(at), consumer(number), thread(in_warpgroup),
          first_row(memory.piece.row_begin + number * GROUP_ROWS) {
        const cpa_cuda_attend_args &a = all.pools.a;
        clear_state<C>(state, a.scale_log2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row_of_thread() + 8 * half;
            state.keys[half] = shared.walk.keys_of(a, shared.piece, row);
            state.top[half] = row < shared.piece.row_end ? -FLT_MAX : INFINITY; /* the latter is never in the way */
        }
    }
    __device__ int row_of_thread() const { return first_row + thread / 32 * 16 + thread % 32 / 4; }
    __device__ uint32_t k_tile(int n) const { return tiles + C::K_AT + shared.k.stage(n) * C::K_BYTES; }
    __device__ uint32_t v_tile(int n) const { return tiles + C::V_AT + shared.v.stage(n) * C::V_BYTES; }
    __device__ int key_of(int n) const { return shared.walk.tile(shared.walk.count - 1 - n) * C::KEYS; }

    /* The product with the values of tile n, begun. */
    __device__ void begin_product(int n) {
        shared.v.wait_full(n);
        const int keys = shared.piece.k_end - key_of(0);
        if (n == 0 && keys < C::KEYS) {
            clear_values<C>(v_tile(0), keys, thread);
            async_proxy_fence();
            named_sync(1 + consumer, WARPGROUP);
        }
        begin_values<C>(state, p, v_tile(n));
    }
    /* Gives the values of tile n back, loaded or not; two tiles later, when both warpgroups have voted on it and the
     * loader is not waited for. */
    __device__ void retire(int n) {
        shared.v.wait_full(n);
        __syncwarp();
        shared.v.release(n, thread % 32);
    }
    /* Whether tile n was kept, when all warps have met behind their votes. */
    __device__ bool was_kept(int n) {
        const bool kept = shared.keeps(consumer, n);
        skipped += !kept;
        return kept;
    }

    /* Whether the tile cannot matter to any row of the warp; largest: of what the thread has of each row. */
    __device__ bool is_below(const float (&largest)[2]) const {
        return __all_sync(0xffffffff, largest[0] < state.top[0] - args.skip.below &&
                                          largest[1] < state.top[1] - args.skip.below);
    }
    /* Scores become probabilities. Returns whether O has to be rescaled by `keep`. */
    __device__ bool softmax(float (&s)[C::KEYS / 2], const float (&largest)[2], float (&keep)[2]) {
        float max[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.top[half] = fmaxf(state.top[half], quad_max(largest[half]));
            max[half] = fmaxf(state.max[half], largest[half]);
        }
        return lagging_softmax<C>(s, state, max, keep, args.pools.a.scale_log2);
    }

    /* Tile n, and behind its scores the product with the values of the one before, if that was kept. */
    __device__ void step(const query_operand<C, NO_RULES> &q, int n, int count, bool is_masked) {
        float s[C::KEYS / 2], keep[2], largest[2] = {-INFINITY, -INFINITY};
        bool grown = false;
        shared.k.wait_full(n);
        take_turn(consumer);
        const bool due = n > 0 && was_kept(n - 1);
        begin_scores<C, NO_RULES>(s, q, k_tile(n));
        if (due) {
            begin_product(n - 1);
        } else {
            wgmma_commit(); /* of nothing */
        }
        if (consumer == 0 || n + 1 < count) pass_turn(consumer);
        wgmma_wait<1>();
        wgmma_hold(s);
        shared.k.release(n, thread % 32);
        if (is_masked) mask_scores<C>(s, state, shared.walk.sinks, key_of(n) + 2 * (thread % 4));
        raise_to_scores(largest, s);
        const bool below = is_below(largest);
        if (thread % 32 == 0) shared.vote(consumer, thread / 32, n, !below);
        if (!below) grown = softmax(s, largest, keep);
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], tiles);
        wgmma_wait<0>();
        hold_values<C>(state);
        if (n >= 2) retire(n - 2);
        if (below) {
#pragma unroll
            for (int k = 0; k < C::KEYS / 16; k++) p[k][0] = p[k][1] = p[k][2] = p[k][3] = 0;
        } else {
            if (grown) rescale<C>(state, keep);
            pack_probabilities<C>(p, s);
        }
    }

    /* All tiles of a piece that has some; the queries are in shared memory. */
    __device__ void attend() {
        const key_walk<C::KEYS> &walk = shared.walk;
        const query_operand<C, NO_RULES> q(tiles + consumer * C::Q_BYTES, thread);
        const row_keys full = walk.full_steps();
        const int count = same_in_warp(walk.count);
        if (consumer == 1) pass_turn(consumer);
        for (int n = 0; n < count; n++) step(q, n, count, n < full.first || n >= full.end);
        named_sync(1 + consumer, WARPGROUP);
        if (was_kept(count - 1)) {
            begin_product(count - 1);
            wgmma_wait<0>();
            hold_values<C>(state);
        }
        /* Values that were loaded early may still be on their way: no CTA ends before. */
        for (int n = max(count - 2, 0); n < count; n++) retire(n);
    }
    /* To the caller's counts, by one thread of a warpgroup that has rows. */
    __device__ void count_tiles() const {
        if (!args.skip.counts || thread != 0 || first_row >= shared.piece.row_end) return;
        atomicAdd(&args.skip.counts[0], (unsigned long long)shared.walk.count);
        atomicAdd(&args.skip.counts[1], (unsigned long long)skipped);
    }
};

} // namespace

#endif
