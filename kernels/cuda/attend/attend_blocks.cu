/* attend over keys that blocks select (cpattn/selection.h), on compute capability 9.0, by the persistent kernel: each
 * query head has pieces of its own, of 128 neighbouring rows, which walk through the tiles alone of which one of these
 * attends a key. So what is multiplied is what the bits of a head say, whatever other heads of its group attend; and
 * where that is little, what a piece takes to begin and to end lies under the products of others.
 *
 * The pieces are made of the items of a plan: its own have the heads of a group in one tile. Those of a KV head come
 * one behind the other, as far as may be: its keys then lie in L2, of which single tiles of many heads leave little. */
#include "kernels/cuda/attend/blocks_walk.cuh"
#include "kernels/cuda/attend/persistent_kernel.cuh"

namespace {

constexpr int ROWS = CPA_CUDA_BLOCKS_ROWS;

/* group 1 in the arguments of attend: a KV head a query head, as far as rows go. */
struct blocks_args : persistent_args {
    cpa_key_blocks blocks;
    cpa_cuda_block_items items;
    int32_t sharers; /* query heads of a KV head */
    int32_t tiles;   /* places of tiles of all items */
};

template <typename C>
struct block_work;

template <typename Element, int Shape>
struct blocks_config : config<Element, Shape, BOXES, false> {
    using base = config<Element, Shape, BOXES, false>;
    static constexpr int PIECES = 2, Q_STAGES = 1, KV_STAGES = STAGES;
    static constexpr int REGISTER_STEPS = Shape == WIDE ? 2 : base::REGISTER_STEPS; /* beside what looks bits up */
    static constexpr bool Q_HELD = REGISTER_STEPS * 16 == base::K_DIM;
    static constexpr int LOADER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static constexpr int CONSUMER_WARPS = base::CONSUMERS * WARPGROUP / 32;
    static constexpr int FEW_KEYS = base::KEYS; /* a piece that begins with few keys is one of many */
    /* Tiles that are listed: as many as there is shared memory for, of most heads 1M keys. */
    static constexpr int MOST_TILES = base::SHARED_BYTES < (176 << 10)   ? 8192
                                      : base::SHARED_BYTES < (200 << 10) ? 6144
                                                                         : 2560;
    using args = blocks_args;
    using walk = blocks_walk<base::KEYS, MOST_TILES>;
    using work = block_work<blocks_config>;
    static_assert(MOST_TILES * INT64_C(1) * base::KEYS >= (base::K_DIM > 128 || base::V_DIM > 128 ? 2560 : 8192) * INT64_C(128),
                  "src/context/kv_wanted.c relies on lists of so many keys");
    static_assert(base::CONSUMERS * GROUP_ROWS == ROWS && base::TAIL == 0, "a tile of rows; whole boxes of columns");
};

/* Tiles begin at multiples of ROWS in the set of the queries, so that they fit blocks of queries. Item i has places for
 * its tiles from this one on: enough for the rows before it, and two more for each item. */
__device__ int32_t first_place(const blocks_args &args, const cpa_cuda_item *items, int32_t i) {
    return (int32_t)(items[i].begin - items[0].begin) / args.sharers / ROWS + 2 * i;
}

__device__ bool selects_blocks(const cpa_key_blocks &blocks, const cpa_attend_item &item) {
    bool selects = false;
    for (int64_t row = item.q_row; row < item.q_row + item.q_count; row++)
        selects |= blocks.row_word[blocks.row_map ? blocks.row_map[row] : row] >= 0;
    return selects;
}

/* The piece at a place; without rows where there is none, or other kernels have them. */
__device__ void find_piece(cpa_cuda_piece &piece, const blocks_args &args, int32_t place) {
    const cpa_cuda_item *items = args.items.is_cut ? &args.items.cut : args.pools.a.items + args.items.first;
    int32_t low = 0, high = (int32_t)args.items.n;
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (first_place(args, items, middle) <= place ? low : high) = middle;
    }
    const cpa_cuda_item &found = items[low];
    const cpa_attend_item &item = found.item;
    const int64_t first = item.q_first / ROWS * ROWS + (place - first_place(args, items, low)) * ROWS;
    const bool is_left = item.q_count <= args.items.few && (args.items.leaves_all || !selects_blocks(args.blocks, item));
    const int64_t begin = max(first, item.q_first) - item.q_first, end = min(first + ROWS - item.q_first, item.q_count);
    piece = {};
    piece.q_row = item.q_row;
    piece.state_shift = found.state_shift;
    piece.q_first = item.q_first;
    piece.k_first = item.k_first;
    piece.table = item.table;
    piece.row_begin = (int32_t)min(begin, item.q_count);
    piece.row_end = is_left ? piece.row_begin : (int32_t)max(end, (int64_t)piece.row_begin);
    piece.k_end = (int32_t)item.k_count;
    piece.q_set = item.q_set;
    piece.k_set = item.k_set;
    piece.partial = piece.next = -1;
}

/* The piece of a ticket: of each KV head the last rows, which see most, first. Returns whether it has rows. */
__device__ bool find_ticket(fetched_piece &fetched, const blocks_args &args, int32_t ticket) {
    const int32_t of_kv_head = args.tiles * args.sharers, kv_head = ticket / of_kv_head, at = ticket % of_kv_head;
    fetched.kv_head = kv_head;
    fetched.head = kv_head * args.sharers + at % args.sharers;
    fetched.first_consumer = 0;
    find_piece(fetched.piece, args, args.tiles - 1 - at / args.sharers);
    return fetched.piece.row_begin < fetched.piece.row_end;
}

template <typename C>
struct block_work {
    struct masked_steps {
        const typename C::walk &walk;
        uint32_t end;
        __device__ masked_steps(const typename C::walk &of, uint32_t begin) : walk(of), end(begin + of.count) {}
        __device__ bool operator()(uint32_t m) const { return walk.flags(end - 1 - m) != 0; }
    };
    struct row_ends {}; /* they are with the walk */

    /* Comes back to 0: every CTA asks once in vain. */
    static __device__ int next_ticket(const blocks_args &args, int lane) {
        int ticket = 0;
        if (lane == 0) ticket = gridDim.x + atomicInc(args.tickets, args.total - 1);
        return same_in_warp(ticket);
    }
    static __device__ bool has_rows(fetched_piece &fetched, const blocks_args &args, int ticket, int lane) {
        bool has = false;
        if (lane == 0) has = find_ticket(fetched, args, ticket);
        return same_in_warp(has);
    }
    /* A piece is fetched as soon as there is room for its list, which takes longer to make than a few tiles. */
    static __device__ void fetch(const blocks_args &args, persistent_shared<C> &shared, int lane) {
        int ticket = blockIdx.x;
        for (uint32_t n = 0;; n++) {
            fetched_piece &fetched = shared.pieces[n % C::PIECES];
            shared.fetched.wait_empty(n);
            if (n > 0) ticket = next_ticket(args, lane);
            while (ticket < args.total && !has_rows(fetched, args, ticket, lane)) ticket = next_ticket(args, lane);
            const bool none_left = ticket >= args.total;
            if (lane == 0) fetched.none_left = none_left;
            __syncwarp();
            if (!none_left)
                shared.walks[n % C::PIECES].start_blocks(args.pools.a, fetched.piece, args.blocks, fetched.head, lane);
            if (lane == 0) barrier_arrive(shared.fetched.full_at(n));
            if (none_left) return;
        }
    }
    /* Which of 32 keys of the i-th tile a thread's two rows see. Looked up while the scores of the tile are no registers
     * yet. */
    struct looked_up {
        uint32_t shown[2];
    };
    static __device__ looked_up look_up(const blocks_args &args, const fetched_piece &fetched,
                                        const typename C::walk &walk, int i, int row, int lane) {
        const int key = walk.tile(i) * C::KEYS + lane % (C::KEYS / 32) * 32, at = row - fetched.piece.row_begin;
        return {walk.shown(args.blocks, i, at, key), walk.shown(args.blocks, i, at + 8, key)};
    }
    template <int N>
    static __device__ void hide(float (&s)[N], const blocks_args &, const fetched_piece &, const typename C::walk &,
                                const looked_up &seen, int, int, int lane) {
        mask_bits<C>(s, seen.shown, lane);
    }
    static __device__ row_ends end(const blocks_args &args, const fetched_piece &fetched, typename C::walk &walk,
                                   const thread_state<C> &state, int row, int lane) {
        const cpa_cuda_attend_args &a = args.pools.a;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float max = state.max[half], sum = counted_sum(quad_sum(state.sum[half]), max, a.scale_log2);
            const row_end end = {inverse_of_sum(sum), lse_of(sum, max * a.scale + logf(sum))};
            if (lane % 4 == 0) walk.ends[row - fetched.piece.row_begin + 8 * half] = end;
        }
        __syncwarp();
        return {};
    }
    /* Results alone: a lane of a quad stores columns that lie together. */
    static __device__ void store_out(const cpa_cuda_attend_args &a, const fetched_piece &fetched,
                                     const typename C::walk &walk, const thread_state<C> &state, int row, int lane) {
        using element = typename C::element;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int at = row + 8 * half;
            const row_end end = walk.ends[at - fetched.piece.row_begin];
            const row_place place(a, fetched.piece.q_row, at, fetched.head);
            const merge_weights weights(end.lse);
            const float sink = a.score.sink_logits ? sink_factor(a.score.sink_logits, place.head, weights.lse) : 1;
            const float factor = weights.b != 0 ? weights.b * sink * end.inverse : 0;
            char *out = a.out + (place.state_row * a.out_row_stride + place.head * a.out_head_stride) * 2;
            const bool inside = at < fetched.piece.row_end;
#pragma unroll
            for (int column = 0; column < C::V_DIM; column += 32) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *from = &state.o[column / C::PART][(column % C::PART + 8 * i) / 2 + 2 * half];
                    words[i] = factor != 0 ? pack_pair<element>(from[0] * factor, from[1] * factor) : 0;
                }
                transpose_in_quad(words, lane);
                if (inside)
                    *(uint4 *)(out + (column + 8 * (lane % 4)) * 2) = make_uint4(words[0], words[1], words[2], words[3]);
            }
            if (inside && a.lse && lane % 4 == 0)
                a.lse[place.state_row * a.lse_row_stride + place.head * a.lse_head_stride + fetched.piece.state_shift] =
                    weights.lse;
        }
    }
    static __device__ void store(const blocks_args &args, const fetched_piece &fetched, const typename C::walk &walk,
                                 const thread_state<C> &state, const row_ends &, int row, int lane) {
        const cpa_cuda_attend_args &a = args.pools.a;
        if (C::V_DIM == a.v_dim && a.out && !a.o && !a.resume && !a.out_scale)
            return store_out(a, fetched, walk, state, row, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (row + 8 * half >= fetched.piece.row_end) continue;
            const row_end end = walk.ends[row - fetched.piece.row_begin + 8 * half];
            const row_sink sink(a, fetched.piece, row + 8 * half, fetched.head, end.lse);
#pragma unroll
            for (int n = 0; n < C::V_DIM / 8; n++) {
                const int column = 8 * n + 2 * (lane % 4), i = 4 * (n % (C::PART / 8)) + 2 * half;
                const float *from = &state.o[8 * n / C::PART][i];
                const float o[2] = {from[0] * end.inverse, from[1] * end.inverse};
                if (column < a.v_dim) sink.template store<typename C::element>(column, o);
            }
            __syncwarp(0xfu << (lane & ~3)); /* the quad of the row */
            if (lane % 4 == 0) sink.store_lse();
        }
    }
};

/* Narrower heads have the tiles of 128 columns, whose rows are those of a block of queries. */
constexpr int shape_of_blocks(int32_t k_dim, int32_t v_dim) {
    return v_dim > 128 || k_dim > 192 ? WIDE : k_dim > 128 ? WIDE_KEYS : SQUARE;
}

template <typename Element>
cpa_status launch_widths(const blocks_args &args, cpa_stream *stream) {
    switch (shape_of_blocks(args.pools.a.k_dim, args.pools.a.v_dim)) {
        case SQUARE: return launch_persistent<blocks_config<Element, SQUARE>>(args, stream);
        case WIDE_KEYS: return launch_persistent<blocks_config<Element, WIDE_KEYS>>(args, stream);
    }
    return launch_persistent<blocks_config<Element, WIDE>>(args, stream);
}

} // namespace

extern "C" int32_t cpa_cuda_blocks_keys(int32_t k_dim, int32_t v_dim) {
    return TILES[shape_of_blocks(k_dim, v_dim)].keys;
}

extern "C" int32_t cpa_cuda_blocks_box(int32_t k_dim, int32_t v_dim, int32_t block_size) {
    const int32_t keys = cpa_cuda_blocks_keys(k_dim, v_dim);
    return block_size < keys ? block_size : keys;
}

extern "C" cpa_status cpa_cuda_attend_blocks(const cpa_cuda_attend_args *args, const cpa_cuda_persistent_maps *maps,
                                             const cpa_key_blocks *blocks, const cpa_cuda_block_items *items,
                                             uint32_t *tickets, cpa_stream *stream) {
    const int64_t tiles = items->rows / ROWS + 2 * items->n, total = tiles * args->q_heads;
    blocks_args all = {};
    if (total > INT32_MAX / 2)
        return cpa_cuda_unsupported(stream, "attend: more tiles of rows than can be counted", total);
    all.pools = {maps->pools, *args, cpa_cuda_blocks_box(args->k_dim, args->v_dim, 1 << args->block_shift), 0};
    all.pools.a.group = 1;
    all.q = maps->q;
    all.tickets = tickets;
    all.total = (int32_t)total;
    all.blocks = *blocks;
    all.items = *items;
    all.sharers = args->group;
    all.tiles = (int32_t)tiles;
    return args->q_dtype == CPA_BF16 ? launch_widths<__nv_bfloat16>(all, stream) : launch_widths<__half>(all, stream);
}
