/* What feeds the warpgroups of the persistent kernel: its configurations, the rings that they take from, and the warps that
 * fetch pieces and copy queries, keys and values. */
#ifndef CPA_CUDA_PERSISTENT_LOADS_CUH
#define CPA_CUDA_PERSISTENT_LOADS_CUH

#include <type_traits>

#include "kernels/cuda/attend/hopper_loads.cuh"

namespace {

template <typename C>
struct packed_work; /* persistent_rows.cuh */

struct persistent_args {
    hopper_args pools;
    CUtensorMap q, q_tail;
    uint32_t *tickets;   /* pieces that have been fetched beside the first of each CTA; 0 between launches */
    int32_t total;       /* pieces of all KV heads */
    int32_t group_shift; /* log2(group) */
};

template <typename Element, int Shape>
struct persistent_config : config<Element, Shape, BOXES, false> {
    using base = config<Element, Shape, BOXES, false>;
    using args = persistent_args;
    using walk = key_walk<base::KEYS>;
    using work = packed_work<persistent_config>; /* which pieces there are, what their rows see, where these go */
    static constexpr int PIECES = 4;             /* that a CTA has fetched, if they are short */
    /* Queries that are all in registers give their stage back at once. */
    static constexpr bool Q_HELD = base::REGISTER_STEPS * 16 == base::K_DIM;
    static constexpr int Q_STAGES = Q_HELD ? 1 : 2, K_AT = base::CONSUMERS * Q_STAGES * base::Q_BYTES;
    static constexpr int KV_STAGES = (MOST_TILE_BYTES - K_AT) / (base::K_BYTES + base::V_BYTES);
    static constexpr int V_AT = K_AT + KV_STAGES * base::K_BYTES;
    static constexpr int SHARED_BYTES = V_AT + KV_STAGES * base::V_BYTES + TILE_ALIGNMENT;
    static constexpr int LOADER_REGISTERS = base::CONSUMERS == 3 ? 32 : 40,
                         CONSUMER_REGISTERS = base::CONSUMERS == 3 ? 160 : 232;
    static constexpr int CONSUMER_WARPS = base::CONSUMERS * WARPGROUP / 32;
    /* The first tile of a piece, which has its last keys, often has few: so many or fewer take smaller products. */
    static constexpr int FEW_KEYS = 80;
};

/* The stages of a ring of N, for what is counted from 0: full when the bytes are there, empty when all readers are done
 * with them. */
template <int N>
struct ring_barriers {
    uint64_t full[N], empty[N];

    __device__ void start(int readers) {
        for (int i = 0; i < N; i++) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), readers);
        }
    }
    static __device__ uint32_t stage(uint32_t n) { return n % N; }
    static __device__ uint32_t phase(uint32_t n) { return n / N & 1; }
    __device__ uint32_t full_at(uint32_t n) { return shared_address(&full[stage(n)]); }
    __device__ void wait_full(uint32_t n) { barrier_wait(full_at(n), phase(n)); }
    __device__ void wait_empty(uint32_t n) { barrier_wait(shared_address(&empty[stage(n)]), phase(n) ^ 1); }
    /* By each warp that reads, behind a __syncwarp: that orders what all lanes have read before the arrival of one, which
     * the next to write waits for. racecheck follows the barrier by the lane that arrives alone, and reports the others'
     * reads of `pieces` as hazards with the writes behind them. */
    __device__ void release(uint32_t n, int lane) {
        if (lane == 0) barrier_arrive(shared_address(&empty[stage(n)]));
    }
};

struct fetched_piece {
    cpa_cuda_piece piece;
    /* KV head; the first query head; the consumer of the piece's first rows, which the others follow in turn. */
    int32_t kv_head, head, first_consumer;
    int32_t none_left; /* not 0: there was no piece left to fetch */
};

template <typename C>
struct persistent_shared {
    fetched_piece pieces[C::PIECES];
    typename C::walk walks[C::PIECES];
    ring_barriers<C::PIECES> fetched;
    uint64_t copied; /* the keys of a piece are on their way: it is time to fetch the next */
    ring_barriers<C::Q_STAGES> q[C::CONSUMERS];
    ring_barriers<C::KV_STAGES> k, v;
};

/* The rows of a piece that a consumer takes, counted by 64s; it may have no such rows. Two go together. */
template <typename C>
__device__ int group_of(const fetched_piece &fetched, int consumer) {
    return C::CONSUMERS == 2 ? consumer : (consumer + C::CONSUMERS - fetched.first_consumer) % C::CONSUMERS;
}

/* The keys of a packed row, of which one rank holds all. */
__device__ row_keys keys_of_packed(const persistent_args &args, const cpa_cuda_piece &piece, int row) {
    const cpa_mask &mask = args.pools.a.mask;
    const int64_t at = piece.q_first + (row >> args.group_shift) - piece.k_first, ahead = cpa_mask_ahead(mask),
                  end = piece.k_end;
    return {mask.window > 0 ? (int32_t)min(max(at - mask.window + 1, (int64_t)0), end) : 0,
            ahead > 0 ? (int32_t)min(max(at + ahead, (int64_t)0), end) : piece.k_end};
}

/* A piece is fetched when the keys of the one before are on their way: so late that the last pieces go to those that
 * are first done, and early enough that nobody waits for it. */
template <typename C>
__device__ void fetch_pieces(const persistent_args &args, persistent_shared<C> &shared, int lane) {
    const cpa_cuda_attend_args &a = args.pools.a;
    constexpr int WORDS = sizeof(cpa_cuda_piece) / 4;
    static_assert(WORDS <= 32, "a lane each");
    int ticket = blockIdx.x, first_consumer = 0;
    for (uint32_t n = 0;; n++) {
        fetched_piece &fetched = shared.pieces[n % C::PIECES];
        const bool none_left = ticket >= args.total;
        const cta_work work(a, none_left ? 0 : ticket);
        const uint32_t word = __ldg((const uint32_t *)(a.pieces + work.piece) + min(lane, WORDS - 1));
        shared.fetched.wait_empty(n);
        if (lane < WORDS) ((uint32_t *)&fetched.piece)[lane] = word;
        __syncwarp();
        if (lane == 0) {
            fetched.none_left = none_left;
            fetched.kv_head = work.kv_group;
            fetched.head = work.kv_group << args.group_shift;
            fetched.first_consumer = first_consumer;
        }
        first_consumer += (fetched.piece.row_end - fetched.piece.row_begin + GROUP_ROWS - 1) / GROUP_ROWS;
        first_consumer %= C::CONSUMERS;
        if (lane == 0) {
            key_walk<C::KEYS> &walk = shared.walks[n % C::PIECES];
            walk.low = keys_of_packed(args, fetched.piece, fetched.piece.row_begin);
            walk.high = keys_of_packed(args, fetched.piece, fetched.piece.row_end - 1);
            walk.sinks = 0;
            walk.count_tiles(fetched.piece);
            barrier_arrive(shared.fetched.full_at(n));
        }
        if (none_left) return;
        barrier_wait(shared_address(&shared.copied), n & 1);
        /* Comes back to 0: every CTA asks once in vain. */
        if (lane == 0) ticket = gridDim.x + atomicInc(args.tickets, args.total - 1);
        ticket = same_in_warp(ticket);
    }
}

/* for_pieces(shared, lane, take): take(fetched, walk) of one piece after the other. */
template <typename C, typename Take>
__device__ void for_pieces(persistent_shared<C> &shared, int lane, Take take) {
    for (uint32_t n = 0;; n++) {
        shared.fetched.wait_full(n);
        if (shared.pieces[n % C::PIECES].none_left) return;
        take(shared.pieces[n % C::PIECES], shared.walks[n % C::PIECES]);
        __syncwarp();
        shared.fetched.release(n, lane);
    }
}

/* The queries of each group of 64 rows go to the consumer that takes it. */
template <typename C>
__device__ void copy_queries(const persistent_args &args, persistent_shared<C> &shared, uint32_t tiles, int lane) {
    uint32_t taken[C::CONSUMERS] = {};
    for_pieces(shared, lane, [&](const fetched_piece &fetched, const typename C::walk &) {
#pragma unroll
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++) {
            const int row = fetched.piece.row_begin + group_of<C>(fetched, consumer) * GROUP_ROWS;
            if (row >= fetched.piece.row_end && C::CONSUMERS != 2) continue;
            ring_barriers<C::Q_STAGES> &ring = shared.q[consumer];
            const uint32_t n = taken[consumer]++;
            ring.wait_empty(n);
            if (lane == 0) {
                const uint32_t to = tiles + (consumer * C::Q_STAGES + ring.stage(n)) * C::Q_BYTES;
                const int token = (int)fetched.piece.q_row + (row >> args.group_shift);
                barrier_expect(ring.full_at(n), C::Q_BYTES);
#pragma unroll
                for (int part = 0; part < C::K_DIM / COLUMNS; part++)
                    copy_box(to + part * GROUP_ROWS * COLUMNS * 2, &args.q, ring.full_at(n), part * COLUMNS,
                             fetched.head, token, 0);
                if (C::TAIL > 0)
                    copy_box(to + GROUP_ROWS * C::K_WHOLE * 2, &args.q_tail, ring.full_at(n), C::K_WHOLE, fetched.head,
                             token, 0);
            }
            __syncwarp();
        }
    });
}

/* The tiles of keys, or of values, the last ones of a piece first: a lane copies the box from `row` on. */
template <typename C, cpa_kv_part PART>
__device__ void copy_tiles(const hopper_args &args, const CUtensorMap *map, const CUtensorMap *tail_map,
                           persistent_shared<C> &shared, ring_barriers<C::KV_STAGES> &ring, uint32_t tiles, int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_COLUMNS, BYTES = C::KEYS * DIM * 2;
    const int row = lane * args.box;
    uint32_t n = 0;
    for_pieces(shared, lane, [&](const fetched_piece &fetched, const typename C::walk &walk) {
        const int count = walk.count;
        const int end = walk.high.end; /* of the keys that some row sees: there may be boxes between that and the last */
        box_place next = {};
        if (count > 0) next = place_of<C>(args, fetched.piece, end, walk.tile(count - 1), row);
        for (int i = count - 1; i >= 0; i--, n++) {
            const box_place place = next;
            if (i > 0) next = place_of<C>(args, fetched.piece, end, walk.tile(i - 1), row); /* before the waiting */
            ring.wait_empty(n);
            const uint32_t barrier = ring.full_at(n), to = tiles + ring.stage(n) * BYTES;
            if (lane == 0) barrier_expect(barrier, BYTES);
            __syncwarp();
            if (row < C::KEYS) {
#pragma unroll
                for (int part = 0; part < DIM / COLUMNS; part++)
                    copy_box(to + (part * C::KEYS + row) * COLUMNS * 2, map, barrier, part * COLUMNS, place.token,
                             fetched.kv_head, place.block);
                if constexpr (DIM % COLUMNS > 0)
                    copy_box(to + C::KEYS * (DIM - C::TAIL) * 2 + row * C::TAIL * 2, tail_map, barrier, DIM - C::TAIL,
                             place.token, fetched.kv_head, place.block);
            }
            __syncwarp();
        }
        if (PART == CPA_KEYS && lane == 0) barrier_arrive(shared_address(&shared.copied));
    });
}

} // namespace

#endif
