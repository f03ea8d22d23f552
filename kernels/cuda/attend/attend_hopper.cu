/* attend over prefill tiles on compute capability 9.0 (FlashAttention-3, Shah et al., arXiv:2407.08608): a warpgroup
 * that loads pages by bulk tensor copies, or row by row where pages are of few tokens; two or three that multiply by
 * wgmma, 64 rows each. The scores of the next tile are multiplied while the softmax of this one runs, and two take
 * turns with the tensor cores. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend/hopper_loads.cuh"
#include "kernels/cuda/attend/hopper_rows.cuh"
#include "kernels/cuda/attend/hopper_scores.cuh"

namespace {

/* All tiles of the piece, the last keys first. */
template <typename C, loop_rules RULES>
__device__ void attend_tiles(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const hopper_walk<C> &walk,
                             thread_state<C> &state, group_scores<C> &scores, uint32_t shared,
                             stage_barriers<C> &barriers, int consumer, int thread) {
    const int lane = thread % 32, column = 2 * (lane % 4), count = walk.count;
    const query_operand<C, RULES> q(shared + consumer * C::Q_BYTES, thread);
    float s[C::KEYS / 2], keep[2];
    uint32_t p[C::KEYS / 16][4];
    auto k_tile = [&](int n) { return shared + C::K_AT + n % STAGES * C::K_BYTES; };
    auto v_tile = [&](int n) { return shared + C::V_AT + n % C::V_STAGES * C::V_BYTES; };
    auto wait_full = [&](auto &full, int n) {
        constexpr int N = sizeof full / sizeof *full;
        barrier_wait(shared_address(&full[n % N]), phase_of<N>(n));
    };
    auto release_keys = [&](int n) {
        if (C::SCALED || lane == 0) barrier_arrive(shared_address(&barriers.k_empty[n % STAGES]));
    };
    auto release_values = [&](int n) {
        if (lane == 0) barrier_arrive(shared_address(&barriers.v_empty[n % C::V_STAGES]));
    };
    auto scale = [&](int n) {
        if constexpr (C::SCALED) scale_scores<C>(s, shared + C::SCALES_AT + n % STAGES * C::SCALE_BYTES + column * 4);
    };
    const row_keys full = walk.full_steps();
    constexpr bool LISTED = RULES == BITS || RULES == ANY_RULES; /* the walk may be */
    const bool has_bits = RULES == BITS || (RULES == ANY_RULES && a.score.custom.bits);
    const bool is_apart = RULES == ANY_RULES && !scores.piece.linear;
    uint32_t shown[2];
    bool is_masked; /* the step, as it is looked up */
    auto masked = [&](int n) {
        if constexpr (LISTED) return n >= full.end || (n < full.first && walk.tested(count - 1 - n));
        return n < full.first || n >= full.end;
    };
    auto key_of = [&](int n) { return walk.tile(count - 1 - n) * C::KEYS; };
    /* What the rules of a step need and its scores do not: while the products run. */
    auto look_up = [&](int n) {
        if constexpr (LISTED) {
            is_masked = masked(n);
            if (is_apart && a.score.indexed) {
                index_tile(scores.indices[n % 2], a, piece, key_of(n), thread, WARPGROUP);
                named_sync(1 + consumer, WARPGROUP);
            }
            if (has_bits && is_masked)
                look_up_bits<C, RULES>(shown, a, state, scores, walk.sinks, n, key_of(n), thread);
        } else if constexpr (RULES == SLOPES) {
            slope_alike<C>(state.rules, scores, key_of(n), thread);
        }
    };
    auto mask = [&](int n) {
        if (LISTED ? !is_masked : !masked(n)) return;
        if constexpr (LISTED)
            if (has_bits) return mask_bits<C>(s, shown, lane);
        mask_scores<C>(s, state, walk.sinks, key_of(n) + column);
    };
    auto rule = [&](int n) {
        if constexpr (RULES == SLOPES) slope_scores<C>(s, state.rules);
        if constexpr (RULES == SOFTCAP) cap_tile<(C::K_DIM < 256)>(s, a.score.tanh, a.score.capped.line);
        if constexpr (RULES == ANY_RULES) {
            if (!a.score.transforms) return;
            if (a.score.softcap > 0) cap_tile<false>(s, a.score.tanh, a.score.tanh_line);
            if (!a.score.alibi_slopes) return;
            if (is_apart) return slope_apart<C>(s, state.rules, scores, n, thread);
            slope_alike<C>(state.rules, scores, key_of(n), thread);
            slope_scores<C>(s, state.rules);
        }
    };

    auto softmax = [&] {
        if constexpr (RULES == SOFTCAP) {
            bounded_softmax<C>(s, state);
        } else {
            online_softmax<C, RULES == SLOPES || RULES == ANY_RULES>(s, state, keep, a.scale_log2);
        }
    };

    wait_full(barriers.k_full, 0);
    begin_scores<C, RULES>(s, q, k_tile(0));
    look_up(0);
    wgmma_wait<0>();
    wgmma_hold(s);
    scale(0);
    release_keys(0);
    rule(0);
    mask(0);
    softmax();
    pack_probabilities<C>(p, s);
    const int keys = piece.k_end - walk.tile(count - 1) * C::KEYS;
    if (!C::ROWS && keys < C::KEYS) { /* rows that are copied one by one are those of the last key there */
        wait_full(barriers.v_full, 0);
        clear_values<C>(shared + C::V_AT, keys, thread);
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
    }
    if (C::TURNS && consumer == 1 && count > 1) pass_turn(consumer);
    for (int n = 1; n < count; n++) {
        wait_full(barriers.k_full, n);
        if (C::TURNS) take_turn(consumer);
        begin_scores<C, RULES>(s, q, k_tile(n));
        wait_full(barriers.v_full, n - 1);
        begin_values<C>(state, p, v_tile(n - 1));
        if (C::TURNS && (consumer == 0 || n + 1 < count)) pass_turn(consumer);
        look_up(n);
        wgmma_wait<1>();
        wgmma_hold(s);
        scale(n);
        release_keys(n);
        rule(n);
        mask(n);
        softmax();
        wgmma_hold(s);
        pin_before_wait(state.sum[0] + state.sum[1], shared);
        wgmma_wait<0>();
        hold_values<C>(state);
        release_values(n - 1);
        if constexpr (RULES != SOFTCAP) rescale<C>(state, keep);
        pack_probabilities<C>(p, s);
    }
    wait_full(barriers.v_full, count - 1);
    begin_values<C>(state, p, v_tile(count - 1));
    wgmma_wait<0>();
    hold_values<C>(state);
    if constexpr (RULES == SOFTCAP) end_bounded<C>(state, a.score.capped.reference);
}

/* Loops of their own, where the commonest rules and caches meet; one for any rules elsewhere. */
template <typename C>
__device__ void attend_by_rules(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const hopper_walk<C> &walk,
                                thread_state<C> &state, group_scores<C> &scores, uint32_t shared,
                                stage_barriers<C> &barriers, int consumer, int thread) {
    if constexpr (!C::RULED)
        return attend_tiles<C, NO_RULES>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
    if constexpr (C::RULED) {
        begin_rules<C>(a, state, scores, thread);
        if constexpr (!C::ROWS) {
            const bool capped = a.score.softcap > 0, linear = scores.piece.linear, has_bits = a.score.custom.bits;
            if constexpr (std::is_same<typename C::element, __nv_bfloat16>::value) { /* those of fp16 overflow */
                if (capped && a.score.capped.fits && !has_bits && !a.score.alibi_slopes &&
                    a.score.temperature_len == 0)
                    return attend_tiles<C, SOFTCAP>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
            }
            if constexpr (!C::SCALED) {
                if (has_bits && !a.score.transforms && linear)
                    return attend_tiles<C, BITS>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
            }
            if (!has_bits && !capped && (!a.score.alibi_slopes || linear))
                return attend_tiles<C, SLOPES>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
        }
        attend_tiles<C, ANY_RULES>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
    }
}

template <typename C>
__device__ void consume(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const hopper_walk<C> &walk,
                        int kv_group, group_scores<C> &scores, uint32_t shared, stage_barriers<C> &barriers,
                        int consumer, int thread) {
    const int lane = thread % 32, first_row = piece.row_begin + consumer * GROUP_ROWS;
    const int row = first_row + thread / 32 * 16 + lane / 4;
    thread_state<C> state;
    clear_state<C>(state, a.scale_log2);
#pragma unroll
    for (int half = 0; half < 2; half++) state.keys[half] = walk.keys_of(a, piece, row + 8 * half, a.rows);
    if (walk.count > 0) {
        load_queries<C>(a, piece, kv_group, first_row, shared + consumer * C::Q_BYTES, thread);
        if constexpr (C::RULED) {
            if (thread == 0) scores.piece.fill(a, piece);
            if (thread < GROUP_ROWS)
                fill_row_score(scores.rows[thread], a, piece, first_row + thread, kv_group,
                               ruled_piece::origin_of(a, piece));
        }
        copy_async_wait<0>();
        async_proxy_fence();
        named_sync(1 + consumer, WARPGROUP);
        attend_by_rules<C>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
    }
    store_state<C>(a, piece, kv_group, state, row, lane);
}

/* How many warpgroups a piece has rows for, at least one; those that take turns are all needed for that. */
template <typename C>
__device__ int busy_consumers(const cpa_cuda_piece &piece) {
    return C::TURNS ? C::CONSUMERS : max((piece.row_end - piece.row_begin + GROUP_ROWS - 1) / GROUP_ROWS, 1);
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, 1) attend_hopper(const __grid_constant__ hopper_args args) {
    extern __shared__ char shared[];
    __shared__ cpa_cuda_piece piece;
    __shared__ hopper_walk<C> walk;
    __shared__ stage_barriers<C> barriers;
    __shared__ group_scores<C> scores[C::RULED ? C::CONSUMERS : 1];
    const cpa_cuda_attend_args &a = args.a;
    const cta_work work(a, blockIdx.x);
    const int kv_group = work.kv_group;
    const uint32_t tiles = (shared_address(shared) + TILE_ALIGNMENT - 1) / TILE_ALIGNMENT * TILE_ALIGNMENT;
    /* Shuffled, so that the compiler knows that a warp has one: descriptors then stay in uniform registers. */
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0), thread = threadIdx.x % WARPGROUP;
    if (threadIdx.x == 0) {
        piece = a.pieces[work.piece];
        if (!C::ROWS) {
            prefetch_map(&args.maps.k);
            prefetch_map(&args.maps.v);
        }
        if (C::TAIL > 0) {
            prefetch_map(&args.maps.k_tail);
            prefetch_map(&args.maps.v_tail);
        }
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared_address(&barriers.k_full[stage]), C::LOADERS);
            barrier_init(shared_address(&barriers.k_empty[stage]), busy_consumers<C>(piece) * C::KEY_READERS);
        }
        for (int stage = 0; stage < C::V_STAGES; stage++) {
            barrier_init(shared_address(&barriers.v_full[stage]), C::LOADERS);
            barrier_init(shared_address(&barriers.v_empty[stage]), busy_consumers<C>(piece) * (WARPGROUP / 32));
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (!a.rows && piece.row_begin == piece.row_end) return; /* fills a reserved plan up */
    if constexpr (C::RULED) {
        static_assert(sizeof(typename hopper_walk<C>::scratch) <= C::SHARED_BYTES - TILE_ALIGNMENT, "before any tile");
        walk.start(a, piece, *(typename hopper_walk<C>::scratch *)(shared + (tiles - shared_address(shared))));
        async_proxy_fence(); /* the tiles come where that was */
    } else {
        walk.start(a, piece, a.rows);
    }
    if (a.rows) { /* the decode kernel behind may take the multiprocessors that are left over, then those of this one */
        dependent_wait();
        dependent_allow();
    }
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        const int warp = thread / 32 % LOADING_PAIR, lane = thread % 32;
        const bool keys = thread < 32 * LOADING_PAIR;
        if constexpr (C::ROWS) {
            if (keys) {
                load_rows<C, CPA_KEYS>(a, piece, walk, kv_group, tiles + C::K_AT, barriers.k_full, barriers.k_empty,
                                       warp, lane);
            } else {
                load_rows<C, CPA_VALUES>(a, piece, walk, kv_group, tiles + C::V_AT, barriers.v_full, barriers.v_empty,
                                         warp, lane);
            }
        } else {
            const int warps = args.box < FEW_ROWS ? LOADING_PAIR : 1, row = (lane * warps + warp) * args.box;
            if (warp >= warps) return;
            if (keys) {
                load_tiles<C, C::K_DIM, C::SCALED>(args, &args.maps.k, &args.maps.k_tail, piece, walk, kv_group,
                                                   tiles + C::K_AT, tiles + C::SCALES_AT, barriers.k_full,
                                                   barriers.k_empty, row);
            } else {
                load_tiles<C, C::V_COLUMNS, false>(args, &args.maps.v, &args.maps.v_tail, piece, walk, kv_group,
                                                   tiles + C::V_AT, 0, barriers.v_full, barriers.v_empty, row);
            }
        }
    } else if (warpgroup <= busy_consumers<C>(piece)) {
        registers_grow<C::CONSUMER_REGISTERS>();
        consume<C>(a, piece, walk, kv_group, scores[C::RULED ? warpgroup - 1 : 0], tiles, barriers, warpgroup - 1,
                   thread);
    }
}

template <typename C>
cpa_status launch(const hopper_args &args, int32_t n_pieces, cpa_stream *stream) {
    static uint64_t prepared;
    cpa_status status = cpa_cuda_shared_memory(stream, (const void *)attend_hopper<C>, C::SHARED_BYTES, &prepared);
    if (status != CPA_OK) return status;
    return cpa_cuda_check(&stream->error,
                          launch_dependent(attend_hopper<C>, dim3(n_pieces * args.a.kv_heads), C::THREADS, args,
                                           args.a.early, cpa_cuda_handle(stream), C::SHARED_BYTES),
                          "attend");
}

template <typename Element, key_loads Loads, bool Ruled>
cpa_status launch_widths(const hopper_args &args, int32_t n_pieces, cpa_stream *stream) {
    constexpr bool TAILED = Loads == BOXES && !Ruled;
    const int shape = shape_of(args.a.k_dim, args.a.v_dim, TAILED, Ruled, args.flat);
    switch (shape) {
        case NARROW: return launch<config<Element, NARROW, Loads, Ruled>>(args, n_pieces, stream);
        case SQUARE: return launch<config<Element, SQUARE, Loads, Ruled>>(args, n_pieces, stream);
    }
    if constexpr (!Ruled)
        if (shape == WIDE_KEYS) return launch<config<Element, WIDE_KEYS, Loads, Ruled>>(args, n_pieces, stream);
    if constexpr (Loads == BOXES_AND_SCALES) {
        return cpa_cuda_check(&stream->error, cudaErrorNotSupported, "attend: heads too wide for scales of keys");
    } else if constexpr (TAILED) {
        if (shape == FLAT_72) return launch<config<Element, FLAT_72, Loads, Ruled>>(args, n_pieces, stream);
        if (shape == TAILED_80) return launch<config<Element, TAILED_80, Loads, Ruled>>(args, n_pieces, stream);
        if (shape == TAILED_96) return launch<config<Element, TAILED_96, Loads, Ruled>>(args, n_pieces, stream);
        return launch<config<Element, WIDE, Loads, Ruled>>(args, n_pieces, stream);
    } else {
        return launch<config<Element, WIDE, Loads, Ruled>>(args, n_pieces, stream);
    }
}

template <typename Element, bool Ruled>
cpa_status launch_loads(const hopper_args &args, int32_t n_pieces, cpa_stream *stream) {
    if (args.a.k_scales) return launch_widths<Element, BOXES_AND_SCALES, Ruled>(args, n_pieces, stream);
    if (cpa_cuda_hopper_takes_rows(1 << args.a.block_shift))
        return launch_widths<Element, EACH_ROW, Ruled>(args, n_pieces, stream);
    return launch_widths<Element, BOXES, Ruled>(args, n_pieces, stream);
}

template <typename Element>
cpa_status launch_rules(const hopper_args &args, int32_t n_pieces, cpa_stream *stream) {
    return args.a.score.any ? launch_loads<Element, true>(args, n_pieces, stream)
                            : launch_loads<Element, false>(args, n_pieces, stream);
}

} // namespace

extern "C" int32_t cpa_cuda_hopper_box(int32_t k_dim, int32_t v_dim, int32_t block_size, int32_t ruled) {
    const int32_t keys = keys_of(shape_of(k_dim, v_dim, true, ruled, false), ruled);
    return block_size < keys ? block_size : keys;
}

extern "C" int32_t cpa_cuda_hopper_rows(int32_t k_dim, int32_t v_dim, int32_t block_size, int32_t ruled) {
    const bool flat = block_size == CPA_TENSOR_BLOCK;
    return TILES[shape_of(k_dim, v_dim, !ruled, ruled, flat)].consumers * GROUP_ROWS;
}

extern "C" int32_t cpa_cuda_hopper_tail(int32_t k_dim, int32_t v_dim) {
    return tail_of(shape_of(k_dim, v_dim, true, false, false));
}

extern "C" cpa_status cpa_cuda_attend_hopper(const cpa_cuda_attend_args *args, const cpa_cuda_hopper_maps *maps,
                                             int32_t n_pieces, cpa_stream *stream) {
    const int32_t box = cpa_cuda_hopper_box(args->k_dim, args->v_dim, 1 << args->block_shift, args->score.any);
    const hopper_args all = {*maps, *args, box, 1 << args->block_shift == CPA_TENSOR_BLOCK};
    return args->q_dtype == CPA_BF16 ? launch_rules<__nv_bfloat16>(all, n_pieces, stream)
                                     : launch_rules<__half>(all, n_pieces, stream);
}
