/* attend over keys that blocks select, on compute capability 9.0: as attend_hopper.cu, but each query head has CTAs of
 * its own, of 128 neighbouring rows, which walk through the tiles alone of which one of these attends a key. So what is
 * multiplied is what the bits of a head say, whatever the other heads of its group attend.
 *
 * The tiles are made of the items of a plan, not of its pieces: those have the heads of a group in one tile. */
#include "kernels/cuda/attend/blocks_walk.cuh"
#include "kernels/cuda/attend/hopper_scores.cuh"

namespace {

constexpr int ROWS = CPA_CUDA_BLOCKS_ROWS;
/* As a softcap does, looking bits up takes registers that would else hold queries. */
constexpr loop_rules FEWER_STEPS = SOFTCAP;
constexpr int LOADER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

struct blocks_args {
    cpa_cuda_hopper_maps maps;
    cpa_cuda_attend_args a; /* group 1: a KV head a query head, as far as rows go */
    cpa_key_blocks blocks;
    int32_t sharers; /* query heads of a KV head */
    int32_t box;     /* tokens in a box of the maps */
    int32_t tiles;   /* places of tiles of all items */
};

/* Tiles that are listed: as many as there is shared memory for, of most heads 1M keys. */
template <typename C>
using walk_of_blocks = blocks_walk<C::KEYS, (C::SHARED_BYTES < (208 << 10) ? 8192 : 4096)>;

/* ---- which rows ---- */

/* Tiles begin at multiples of ROWS in the set of the queries, so that they fit blocks of queries. Item i has places for
 * its tiles from this one on: enough for the rows before it, and two more for each item. */
__device__ int64_t first_place(const cpa_cuda_attend_args &a, int32_t sharers, int64_t i) {
    return a.items[i].begin / sharers / ROWS + 2 * i;
}

/* The piece at a place; without rows where there is none. */
__device__ void find_piece(cpa_cuda_piece &piece, const blocks_args &args, int32_t place) {
    const cpa_cuda_attend_args &a = args.a;
    int64_t low = 0, high = a.n_items;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (first_place(a, args.sharers, middle) <= place ? low : high) = middle;
    }
    const cpa_cuda_item &found = a.items[low];
    const cpa_attend_item &item = found.item;
    const int64_t first = item.q_first / ROWS * ROWS + (place - first_place(a, args.sharers, low)) * ROWS;
    const int64_t begin = max(first, item.q_first) - item.q_first, end = min(first + ROWS - item.q_first, item.q_count);
    piece = {};
    piece.q_row = item.q_row;
    piece.state_shift = found.state_shift;
    piece.q_first = item.q_first;
    piece.k_first = item.k_first;
    piece.table = item.table;
    piece.row_begin = (int32_t)min(begin, item.q_count);
    piece.row_end = (int32_t)max(end, (int64_t)piece.row_begin);
    piece.k_end = (int32_t)item.k_count;
    piece.q_set = item.q_set;
    piece.k_set = item.k_set;
    piece.partial = piece.next = -1;
}

/* ---- loads ---- */

template <typename C, int DIM>
__device__ void load_listed(const blocks_args &args, const CUtensorMap *map, const cpa_cuda_piece &piece,
                            const walk_of_blocks<C> &walk, int kv_head, uint32_t tiles, uint64_t (&full)[STAGES],
                            uint64_t (&empty)[STAGES], int row) {
    constexpr int BYTES = C::KEYS * DIM * 2;
    const cpa_cuda_attend_args &a = args.a;
    const auto block_of = [&](int tile) {
        const int key = tile * C::KEYS + row;
        return row < C::KEYS && key < piece.k_end ? __ldg(a.tables + piece.table + (key >> a.block_shift)) : NO_BLOCK;
    };
    const int count = walk.count;
    int next = count > 0 ? block_of(walk.tile(count - 1)) : NO_BLOCK;
    for (int n = 0; n < count; n++) {
        const int stage = n % STAGES, block = next;
        const int token = (walk.tile(count - 1 - n) * C::KEYS + row) & ((1 << a.block_shift) - 1);
        const uint32_t barrier = shared_address(&full[stage]), shared = tiles + stage * BYTES;
        if (n + 1 < count) next = block_of(walk.tile(count - 2 - n)); /* before the waiting */
        barrier_wait(shared_address(&empty[stage]), phase_of<STAGES>(n) ^ 1);
        if (row == 0) barrier_expect(barrier, BYTES);
        __syncwarp();
        if (row < C::KEYS) {
#pragma unroll
            for (int part = 0; part < DIM / COLUMNS; part++)
                copy_box(shared + (part * C::KEYS + row) * COLUMNS * 2, map, barrier, part * COLUMNS, token, kv_head,
                         block);
        }
        __syncwarp();
    }
}

/* ---- products ---- */

/* All tiles of the walk, the last keys first; as the loop of attend_hopper.cu without rules. */
template <typename C>
__device__ void attend_listed(const blocks_args &args, const cpa_cuda_piece &piece, const walk_of_blocks<C> &walk,
                              const block_rows &rows, thread_state<C> &state, uint32_t shared,
                              stage_barriers<C> &barriers, int consumer, int thread) {
    const cpa_cuda_attend_args &a = args.a;
    const int lane = thread % 32, count = walk.count, row = consumer * GROUP_ROWS + thread / 32 * 16 + lane / 4;
    const query_operand<C, FEWER_STEPS> q(shared + consumer * C::Q_BYTES, thread);
    float s[C::KEYS / 2], keep[2];
    uint32_t p[C::KEYS / 16][4], shown[2];
    bool is_tested;
    auto k_tile = [&](int n) { return shared + C::K_AT + n % STAGES * C::K_BYTES; };
    auto v_tile = [&](int n) { return shared + C::V_AT + n % STAGES * C::V_BYTES; };
    auto wait_full = [&](uint64_t(&full)[STAGES], int n) {
        barrier_wait(shared_address(&full[n % STAGES]), phase_of<STAGES>(n));
    };
    auto release = [&](uint64_t(&empty)[STAGES], int n) {
        if (lane == 0) barrier_arrive(shared_address(&empty[n % STAGES]));
    };
    auto look_up = [&](int n) { /* while the products run */
        is_tested = walk.tested(count - 1 - n);
        if (!is_tested) return;
        const int key = walk.tile(count - 1 - n) * C::KEYS + lane % (C::KEYS / 32) * 32;
#pragma unroll
        for (int half = 0; half < 2; half++)
            shown[half] = seen_within(state.keys[half], walk.sinks, key) &
                          rows.shown(a, piece, args.blocks, row + 8 * half, key);
    };

    wait_full(barriers.k_full, 0);
    begin_scores<C, FEWER_STEPS>(s, q, k_tile(0));
    look_up(0);
    wgmma_wait<0>();
    wgmma_hold(s);
    release(barriers.k_empty, 0);
    if (is_tested) mask_bits<C>(s, shown, lane);
    online_softmax<C, false>(s, state, keep, a.scale_log2);
    pack_probabilities<C>(p, s);
    const int keys = piece.k_end - walk.tile(count - 1) * C::KEYS;
    if (keys < C::KEYS) {
        wait_full(barriers.v_full, 0);
        clear_values<C>(shared + C::V_AT, keys, thread);
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
    }
    if (C::TURNS && consumer == 1 && count > 1) pass_turn(consumer);
    for (int n = 1; n < count; n++) {
        wait_full(barriers.k_full, n);
        if (C::TURNS) take_turn(consumer);
        begin_scores<C, FEWER_STEPS>(s, q, k_tile(n));
        wait_full(barriers.v_full, n - 1);
        begin_values<C>(state, p, v_tile(n - 1));
        if (C::TURNS && (consumer == 0 || n + 1 < count)) pass_turn(consumer);
        look_up(n);
        wgmma_wait<1>();
        wgmma_hold(s);
        release(barriers.k_empty, n);
        if (is_tested) mask_bits<C>(s, shown, lane);
        online_softmax<C, false>(s, state, keep, a.scale_log2);
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], shared);
        wgmma_wait<0>();
        hold_values<C>(state);
        release(barriers.v_empty, n - 1);
        rescale<C>(state, keep);
        pack_probabilities<C>(p, s);
    }
    wait_full(barriers.v_full, count - 1);
    begin_values<C>(state, p, v_tile(count - 1));
    wgmma_wait<0>();
    hold_values<C>(state);
}

template <typename C>
__device__ void store_rows(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int head,
                           const thread_state<C> &state, int row, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = row + 8 * half;
        const float max = state.max[half], sum = counted_sum(quad_sum(state.sum[half]), max, a.scale_log2);
        const float inverse = inverse_of_sum(sum), lse = lse_of(sum, max * a.scale + logf(sum));
        if (at >= piece.row_end) continue;
        const row_sink sink(a, piece, at, head, lse);
#pragma unroll
        for (int n = 0; n < C::V_DIM / 8; n++) {
            const int column = 8 * n + 2 * (lane % 4), i = 4 * (n % (C::PART / 8)) + 2 * half;
            const float *from = &state.o[8 * n / C::PART][i];
            const float o[2] = {from[0] * inverse, from[1] * inverse};
            if (column < a.v_dim) sink.template store<typename C::element>(column, o);
        }
        __syncwarp(0xfu << (lane & ~3)); /* the quad of the row */
        if (lane % 4 == 0) sink.store_lse();
    }
}

template <typename C>
__device__ void consume(const blocks_args &args, const cpa_cuda_piece &piece, const walk_of_blocks<C> &walk,
                        const block_rows &rows, int head, uint32_t shared, stage_barriers<C> &barriers, int consumer,
                        int thread) {
    const cpa_cuda_attend_args &a = args.a;
    const int lane = thread % 32, first_row = piece.row_begin + consumer * GROUP_ROWS;
    const int row = first_row + thread / 32 * 16 + lane / 4;
    thread_state<C> state;
    clear_state<C>(state, a.scale_log2);
#pragma unroll
    for (int half = 0; half < 2; half++) state.keys[half] = walk.keys_of(a, piece, row + 8 * half);
    if (walk.count > 0) {
        load_queries<C>(a, piece, head, first_row, shared + consumer * C::Q_BYTES, thread);
        copy_async_wait<0>();
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
        attend_listed<C>(args, piece, walk, rows, state, shared, barriers, consumer, thread);
    }
    store_rows<C>(a, piece, head, state, row, lane);
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_blocks(const __grid_constant__ blocks_args args) {
    static_assert(C::CONSUMERS * GROUP_ROWS == ROWS && C::TAIL == 0, "a tile of rows; whole boxes of columns");
    extern __shared__ char shared[];
    __shared__ cpa_cuda_piece piece;
    __shared__ walk_of_blocks<C> walk;
    __shared__ block_rows rows;
    __shared__ stage_barriers<C> barriers;
    const cpa_cuda_attend_args &a = args.a;
    /* The last rows, which see most, first; heads that share keys side by side. */
    const int head = blockIdx.x % a.q_heads, place = args.tiles - 1 - blockIdx.x / a.q_heads;
    const int kv_head = head / args.sharers;
    const uint32_t tiles = (shared_address(shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        find_piece(piece, args, place);
        prefetch_map(&args.maps.k);
        prefetch_map(&args.maps.v);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared_address(&barriers.k_full[stage]), 1);
            barrier_init(shared_address(&barriers.k_empty[stage]), C::CONSUMERS * (WARPGROUP / 32));
            barrier_init(shared_address(&barriers.v_full[stage]), 1);
            barrier_init(shared_address(&barriers.v_empty[stage]), C::CONSUMERS * (WARPGROUP / 32));
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (piece.row_begin == piece.row_end) return;
    rows.fill(a, piece, args.blocks, head);
    __syncthreads();
    walk.start(a, piece, args.blocks, rows);
    if (warpgroup == 0) {
        registers_shrink<LOADER_REGISTERS>();
        const int warp = thread / 32 % LOADING_PAIR, lane = thread % 32;
        const int warps = args.box < FEW_ROWS ? LOADING_PAIR : 1, row = (lane * warps + warp) * args.box;
        if (warp >= warps) return;
        if (thread < 32 * LOADING_PAIR) {
            load_listed<C, C::K_DIM>(args, &args.maps.k, piece, walk, kv_head, tiles + C::K_AT, barriers.k_full,
                                     barriers.k_empty, row);
        } else {
            load_listed<C, C::V_DIM>(args, &args.maps.v, piece, walk, kv_head, tiles + C::V_AT, barriers.v_full,
                                     barriers.v_empty, row);
        }
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        consume<C>(args, piece, walk, rows, head, tiles, barriers, warpgroup - 1, thread);
    }
}

template <typename C>
cpa_status launch(const blocks_args &args, cpa_stream *stream) {
    static uint64_t prepared;
    const cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)attend_blocks<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    attend_blocks<C><<<(unsigned)args.tiles * args.a.q_heads, C::THREADS, C::SHARED_BYTES, cpa_cuda_handle(stream)>>>(
        args);
    return cpa_cuda_launched(stream, "attend");
}

/* Narrower heads have the tiles of 128 columns, whose rows are those of a block of queries. */
constexpr int shape_of_blocks(int32_t k_dim, int32_t v_dim) {
    return v_dim > 128 || k_dim > 192 ? WIDE : k_dim > 128 ? WIDE_KEYS : SQUARE;
}

template <typename Element>
cpa_status launch_widths(const blocks_args &args, cpa_stream *stream) {
    switch (shape_of_blocks(args.a.k_dim, args.a.v_dim)) {
        case SQUARE: return launch<config<Element, SQUARE, BOXES, false>>(args, stream);
        case WIDE_KEYS: return launch<config<Element, WIDE_KEYS, BOXES, false>>(args, stream);
    }
    return launch<config<Element, WIDE, BOXES, false>>(args, stream);
}

} // namespace

extern "C" int32_t cpa_cuda_blocks_keys(int32_t k_dim, int32_t v_dim) {
    return TILES[shape_of_blocks(k_dim, v_dim)].keys;
}

extern "C" int32_t cpa_cuda_blocks_box(int32_t k_dim, int32_t v_dim, int32_t block_size) {
    const int32_t keys = cpa_cuda_blocks_keys(k_dim, v_dim);
    return block_size < keys ? block_size : keys;
}

extern "C" cpa_status cpa_cuda_attend_blocks(const cpa_cuda_attend_args *args, const cpa_cuda_hopper_maps *maps,
                                             const cpa_key_blocks *blocks, int64_t rows, cpa_stream *stream) {
    const int64_t tiles = rows / ROWS + 2 * args->n_items;
    blocks_args all = {*maps, *args, *blocks, args->group, 0, (int32_t)tiles};
    all.box = cpa_cuda_blocks_box(args->k_dim, args->v_dim, 1 << args->block_shift);
    all.a.group = 1;
    if (tiles * args->q_heads > INT32_MAX)
        return cpa_cuda_unsupported(stream, "attend: more tiles of rows than a grid has CTAs", tiles * args->q_heads);
    return args->q_dtype == CPA_BF16 ? launch_widths<__nv_bfloat16>(all, stream) : launch_widths<__half>(all, stream);
}
