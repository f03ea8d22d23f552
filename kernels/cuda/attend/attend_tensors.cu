/* attend over tensors without pages, for heads of up to 128 columns, on compute capability 9.0 (FlashAttention-3, Shah
 * et al., arXiv:2407.08608, as in attend_hopper.cu). Encoders of images have many short segments, whose pieces take as
 * long to begin and to end as for all between. So a CTA of every multiprocessor takes one piece after the other. Of its
 * first warpgroup a warp fetches pieces, and three copy queries, keys and values, as far ahead as there is room. The
 * others multiply 64 rows each; of three, each goes at its own pace: while one stores its rows, the others multiply,
 * and one that has no rows of a piece goes on to the next. */
#include <type_traits>

#include "kernels/cuda/attend/hopper_scores.cuh"

namespace {

constexpr int PIECES = 4; /* that a CTA has fetched, if they are short */

struct tensors_args {
    cpa_cuda_tensor_maps maps;
    cpa_cuda_attend_args a;
    uint32_t *tickets;   /* pieces that have been fetched beside the first of each CTA; 0 between launches */
    int32_t total;       /* pieces of all KV heads */
    int32_t group_shift; /* log2(group) */
};

template <typename Element, int Shape>
struct tensors_config : config<Element, Shape, BOXES, false> {
    using base = config<Element, Shape, BOXES, false>;
    /* Queries that are all in registers give their stage back at once. */
    static constexpr bool Q_HELD = base::REGISTER_STEPS * 16 == base::K_DIM;
    static constexpr int Q_STAGES = Q_HELD ? 1 : 2, K_AT = base::CONSUMERS * Q_STAGES * base::Q_BYTES;
    static constexpr int KV_STAGES = (MOST_TILE_BYTES - K_AT) / (base::K_BYTES + base::V_BYTES);
    static constexpr int V_AT = K_AT + KV_STAGES * base::K_BYTES;
    static constexpr int SHARED_BYTES = V_AT + KV_STAGES * base::V_BYTES + TILE_ALIGNMENT;
    static constexpr int LOADER_REGISTERS = base::CONSUMERS == 3 ? 32 : 40,
                         CONSUMER_REGISTERS = base::CONSUMERS == 3 ? 160 : 232;
    static constexpr int CONSUMER_WARPS = base::CONSUMERS * WARPGROUP / 32;
    /* Segments often end with few keys more than whole tiles: so many or fewer have a smaller product of their own. */
    static constexpr int FEW_KEYS = 80;
};

/* What all lanes have alike, and the compiler then knows that they do: it may go to uniform registers. */
__device__ int same_in_warp(int value) {
    return __shfl_sync(0xffffffff, value, 0);
}

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
    /* By each warp that reads. */
    __device__ void release(uint32_t n, int lane) {
        if (lane == 0) barrier_arrive(shared_address(&empty[stage(n)]));
    }
};

struct fetched_piece {
    cpa_cuda_piece piece;
    int32_t kv_head, first_consumer; /* of its rows; the others follow in turn */
    int32_t first_key_row;           /* in the tensors of keys and values */
    int32_t none_left;               /* it is none */
};

template <typename C>
struct tensors_shared {
    fetched_piece pieces[PIECES];
    key_walk<C::KEYS> walks[PIECES];
    ring_barriers<PIECES> fetched;
    uint64_t copied; /* the keys of a piece are on their way: it is time to fetch the next */
    ring_barriers<C::Q_STAGES> q[C::CONSUMERS];
    ring_barriers<C::KV_STAGES> k, v;
};

/* The rows of a piece that a consumer takes, counted by 64s; it may have no such rows. Those that take turns go
 * together. */
template <typename C>
__device__ int group_of(const fetched_piece &fetched, int consumer) {
    return C::TURNS ? consumer : (consumer + C::CONSUMERS - fetched.first_consumer) % C::CONSUMERS;
}

/* The keys of a packed row: one rank holds all, the first one being that of position 0. */
__device__ row_keys keys_of_packed(const tensors_args &args, const cpa_cuda_piece &piece, int row) {
    const int64_t position = piece.q_first + (row >> args.group_shift), window = args.a.mask.window,
                  ahead = cpa_mask_ahead(args.a.mask), end = piece.k_end;
    return {window > 0 ? (int32_t)min(max(position - window + 1, (int64_t)0), end) : 0,
            ahead > 0 ? (int32_t)min(max(position + ahead, (int64_t)0), end) : piece.k_end};
}

/* ---- the warps of the first warpgroup ---- */

/* A piece is fetched when the keys of the one before are on their way: so late that the last pieces go to those that
 * are first done, and early enough that nobody waits for it. */
template <typename C>
__device__ void fetch_pieces(const tensors_args &args, tensors_shared<C> &shared, int lane) {
    const cpa_cuda_attend_args &a = args.a;
    constexpr int WORDS = sizeof(cpa_cuda_piece) / 4;
    static_assert(WORDS <= 32, "a lane each");
    int ticket = blockIdx.x, first_consumer = 0;
    for (uint32_t n = 0;; n++) {
        fetched_piece &fetched = shared.pieces[n % PIECES];
        const bool none_left = ticket >= args.total;
        const cta_work work(a, none_left ? 0 : ticket);
        const uint32_t word = __ldg((const uint32_t *)(a.pieces + work.piece) + min(lane, WORDS - 1));
        shared.fetched.wait_empty(n);
        if (lane < WORDS) ((uint32_t *)&fetched.piece)[lane] = word;
        __syncwarp();
        if (lane == 0) {
            fetched.none_left = none_left;
            fetched.kv_head = work.kv_group;
            fetched.first_consumer = first_consumer;
            fetched.first_key_row = __ldg(a.tables + fetched.piece.table);
        }
        first_consumer += (fetched.piece.row_end - fetched.piece.row_begin + GROUP_ROWS - 1) / GROUP_ROWS;
        first_consumer %= C::CONSUMERS;
        if (lane == 0) {
            key_walk<C::KEYS> &walk = shared.walks[n % PIECES];
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
__device__ void for_pieces(tensors_shared<C> &shared, int lane, Take take) {
    for (uint32_t n = 0;; n++) {
        shared.fetched.wait_full(n);
        if (shared.pieces[n % PIECES].none_left) return;
        take(shared.pieces[n % PIECES], shared.walks[n % PIECES]);
        __syncwarp();
        shared.fetched.release(n, lane);
    }
}

/* The queries of each group of 64 rows go to the consumer that takes it. */
template <typename C>
__device__ void copy_queries(const tensors_args &args, tensors_shared<C> &shared, uint32_t tiles, int lane) {
    uint32_t taken[C::CONSUMERS] = {};
    for_pieces(shared, lane, [&](const fetched_piece &fetched, const key_walk<C::KEYS> &) {
#pragma unroll
        for (int consumer = 0; consumer < C::CONSUMERS; consumer++) {
            const int row = fetched.piece.row_begin + group_of<C>(fetched, consumer) * GROUP_ROWS;
            if (row >= fetched.piece.row_end && !C::TURNS) continue;
            ring_barriers<C::Q_STAGES> &ring = shared.q[consumer];
            const uint32_t n = taken[consumer]++;
            ring.wait_empty(n);
            if (lane == 0) {
                const uint32_t to = tiles + (consumer * C::Q_STAGES + ring.stage(n)) * C::Q_BYTES;
                const int head = fetched.kv_head << args.group_shift,
                          token = (int)fetched.piece.q_row + (row >> args.group_shift);
                barrier_expect(ring.full_at(n), C::Q_BYTES);
#pragma unroll
                for (int part = 0; part < C::K_DIM / COLUMNS; part++)
                    copy_box(to + part * GROUP_ROWS * COLUMNS * 2, &args.maps.q, ring.full_at(n), part * COLUMNS, head,
                             token, 0);
                if (C::TAIL > 0)
                    copy_box(to + GROUP_ROWS * C::K_WHOLE * 2, &args.maps.q_tail, ring.full_at(n), C::K_WHOLE, head,
                             token, 0);
            }
            __syncwarp();
        }
    });
}

/* The tiles of keys, or of values, the last ones of a piece first. */
template <typename C, cpa_kv_part PART>
__device__ void copy_tiles(const CUtensorMap *map, const CUtensorMap *tail_map, tensors_shared<C> &shared,
                           ring_barriers<C::KV_STAGES> &ring, uint32_t tiles, int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_COLUMNS, BYTES = C::KEYS * DIM * 2;
    uint32_t n = 0;
    for_pieces(shared, lane, [&](const fetched_piece &fetched, const key_walk<C::KEYS> &walk) {
        for (int i = walk.count - 1; i >= 0; i--, n++) {
            ring.wait_empty(n);
            if (lane == 0) {
                const uint32_t barrier = ring.full_at(n), to = tiles + ring.stage(n) * BYTES;
                const int row = fetched.first_key_row + walk.tile(i) * C::KEYS;
                barrier_expect(barrier, BYTES);
#pragma unroll
                for (int part = 0; part < DIM / COLUMNS; part++)
                    copy_box(to + part * C::KEYS * COLUMNS * 2, map, barrier, part * COLUMNS, row, fetched.kv_head, 0);
                if constexpr (DIM % COLUMNS > 0)
                    copy_box(to + C::KEYS * (DIM - C::TAIL) * 2, tail_map, barrier, DIM - C::TAIL, row, fetched.kv_head,
                             0);
            }
            __syncwarp();
        }
        if (PART == CPA_KEYS && lane == 0) barrier_arrive(shared_address(&shared.copied));
    });
}

/* ---- the warpgroups that multiply ---- */

/* hidden(half, at): whether a row does not see a key, by its place behind the thread's first one of the tile. */
template <int N, typename Hidden>
__device__ void hide(float (&scores)[N], Hidden hidden) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (hidden(i / 2 % 2, i / 4 * 8 + i % 2)) scores[i] = -INFINITY;
}

/* All tiles of the piece, `n` and on, for 64 rows from `first_row` on, the last keys first. */
template <typename C>
__device__ void attend_group(const tensors_args &args, const cpa_cuda_piece &piece, const key_walk<C::KEYS> &walk,
                             thread_state<C> &state, tensors_shared<C> &shared, uint32_t tiles, uint32_t n,
                             uint32_t taken, int first_row, int consumer, int thread) {
    const int lane = thread % 32;
    ring_barriers<C::Q_STAGES> &q_ring = shared.q[consumer];
    const uint32_t end = same_in_warp(n + walk.count);
    const query_operand<C, NO_RULES> q(tiles + (consumer * C::Q_STAGES + q_ring.stage(taken)) * C::Q_BYTES, thread);
    if (C::Q_HELD) {
        __syncwarp();
        q_ring.release(taken, lane);
    }
    const float scale_log2 = args.a.scale_log2;
    float s[C::KEYS / 2], keep[2];
    uint32_t p[C::KEYS / 16][4];
    auto k_tile = [&] { return tiles + C::K_AT + shared.k.stage(n) * C::K_BYTES; };
    auto v_tile = [&](uint32_t m) { return tiles + C::V_AT + shared.v.stage(m) * C::V_BYTES; };
    auto tile_of = [&] { return walk.tile(end - 1 - n); };
    const row_keys full = walk.full_steps();
    const uint32_t full_first = n + full.first, full_end = n + full.end;
    auto mask = [&](auto &scores) {
        if ((int)(n - full_first) >= 0 && (int)(n - full_end) < 0) return;
        const int key = tile_of() * C::KEYS + 2 * (lane % 4), row = first_row + thread / 32 * 16 + lane / 4;
        auto keys_of = [&](int half) { return keys_of_packed(args, piece, min(row + 8 * half, piece.row_end - 1)); };
        const int end[] = {keys_of(0).end - key, keys_of(1).end - key};
        hide(scores, [&](int half, int at) { return at >= end[half]; });
        if (args.a.mask.window == 0) return;
        const int begin[] = {keys_of(0).first - key, keys_of(1).first - key};
        hide(scores, [&](int half, int at) { return at < begin[half]; });
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
    if (C::TURNS && consumer == 1 && n + 1 < end) pass_turn(consumer);
    while (++n < end) {
        shared.k.wait_full(n);
        if (C::TURNS) take_turn(consumer);
        begin_scores<C, NO_RULES>(s, q, k_tile());
        shared.v.wait_full(n - 1);
        begin_values<C>(state, p, v_tile(n - 1));
        if (C::TURNS && (consumer == 0 || n + 1 < end)) pass_turn(consumer);
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

/* The rows go to `out` and their LSE, or all to the work space. */
template <typename C>
__device__ void store_rows(const tensors_args &args, const fetched_piece &fetched, const thread_state<C> &state,
                           int row, int lane) {
    using element = typename C::element;
    const cpa_cuda_attend_args &a = args.a;
    const cpa_cuda_piece &piece = fetched.piece;
#pragma unroll
    for (int half = 0; half < 2; half++, row += 8) {
        const float max = state.max[half], sum = counted_sum(quad_sum(state.sum[half]), max, a.scale_log2);
        const float inverse = inverse_of_sum(sum), lse = lse_of(sum, max * a.scale + logf(sum));
        if (row >= piece.row_end) continue;
        const int64_t token = piece.q_row + (row >> args.group_shift),
                      place = (int64_t)fetched.kv_head * a.partial_rows + piece.partial + (row - piece.row_begin);
        const int head = (fetched.kv_head << args.group_shift) + (row & ((1 << args.group_shift) - 1));
        auto store_all = [&](auto in_range, auto store) {
#pragma unroll
            for (int column = 0; column < C::V_DIM; column += 8) {
                const int part = column / C::PART, at = column % C::PART / 2 + 2 * half;
                const float *from = part < C::PARTS ? &state.o[part][at] : &state.tail[at];
                const float o[2] = {from[0] * inverse, from[1] * inverse};
                if (in_range(column)) store(column, o);
            }
        };
        auto inside = [&](int column) { return column + 2 * (lane % 4) < a.v_dim; };
        if (piece.partial < 0) {
            char *out = a.out + ((token * a.q_heads + head) * a.v_dim + 2 * (lane % 4)) * (int64_t)sizeof(element);
            auto store = [&](int column, auto &o) { store_elements<element>(out, column, o); };
            if (a.v_dim == C::V_DIM) {
                store_all([](int) { return true; }, store);
            } else {
                store_all(inside, store);
            }
            if (a.lse && lane % 4 == 0) a.lse[token * a.lse_row_stride + head + piece.state_shift] = lse;
        } else {
            float *partial = a.partial_o + place * a.v_dim + 2 * (lane % 4);
            store_all(inside, [&](int column, auto &o) { store_floats(partial + column, o); });
            if (lane % 4 == 0) a.partial_lse[place] = lse;
        }
    }
}

/* Passes the tiles of a piece over, `n` and on. */
template <typename C>
__device__ void skip_tiles(tensors_shared<C> &shared, uint32_t n, int count, int lane) {
    for (const uint32_t end = n + count; n != end; n++) {
        shared.k.wait_full(n);
        shared.k.release(n, lane);
        shared.v.wait_full(n);
        shared.v.release(n, lane);
    }
}

template <typename C>
__device__ void consume(const tensors_args &args, tensors_shared<C> &shared, uint32_t tiles, int consumer,
                        int in_warpgroup) {
    uint32_t n = 0, taken = 0; /* tiles, and pieces with rows for it */
    for_pieces(shared, in_warpgroup % 32, [&](const fetched_piece &fetched, const key_walk<C::KEYS> &walk) {
        int thread = in_warpgroup; /* nothing that follows from it is kept from piece to piece: registers are few */
        asm volatile("" : "+r"(thread));
        const int lane = thread % 32;
        const int first_row = fetched.piece.row_begin + group_of<C>(fetched, consumer) * GROUP_ROWS;
        if (first_row >= fetched.piece.row_end && !C::TURNS) {
            skip_tiles(shared, n, walk.count, lane);
        } else {
            thread_state<C> state;
            clear_state<C>(state, args.a.scale_log2);
            shared.q[consumer].wait_full(taken);
            if (walk.count > 0)
                attend_group<C>(args, fetched.piece, walk, state, shared, tiles, same_in_warp(n), same_in_warp(taken),
                                first_row, consumer, thread);
            if (!C::Q_HELD || walk.count == 0) shared.q[consumer].release(taken, lane);
            taken++;
            store_rows<C>(args, fetched, state, first_row + thread / 32 * 16 + lane / 4, lane);
        }
        n += walk.count;
    });
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_tensors(const __grid_constant__ tensors_args args) {
    extern __shared__ char memory[];
    __shared__ tensors_shared<C> shared;
    const uint32_t tiles = (shared_address(memory) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    /* Shuffled, so that the compiler knows that a warp has one: descriptors then stay in uniform registers. */
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    const int lane = thread % 32;
    if (threadIdx.x == 0) {
        shared.fetched.start(3 + C::CONSUMER_WARPS);
        for (int i = 0; i < C::CONSUMERS; i++) shared.q[i].start(WARPGROUP / 32);
        shared.k.start(C::CONSUMER_WARPS);
        shared.v.start(C::CONSUMER_WARPS);
        barrier_init(shared_address(&shared.copied), 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        const int warp = thread / 32;
        if (warp == 0) {
            fetch_pieces<C>(args, shared, lane);
        } else if (warp == 1) {
            copy_queries<C>(args, shared, tiles, lane);
        } else if (warp == 2) {
            copy_tiles<C, CPA_KEYS>(&args.maps.pools.k, &args.maps.pools.k_tail, shared, shared.k, tiles + C::K_AT,
                                    lane);
        } else {
            copy_tiles<C, CPA_VALUES>(&args.maps.pools.v, &args.maps.pools.v_tail, shared, shared.v,
                                      tiles + C::V_AT, lane);
        }
    } else {
        registers_grow<C::CONSUMER_REGISTERS>();
        consume<C>(args, shared, tiles, warpgroup - 1, thread);
    }
}

template <typename C>
cpa_status launch(const tensors_args &args, cpa_stream *stream) {
    static uint64_t prepared;
    const int multiprocessors = cpa_cuda_device_of(stream)->multiprocessors;
    const cpa_status status =
        cpa_cuda_shared_memory(stream, (const void *)attend_tensors<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    const int ctas = args.total < multiprocessors ? args.total : multiprocessors;
    attend_tensors<C><<<ctas, C::THREADS, C::SHARED_BYTES, cpa_cuda_handle(stream)>>>(args);
    return cpa_cuda_launched(stream, "attend");
}

template <typename Element>
cpa_status launch_widths(const tensors_args &args, cpa_stream *stream) {
    switch (shape_of(args.a.k_dim, args.a.v_dim, true, false, true)) {
        case NARROW: return launch<tensors_config<Element, NARROW>>(args, stream);
        case FLAT_72: return launch<tensors_config<Element, FLAT_72>>(args, stream);
        case TAILED_80: return launch<tensors_config<Element, TAILED_80>>(args, stream);
        case TAILED_96: return launch<tensors_config<Element, TAILED_96>>(args, stream);
    }
    return launch<tensors_config<Element, SQUARE>>(args, stream);
}

} // namespace

extern "C" int cpa_cuda_tensors_fit(const cpa_cuda_attend_args *a) {
    const int shape = shape_of(a->k_dim, a->v_dim, true, false, true);
    const bool out_alone = a->out && !a->o && !a->resume && !a->out_scale && !a->score.sink_logits;
    return 1 << a->block_shift == CPA_TENSOR_BLOCK && shape <= SQUARE && !a->score.any && GROUP_ROWS % a->group == 0 &&
           out_alone;
}

extern "C" cpa_status cpa_cuda_attend_tensors(const cpa_cuda_attend_args *a, const cpa_cuda_tensor_maps *maps,
                                              int32_t n_pieces, uint32_t *tickets, cpa_stream *stream) {
    const tensors_args args = {*maps, *a, tickets, n_pieces * a->kv_heads, cpa_cuda_log2(a->group)};
    return a->q_dtype == CPA_BF16 ? launch_widths<__nv_bfloat16>(args, stream) : launch_widths<__half>(args, stream);
}
