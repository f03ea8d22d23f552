/* attend over few rows and many keys of a cache of codes (cpattn/shape.h), for the rate at which memory gives their
 * bytes. That leaves some 500 instructions of a scheduler for 16 keys and values of 128 columns, so that
 *     keys are the rows of the products (packed_keys.cuh), and the query heads of a group their columns: half as many
 *       products as with rows of queries, and no column is empty from 8 heads on
 *     a byte of codes finds the two centroids that it stands for in a table, at once
 *     the squares of a key are summed two at once, and what lanes have of them by a product with ones
 *     codes of values become fp16 by a mask (packed_values.cuh)
 * The scale of a value is part of its probability: with m the scale and b the least element of a value, P = 2^(score +
 * log2 m - reference), O = P codes + P b / m, and the sum of probabilities that of P / m. The reference was the largest
 * score + log2 m when it last had to rise, less RAISED, since fp16 has few exponents, unless that would be rounded.
 *
 * A warp takes two runs of 16 keys at a time, through stages of its own, without a barrier; plans, pieces, and what is
 * done at the end of one are those of decode_kernel.cuh. */
#ifndef CPA_CUDA_DECODE_PACKED_CUH
#define CPA_CUDA_DECODE_PACKED_CUH

#include <type_traits>

#include "base/dependent.cuh"
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/decode_warp.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/attend/packed_feed.cuh"
#include "kernels/cuda/attend/packed_keys.cuh"
#include "kernels/cuda/attend/packed_values.cuh"

namespace {

constexpr float RAISED = 15;            /* log2 of P of a score that the reference follows */
constexpr float HIGHEST = 15.9f;        /* log2 of P up to which the reference stays as it is */
constexpr float MOST_RAISED = 0x1p23f;  /* scores from which on a difference of RAISED may be rounded to more */
constexpr float LEAST_SCALE = 0x1p-80f; /* that stands for 0, of values whose elements are all the same */

/* The reference of the probabilities of a column whose largest score + log2 m is `top`. */
__device__ inline float reference_of(float top) {
    return fabsf(top) < MOST_RAISED ? top - RAISED : top;
}

/* Ends: what is known of rows beside their codes. Ctas: of a multiprocessor, which 12 warps fill. */
template <typename Element, typename Keys, typename Values, typename Ends, int Heads, int Ctas>
struct config {
    using element = Element;
    using keys = Keys;
    using sums = packed_sums<Values>;
    using ends = Ends;
    using k_rows = typename keys::rows;
    using v_rows = typename sums::rows;
    static constexpr int K_DIM = PACKED_DIM, V_DIM = PACKED_DIM, STAGES = 2;
    static constexpr int CTAS = Ctas, WARPS = 12 / Ctas, THREADS = 32 * WARPS;
    static constexpr int HEADS = Heads, TILES = 1, GANGS = WARPS / HEADS;
    static constexpr int K_BYTES = RUNS * k_rows::RUN_BYTES, WORDS_AT = K_BYTES + RUNS * v_rows::RUN_BYTES;
    static constexpr int STAGE_BYTES = WORDS_AT + (Ends::WORDS ? 2 * KEYS * 4 : 0);
    static constexpr int WARP_BYTES = STAGES * STAGE_BYTES, STAGES_AT = keys::SQUARED ? CENTROID_PAIRS_BYTES : 0;
    static constexpr int SHARED_BYTES = STAGES_AT + WARPS * WARP_BYTES;
    /* Whether registers are there for what is the same for all tiles of keys, beside so many tiles of queries. */
    template <int Queries>
    static constexpr bool HAS_ROOM = Queries == 1 && sums::TILES <= 8;
    static_assert(STAGE_BYTES % 128 == 0 || Ends::WORDS == false, "rows that change places begin with the banks");
};

/* The queries of a head of a piece as fp16, rotated as keys are, each over a power of two that leaves its largest
 * element between 1 and 2; what a row's products are to be multiplied by, for scores in powers of two; and the sums of
 * rows, times that. */
template <int ROWS>
struct packed_query_rows {
    __half row[ROWS][PACKED_DIM + 8];
    float scale[ROWS], sum[ROWS];
    row_keys bounds[ROWS];
};
using packed_queries = packed_query_rows<CPA_CUDA_DECODE_ROWS>;

/* Those of the CTA's heads, of the rows from row_begin on. Called by all threads of the CTA; ends with a barrier. */
template <typename C, int ROWS>
__device__ void take_packed_queries(packed_query_rows<ROWS> (&queries)[C::HEADS], const cpa_cuda_attend_args &a,
                                    const cpa_cuda_piece &piece, int row_begin, const key_walk<KEYS> &walk,
                                    int kv_group, int warp, int lane) {
    using element = typename C::element;
    constexpr int WIDTH = PACKED_DIM / WARP_LANES;
    for (int i = warp; i < C::HEADS * ROWS; i += C::WARPS) {
        const int of_head = i / ROWS, row = i % ROWS, head = kv_group + of_head;
        float x[TQ_WIDTH] = {}, largest = 0, sum = 0;
        if (row_begin + row < piece.row_end) {
            const row_place place(a, piece.q_row, row_begin + row, head);
            const uint2 four = *(const uint2 *)((const element *)queries_of(a, piece) +
                                                place.state_row * a.q_row_stride + place.head * a.q_head_stride +
                                                lane * WIDTH);
            for (int e = 0; e < WIDTH; e++) x[e] = to_float(((const element *)&four)[e]);
        }
        if (C::keys::SQUARED) { /* centroids are of rotated keys */
            tq_rotate(x, WIDTH, lane);
            for (int e = 0; e < WIDTH; e++) x[e] = to_float(from_float<element>(x[e] * rsqrtf((float)PACKED_DIM)));
        }
        for (int e = 0; e < WIDTH; e++) largest = fmaxf(largest, fabsf(x[e]));
        largest = warp_max(largest);
        const uint32_t exponent = min(max(__float_as_uint(largest) & 0x7f800000u, 1u << 23), 252u << 23);
        const float inverse = __uint_as_float((254u << 23) - exponent);
        const uint32_t pairs[2] = {pack_pair<__half>(x[0] * inverse, x[1] * inverse),
                                   pack_pair<__half>(x[2] * inverse, x[3] * inverse)};
        *(uint2 *)&queries[of_head].row[row][lane * WIDTH] = make_uint2(pairs[0], pairs[1]);
        for (int e = 0; e < WIDTH; e++) sum += to_float(((const __half *)pairs)[e]);
        sum = warp_sum(sum);
        if (lane == 0) {
            const float scale = __uint_as_float(exponent) * C::ends::keys_scale(a, head) * a.scale_log2;
            queries[of_head].scale[row] = scale;
            queries[of_head].sum[row] = sum * scale;
            queries[of_head].bounds[row] = walk.keys_of(a, piece, row_begin + row);
        }
    }
    __syncthreads();
}

/* What a warp has of the columns of queries: tiles of 8, of which a lane has two each, 2 (lane mod 4) and the next. */
template <typename C, int TILES>
struct column_state {
    float o[TILES][C::sums::TILES][4];
    float base[TILES][2];                     /* reference of the probabilities */
    float sum[TILES][2], least_sum[TILES][2]; /* of P / m and of P b / m, over the keys of this lane's rows */

    __device__ column_state() {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                base[t][e] = CPA_LOWEST_EXPONENT;
                sum[t][e] = least_sum[t][e] = 0;
            }
#pragma unroll
            for (int n = 0; n < C::sums::TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[t][n][e] = 0;
        }
    }
    /* The references of a tile of columns follow the largest scores + log2 m of each, of which lanes have `top`. */
    __device__ void follow(int t, const float (&top)[2]) {
        float keep[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float most = top[e];
            for (int step = 4; step < WARP_LANES; step *= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
            const float next = most - base[t][e] > HIGHEST ? reference_of(most) : base[t][e];
            keep[e] = exp2_fast(base[t][e] - next);
            base[t][e] = next;
            sum[t][e] *= keep[e], least_sum[t][e] *= keep[e];
        }
#pragma unroll
        for (int n = 0; n < C::sums::TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[t][n][e] *= keep[e % 2];
    }
};

/* The queries as operands B: in registers, or of two tiles where they lie. */
template <typename C, int TILES>
struct query_columns {
    uint32_t q[C::K_DIM / 16][2];

    template <int ROWS>
    __device__ query_columns(const packed_query_rows<ROWS> &queries, uint32_t phase, int lane) {
#pragma unroll
        for (int step = 0; step < C::K_DIM / 16; step++)
#pragma unroll
            for (int pair = 0; pair < 2; pair++)
                q[step][pair] = *(const uint32_t *)&queries.row[lane / 4][C::keys::dim(step, pair, phase, lane)];
    }
    __device__ uint32_t pair_of(int, int step, int pair) const { return q[step][pair]; }
};
template <typename C>
struct query_columns<C, 2> {
    const __half *row;
    uint32_t phase;
    int lane;

    __device__ query_columns(const packed_queries &queries, uint32_t k_phase, int of_lane)
        : row(queries.row[of_lane / 4]), phase(k_phase), lane(of_lane) {}
    __device__ uint32_t pair_of(int tile, int step, int pair) const {
        const __half *from = row + tile * (8 * (PACKED_DIM + 8)) + C::keys::dim(step, pair, phase, lane);
        return *(const volatile uint32_t *)from;
    }
};

/* Where a warp finds a run's rows and their words. */
struct run_places {
    uint32_t keys, values, k_words, v_words, k_phase, v_phase;
};

/* What is known of this lane's keys r and r + 8 of a run, and of their values. */
struct packed_ends {
    float factor[2], shift[2];               /* a score is product * factor + shift * sum of the query */
    float log2_m[2], inverse_m[2], least[2]; /* least: b / m */

    __device__ void take_value(int i, float m, float b) {
        const float divisor = fmaxf(m, LEAST_SCALE);
        log2_m[i] = log2_fast(divisor);
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse_m[i]) : "f"(divisor));
        least[i] = b * inverse_m[i];
    }
    /* Of the keys r + i, those from `keys` on have no value. */
    __device__ void end_at(int keys) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (8 * i >= keys) inverse_m[i] = least[i] = 0;
    }
};

/* Behind the codes of a key its length, of whose squares those of the codes are no part; behind those of a value m and
 * b. */
template <typename Keys, typename Values>
struct turboquant_ends : packed_ends {
    static constexpr bool WORDS = false, SHIFTS = false;

    static __device__ float keys_scale(const cpa_cuda_attend_args &, int) { return 1; }
    static __device__ float values_scale(const cpa_cuda_attend_args &, int) { return 1; }
    static __device__ float half_at(uint32_t address) {
        return __half2float(__ushort_as_half((uint16_t)load_shared_half(address)));
    }
    /* squares: sums of the keys' */
    __device__ void take(const cpa_cuda_attend_args &, const run_places &at, const float (&squares)[2], int lane) {
        const int row = lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            factor[i] = 1;
            if constexpr (Keys::SQUARED) {
                const uint32_t length = at.keys + (row + 8 * i) * Keys::rows::PITCH + at.k_phase + Keys::CODE_BYTES;
                float inverse;
                asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(squares[i]));
                factor[i] = half_at(length) * inverse;
            }
            const uint32_t behind = at.values + (row + 8 * i) * Values::rows::PITCH + at.v_phase + Values::CODE_BYTES;
            take_value(i, half_at(behind), half_at(behind + 2));
        }
    }
};

/* Words of rows, or what stands for them (kernels/cuda/cache/quant.cuh). */
template <typename Codes, typename Bytes>
struct word_ends : packed_ends {
    static constexpr bool WORDS = true, SHIFTS = Bytes::HAS_ZERO;

    static __device__ float keys_scale(const cpa_cuda_attend_args &a, int head) {
        return head_scale(1, a.k_head_scales, a.head_scale_step, head);
    }
    static __device__ float values_scale(const cpa_cuda_attend_args &a, int head) {
        return head_scale(1, a.v_head_scales, a.head_scale_step, head);
    }
    /* What is taken from a code that is offset by 128. */
    static __device__ float zero(uint32_t word) { return Bytes::HAS_ZERO ? (float)(int)((word & 0xff) ^ 0x80) : 0; }

    __device__ void take(const cpa_cuda_attend_args &a, const run_places &at, const float (&)[2], int lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t of_key = Codes::word(a.k_scale), of_value = Codes::word(a.v_scale);
            if (a.k_words_at) {
                of_key = load_shared_word(at.k_words + (lane / 4 + 8 * i) * 4);
                of_value = load_shared_word(at.v_words + (lane / 4 + 8 * i) * 4);
            }
            const float scale = Codes::scale(of_key), m = Codes::scale(of_value);
            factor[i] = scale * Bytes::UNIT;
            shift[i] = -zero(of_key) * scale;
            take_value(i, m, -zero(of_value) * m);
        }
    }
};

/* A matrix of 8 x 8 pairs' elements, transposed: of C's rows and columns, B's. */
__device__ inline uint32_t transposed(uint32_t pairs) {
    uint32_t of_columns;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_columns) : "r"(pairs));
    return of_columns;
}

template <typename C, int TILES>
using feed_of = packed_feed<C, C::template HAS_ROOM<TILES>>;

/* N runs of a stage, from run `first` of it on. */
template <typename C, int TILES, int N, typename Queries, typename Feed>
__device__ void attend_packed(const cpa_cuda_attend_args &a, column_state<C, TILES> &state,
                              const query_columns<C, TILES> &q, const Queries &queries, const typename C::keys &keys,
                              const typename C::sums &sums, const Feed &feed, uint32_t stage, int first, bool masked,
                              int sinks, int key, int lane) {
    const uint32_t k_runs = feed.keys_at(stage) + first * C::k_rows::RUN_BYTES,
                   v_runs = feed.values_at(stage) + first * C::v_rows::RUN_BYTES;
    float s[N][TILES][4];
    typename C::ends ends[N];
#pragma unroll
    for (int run = 0; run < N; run++) {
        float squares[2];
        keys.template score<TILES>(s[run], squares, q, k_runs + run * C::k_rows::RUN_BYTES);
        const run_places at = {k_runs + run * C::k_rows::RUN_BYTES,
                               v_runs + run * C::v_rows::RUN_BYTES,
                               stage + C::WORDS_AT + (first + run) * (RUN * 4),
                               stage + C::WORDS_AT + (KEYS + (first + run) * RUN) * 4,
                               feed.k_phase,
                               feed.v_phase};
        ends[run].take(a, at, squares, lane);
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = 8 * t + 2 * (lane % 4) + e % 2, i = e / 2;
                float &x = s[run][t][e];
                x = fmaf(x * ends[run].factor[i], queries.scale[column], ends[run].log2_m[i]);
                if (C::ends::SHIFTS) x = fmaf(ends[run].shift[i], queries.sum[column], x);
            }
    }
    if (masked) {
        if constexpr (Feed::LEAVES_TAILS) { /* what is behind the last key may be anything */
#pragma unroll
            for (int run = 0; run < N; run++) ends[run].end_at(feed.k_end - key - (first + run) * RUN - lane / 4);
        }
#pragma unroll
        for (int run = 0; run < N; run++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!sees(queries.bounds[8 * t + 2 * (lane % 4) + e % 2], sinks,
                              key + (first + run) * RUN + lane / 4 + e / 2 * 8))
                        s[run][t][e] = -INFINITY;
    }
    uint32_t p[N][TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float top[2];
        bool higher = false;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            top[e] = -INFINITY;
#pragma unroll
            for (int run = 0; run < N; run++) top[e] = fmaxf(top[e], fmaxf(s[run][t][e], s[run][t][2 + e]));
            higher |= top[e] - state.base[t][e] > HIGHEST;
        }
        if (__any_sync(0xffffffff, higher)) state.follow(t, top); /* the largest settle early: most tiles skip this */
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int run = 0; run < N; run++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &x = s[run][t][2 * i + e];
                    x = exp2_fast(x - state.base[t][e]);
                    state.sum[t][e] = fmaf(x, ends[run].inverse_m[i], state.sum[t][e]);
                    state.least_sum[t][e] = fmaf(x, ends[run].least[i], state.least_sum[t][e]);
                }
            }
        }
#pragma unroll
        for (int run = 0; run < N; run++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                p[run][t][i] = transposed(pack_pair<__half>(s[run][t][2 * i], s[run][t][2 * i + 1]));
    }
#pragma unroll
    for (int run = 0; run < N; run++)
        sums.template add<TILES>(state.o, p[run], v_runs + run * C::v_rows::RUN_BYTES);
}

/* Leaves a warp's columns, `rows` of them, as rows where join_warps takes them from. */
template <typename C, int TILES>
__device__ void leave_columns(const column_state<C, TILES> &state, const typename C::sums &sums,
                              const cpa_cuda_attend_args &a, int kv_head, int rows, warp_states<C> &states, float *o,
                              int warp, int lane) {
    const float worth = C::ends::values_scale(a, kv_head);
    o += states.rows_of(warp);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 8 * t + 2 * (lane % 4) + e;
            float sum = state.sum[t][e], least_sum = state.least_sum[t][e];
            for (int step = 4; step < WARP_LANES; step *= 2) {
                sum += __shfl_xor_sync(0xffffffff, sum, step);
                least_sum += __shfl_xor_sync(0xffffffff, least_sum, step);
            }
            if (row < rows && lane / 4 == 0) {
                states.max[warp][row] = fmaxf(__fdividef(state.base[t][e], a.scale_log2), -FLT_MAX);
                states.sum[warp][row] = sum;
            }
            sums.store(o + row * states.PITCH, row < rows, state.o[t], e, worth, least_sum * worth, lane);
        }
    }
}

/* A piece: the tiles that each warp takes of it. prefetches: while the kernel before this one ends. */
template <typename C, int TILES>
__device__ void attend_columns(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                               const key_walk<KEYS> &in_shared, bool prefetches, packed_queries (&queries)[C::HEADS],
                               warp_states<C> &states, char *shared, int kv_group, int warp, int lane) {
    /* In registers, if there are any. */
    using walk_type = const key_walk<KEYS>;
    typename std::conditional<C::template HAS_ROOM<TILES>, walk_type, walk_type &>::type walk = in_shared;
    const uint32_t stages = shared_address(shared) + warp * C::WARP_BYTES;
    const packed_queries &own = queries[warp % C::HEADS];
    const int gang = warp / C::HEADS;
    feed_of<C, TILES> feed(a, piece, walk, kv_group + warp % C::HEADS, gang, lane);
    if (prefetches) feed.prefetch(a, walk, gang, lane);
    if (!piece.ready && !a.beside_shared) { /* only the plan, and what is ready, has been read so far */
        dependent_wait();
        dependent_allow();
    }
    for (int i = 0; i < C::STAGES; i++) feed.fill(a, walk, gang + i * C::GANGS, stages + i * C::STAGE_BYTES, lane);
    take_packed_queries<C>(queries, a, piece, piece.row_begin, walk, kv_group, warp, lane);
    column_state<C, TILES> state;
    const query_columns<C, TILES> q(own, feed.k_phase, lane);
    const typename C::keys keys(feed.k_phase, lane);
    const typename C::sums sums(feed.v_phase, lane);
    uint32_t stage = stages;
    for (int i = gang; i < walk.count; i += C::GANGS) {
        const int tile = walk.tile(i);
        copy_async_wait<C::STAGES - 1>();
        __syncwarp();
        constexpr int AT_ONCE = TILES == 1 ? RUNS : 1; /* more would make registers spill */
#pragma unroll 1
        for (int first = 0; first < RUNS; first += AT_ONCE)
            attend_packed<C, TILES, AT_ONCE>(a, state, q, own, keys, sums, feed, stage, first, walk.masked(tile),
                                             walk.sinks, tile * KEYS, lane);
        __syncwarp();
        feed.fill(a, walk, i + C::STAGES * C::GANGS, stage, lane);
        stage = stage + C::STAGE_BYTES == stages + C::WARP_BYTES ? stages : stage + C::STAGE_BYTES;
    }
    copy_async_wait<0>();
    __syncwarp();
    leave_columns<C, TILES>(state, sums, a, feed.kv_head, piece.row_end - piece.row_begin, states, (float *)shared,
                            warp, lane);
}

template <typename C>
__global__ void __launch_bounds__(C::THREADS, C::CTAS)
    attend_decode_packed(const __grid_constant__ cpa_cuda_attend_args a) {
    extern __shared__ __align__(128) char shared[];
    char *const stages = shared + C::STAGES_AT;
    __shared__ cpa_cuda_piece pieces[C::WARPS]; /* a copy for each warp, which waits for no other at the start */
    __shared__ key_walk<KEYS> walks[C::WARPS];
    __shared__ warp_states<C> states;
    __shared__ __align__(16) packed_queries queries[C::HEADS];
    const int kv_group = blockIdx.x * C::HEADS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const cpa_cuda_piece &piece = pieces[warp];
    key_walk<KEYS> &walk = walks[warp];
    bool waited = false;
    if constexpr (C::keys::SQUARED) fill_centroid_pairs<C::keys::BITS>(shared, threadIdx.x, C::THREADS);
    for (int at = blockIdx.y; at >= 0; at = piece.next) {
        copy_piece(pieces[warp], a.pieces[at], lane);
        walk.start_warp(a, piece, lane);
        const bool prefetches = a.early && !waited && !piece.ready && !a.beside_shared;
        waited |= !piece.ready;
        if (piece.row_end - piece.row_begin <= 8) {
            attend_columns<C, 1>(a, piece, walk, prefetches, queries, states, stages, kv_group, warp, lane);
        } else {
            attend_columns<C, 2>(a, piece, walk, prefetches, queries, states, stages, kv_group, warp, lane);
        }
        store_rows<C>(a, piece, kv_group, states, (const float *)stages, warp, lane);
    }
    dependent_wait(); /* what comes behind takes this kernel's end for that of the one before it */
    dependent_allow();
}

template <typename C>
cpa_status launch(const cpa_cuda_attend_launch *l, cpa_stream *stream) {
    static uint64_t prepared;
    return launch_decode<C>(attend_decode_packed<C>, &prepared, l, stream);
}

} // namespace

#endif
