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

/* When a warpgroup asks for the values of a tile, or says that it does not want them, it is done with those of the tile
 * four before it: so many places are enough. */
constexpr int ASKS = 4;

template <typename C>
struct skip_shared {
    cpa_cuda_piece piece;
    key_walk<C::KEYS> walk;
    ring_barriers<C::RING> k, v;
    uint64_t asked[C::CONSUMERS][ASKS];
    int32_t wanted[C::CONSUMERS][ASKS];

    /* Called by one thread. */
    __device__ void start() {
        k.start(C::CONSUMER_WARPS);
        v.start(C::CONSUMER_WARPS);
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++)
            for (int i = 0; i < ASKS; i++) barrier_init(shared_address(&asked[consumer][i]), 1);
    }
    /* Called by one thread of the warpgroup. */
    __device__ void ask(int consumer, int n, bool wants) {
        wanted[consumer][n % ASKS] = wants;
        barrier_arrive(shared_address(&asked[consumer][n % ASKS]));
    }
    /* Whether one wants the values of the n-th tile; none is waited for that does not matter any more. */
    __device__ bool is_wanted(int n) {
        bool wants = false;
        for (int consumer = 0; consumer < C::CONSUMERS && !wants; consumer++) {
            barrier_wait(shared_address(&asked[consumer][n % ASKS]), phase_of<ASKS>(n));
            wants = wanted[consumer][n % ASKS];
        }
        return wants;
    }
};

/* All tiles of keys, or those of values that are wanted, the last ones first: a lane copies the box from `row` on. The
 * stage of a tile of values that nobody wants is full as it is. */
template <typename C, cpa_kv_part PART>
__device__ void copy_tiles(const hopper_args &args, const CUtensorMap *map, skip_shared<C> &shared,
                           ring_barriers<C::RING> &ring, int kv_head, uint32_t tiles, int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_DIM, BYTES = C::KEYS * DIM * 2;
    const int count = shared.walk.count, row = lane * args.box;
    for (int n = 0; n < count; n++) {
        const box_place place = place_of<C>(args, shared.piece, shared.piece.k_end, shared.walk.tile(count - 1 - n), row);
        const uint32_t barrier = ring.full_at(n), to = tiles + ring.stage(n) * BYTES;
        ring.wait_empty(n);
        if (PART == CPA_VALUES && !shared.is_wanted(n)) {
            __syncwarp(); /* all have read what was wanted */
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

/* Whether the phase of that parity has ended (hopper.cuh), without waiting for it. */
__device__ inline bool barrier_is_over(uint32_t barrier, uint32_t parity) {
    int over;
    asm volatile("{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.s32 %0, 1, 0, done; }"
                 : "=r"(over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return over;
}

/* Whether it holds for all threads of the warpgroup that has the barrier. */
__device__ inline bool all_of_warpgroup(bool holds, int barrier) {
    int all;
    asm volatile(
        "{ .reg .pred mine, every; setp.ne.s32 mine, %1, 0; bar.red.and.pred every, %2, %3, mine; "
        "selp.s32 %0, 1, 0, every; }"
        : "=r"(all)
        : "r"((int)holds), "r"(barrier), "n"(WARPGROUP)
        : "memory");
    return same_in_warp(all);
}

/* The way of one of two warpgroups, which take turns, through the tiles of a piece, the last keys first. */
template <typename C>
struct skip_flow {
    static constexpr int NONE = -1, LEAST_STREAK = 3;
    const skip_args &args;
    skip_shared<C> &shared;
    const uint32_t tiles;
    const int consumer, thread, first_row;
    thread_state<C> state; /* whose `top` leads, where max lags */
    uint32_t p[C::KEYS / 16][4];
    int due = NONE;  /* the tile whose probabilities are in p, and whose values are still to be multiplied */
    int asked = 0;   /* tiles whose values were asked for, or not wanted */
    int streak = 0;  /* tiles that were kept since one was left out */
    int retired = 0; /* tiles whose values this warpgroup is done with */
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

    /* Says whether the values of tile n are wanted, unless that has been said; behind several tiles that were kept it asks
     * for those of the next one too, which are there in time then if that is kept as well. */
    __device__ void ask(int n, int count, bool wants) {
        const bool ahead = wants && streak >= LEAST_STREAK && n + 1 < count;
        if (thread == 0) {
            if (asked <= n) shared.ask(consumer, n, wants);
            if (ahead) shared.ask(consumer, n + 1, true);
        }
        asked = n + (ahead ? 2 : 1);
        streak = wants ? streak + 1 : 0;
    }
    /* Whether the values that are due are to be multiplied behind the scores of tile n: when they are there for all
     * threads, or have waited for long enough. */
    __device__ bool is_in_turn(int n) const {
        if (due == NONE) return false;
        return due + 2 <= n || all_of_warpgroup(barrier_is_over(shared.v.full_at(due), shared.v.phase(due)), 1 + consumer);
    }

    /* The values that are due, begun; and their end. */
    __device__ void begin_due() {
        shared.v.wait_full(due);
        const int keys = shared.piece.k_end - key_of(0);
        if (due == 0 && keys < C::KEYS) {
            clear_values<C>(v_tile(0), keys, thread);
            async_proxy_fence();
            named_sync(1 + consumer, WARPGROUP);
        }
        begin_values<C>(state, p, v_tile(due));
    }
    __device__ void end_due() {
        pin_before_wait(state.sum[0] + state.sum[1], tiles);
        wgmma_wait<0>();
        hold_values<C>(state);
        due = NONE;
    }
    /* Gives the values of the tiles before `end` back. */
    __device__ void retire(int end) {
        for (; retired < end; retired++) {
            shared.v.wait_full(retired);
            __syncwarp();
            shared.v.release(retired, thread % 32);
        }
    }

    /* Whether the tile cannot matter to any row; largest: of what the thread has of each row. */
    __device__ bool is_below(const float (&largest)[2]) const {
        const bool below = largest[0] < state.top[0] - args.skip.below && largest[1] < state.top[1] - args.skip.below;
        return all_of_warpgroup(below, 1 + consumer);
    }
    /* Scores become probabilities. Returns whether O has to be rescaled by `keep`. */
    __device__ bool softmax(float (&s)[C::KEYS / 2], const float (&largest)[2], float (&keep)[2]) {
        float max[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.top[half] = fmaxf(state.top[half], quad_max(largest[half]));
            max[half] = fmaxf(state.max[half], largest[half]);
        }
        const bool grown = lagging_softmax<C>(s, state, max, keep, args.pools.a.scale_log2);
        wgmma_hold(s);
        return grown;
    }

    /* Tile n. IN_TURN: the values that are due are multiplied behind its scores; else, if there are any and the tile is
     * kept, under its exponentials. */
    template <bool IN_TURN>
    __device__ void step(const query_operand<C, NO_RULES> &q, int n, int count, bool is_masked) {
        float s[C::KEYS / 2], keep[2], largest[2] = {-INFINITY, -INFINITY};
        bool grown = false;
        shared.k.wait_full(n);
        take_turn(consumer);
        begin_scores<C, NO_RULES>(s, q, k_tile(n));
        if (IN_TURN) begin_due();
        if (consumer == 0 || n + 1 < count) pass_turn(consumer);
        wgmma_wait<IN_TURN>();
        wgmma_hold(s);
        shared.k.release(n, thread % 32);
        if (is_masked) mask_scores<C>(s, state, shared.walk.sinks, key_of(n) + 2 * (thread % 4));
        raise_to_scores(largest, s);
        const bool below = is_below(largest);
        ask(n, count, !below);
        skipped += below;
        if (IN_TURN) {
            if (!below) grown = softmax(s, largest, keep);
            end_due();
        } else if (!below && due != NONE) {
            begin_due();
            grown = softmax(s, largest, keep);
            end_due();
        } else if (!below) {
            grown = softmax(s, largest, keep);
        }
        if (!below) {
            if (grown) rescale<C>(state, keep);
            pack_probabilities<C>(p, s);
            due = n;
        }
        retire(due == NONE ? n : due);
    }

    /* All tiles of a piece that has some; the queries are in shared memory. */
    __device__ void attend() {
        const key_walk<C::KEYS> &walk = shared.walk;
        const query_operand<C, NO_RULES> q(tiles + consumer * C::Q_BYTES, thread);
        const row_keys full = walk.full_steps();
        const int count = same_in_warp(walk.count);
        if (consumer == 1) pass_turn(consumer);
        for (int n = 0; n < count; n++) {
            const bool is_masked = n < full.first || n >= full.end;
            if (is_in_turn(n)) {
                step<true>(q, n, count, is_masked);
            } else {
                step<false>(q, n, count, is_masked);
            }
        }
        if (due != NONE) {
            begin_due();
            end_due();
        }
        retire(count); /* values that were asked for ahead may still be on their way: no CTA ends before */
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
