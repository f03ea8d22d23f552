/* attend over prefill tiles on compute capability 9.0 (FlashAttention-3, Shah et al., arXiv:2407.08608): a warpgroup
 * that loads pages by bulk tensor copies, or row by row where pages are of few tokens; two or three that multiply by
 * wgmma, 64 rows each. The scores of the next tile are multiplied while the softmax of this one runs, and two take
 * turns with the tensor cores. */
#include "base/dependent.cuh"
#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/hopper.cuh"
#include "kernels/cuda/attend/hopper_tiles.cuh"
#include "kernels/cuda/attend/listed_walk.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/wgmma.cuh"

namespace {

constexpr int NO_BLOCK = -1; /* outside the pool: reads zeros */

struct hopper_args {
    cpa_cuda_hopper_maps maps;
    cpa_cuda_attend_args a;
    int32_t box;  /* tokens in a box of the maps */
    int32_t flat; /* tensors without pages: the maps have one block, and tables hold the first row of an item */
};

template <typename C>
using hopper_walk = typename std::conditional<C::RULED, listed_walk<C::KEYS>, key_walk<C::KEYS>>::type;

/* Barriers of the stages: full when the bytes are there, empty when all consumers are done with them. */
struct stage_barriers {
    uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

/* The n-th tile in the order of the walk backwards: stage n mod STAGES, in its n / STAGES-th phase. */
__device__ inline uint32_t phase_of(int n) {
    return (n / STAGES) & 1;
}

/* ---- the loading warps, one for keys and one for values ---- */

/* Where a lane's box of tokens of a tile lies. */
struct box_place {
    int block, token;
};

/* The j-th box of a tile belongs to lane j. Boxes past the last key lie nowhere. */
template <typename C>
__device__ box_place place_of(const hopper_args &args, const cpa_cuda_piece &piece, int tile, int lane) {
    const int row = lane * args.box, key = tile * C::KEYS + row;
    const bool inside = row < C::KEYS && key < piece.k_end;
    const int block = inside ? __ldg(args.a.tables + piece.table + (key >> args.a.block_shift)) : NO_BLOCK;
    if (args.flat) return {min(block, 0), block + key};
    return {block, key & ((1 << args.a.block_shift) - 1)};
}

/* The tiles of keys, or of values, of DIM columns: every lane copies its box, one copy for every 64 columns and one for
 * the rest, and the scales of its keys if they have any (of a box that lies nowhere, those of some others: nobody sees
 * it). */
template <typename C, int DIM, bool SCALES>
__device__ void load_tiles(const hopper_args &args, const CUtensorMap *map, const CUtensorMap *tail_map,
                           const cpa_cuda_piece &piece, const hopper_walk<C> &walk, int kv_head, uint32_t tiles,
                           uint32_t scales, uint64_t (&full)[STAGES], uint64_t (&empty)[STAGES], int lane) {
    constexpr int BYTES = C::KEYS * DIM * 2;
    const int count = walk.count, row = lane * args.box;
    if (count == 0) return;
    box_place next = place_of<C>(args, piece, walk.tile(count - 1), lane);
    for (int n = 0; n < count; n++) {
        const int stage = n % STAGES;
        const uint32_t barrier = shared_address(&full[stage]), shared = tiles + stage * BYTES;
        const box_place place = next;
        if (n + 1 < count) next = place_of<C>(args, piece, walk.tile(count - 2 - n), lane); /* before the waiting */
        barrier_wait(shared_address(&empty[stage]), phase_of(n) ^ 1);
        if (lane == 0) barrier_expect(barrier, BYTES + (SCALES ? C::SCALE_BYTES : 0));
        __syncwarp();
        if (SCALES && row < C::KEYS) {
            const int64_t head_of_block = (int64_t)max(place.block, 0) * args.a.kv_heads + kv_head;
            copy_row(scales + stage * C::SCALE_BYTES + row * 4,
                     args.a.k_scales + (head_of_block << args.a.block_shift) + place.token, args.box * 4, barrier);
        }
        if (row < C::KEYS) {
#pragma unroll
            for (int part = 0; part < DIM / COLUMNS; part++)
                copy_box(shared + (part * C::KEYS + row) * COLUMNS * 2, map, barrier, part * COLUMNS, place.token,
                         kv_head, place.block);
            if constexpr (C::TAIL > 0)
                copy_box(shared + C::KEYS * (DIM - C::TAIL) * 2 + row * C::TAIL * 2, tail_map, barrier, DIM - C::TAIL,
                         place.token, kv_head, place.block);
        }
        __syncwarp();
    }
}

/* ---- the loading warps where pages are of few tokens, two for keys and two for values ---- */

/* A warp's half of the rows of a tile: each lane looks some up, the others learn of them by shuffles. */
template <typename C, cpa_kv_part PART>
struct row_places {
    static constexpr int SHARE = C::KEYS / LOADING_PAIR, EACH = SHARE / 32;
    static constexpr int64_t NOWHERE = -1;
    int64_t offset[EACH]; /* elements, of the lane-th row of every 32 */

    __device__ void look_up(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int tile, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int key = tile * C::KEYS + warp * SHARE + i * 32 + lane;
            offset[i] = NOWHERE;
            if (key >= piece.k_end) continue;
            const int64_t block = __ldg(a.tables + piece.table + (key >> a.block_shift));
            offset[i] = block * (PART == CPA_KEYS ? a.k_block_stride : a.v_block_stride) +
                        (key & ((1 << a.block_shift) - 1)) * (PART == CPA_KEYS ? a.k_token_stride : a.v_token_stride);
        }
    }
};

/* The tiles of keys, or of values, swizzled as bulk copies write them: 8 lanes copy 64 columns of a row, a warp those
 * of 4 rows at once. Past the last key and past the width of the head they are zeros. */
template <typename C, cpa_kv_part PART>
__device__ void load_rows(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, const hopper_walk<C> &walk,
                          int kv_head, uint32_t tiles, uint64_t (&full)[STAGES], uint64_t (&empty)[STAGES], int warp,
                          int lane) {
    constexpr int DIM = PART == CPA_KEYS ? C::K_DIM : C::V_DIM, BYTES = C::KEYS * DIM * 2;
    constexpr int LANES = COLUMNS / 8, ROWS = 32 / LANES;
    using places = row_places<C, PART>;
    const int count = walk.count, chunk = lane % LANES, within = lane / LANES;
    if (count == 0) return;
    /* The chunks of a row change places by the row's last three bits, of which `within` has two. */
    const uint32_t row_at = tiles + (warp * places::SHARE + within) * (COLUMNS * 2);
    const uint32_t even = row_at + (chunk ^ within) * 16, odd = row_at + (chunk ^ within ^ ROWS) * 16;
    const char *pool = PART == CPA_KEYS ? a.k : a.v;
    pool += (kv_head * (PART == CPA_KEYS ? a.k_head_stride : a.v_head_stride) + chunk * 8) * 2;
    places rows;
    rows.look_up(a, piece, walk.tile(count - 1), warp, lane);
    for (int n = 0; n < count; n++) {
        const int stage = n % STAGES;
        barrier_wait(shared_address(&empty[stage]), phase_of(n) ^ 1);
#pragma unroll
        for (int row = 0; row < places::SHARE; row += ROWS) {
            const int64_t offset = __shfl_sync(0xffffffff, rows.offset[row / 32], row % 32 + within);
            const uint32_t to = (row / ROWS % 2 ? odd : even) + stage * BYTES + row * (COLUMNS * 2);
            const char *from = pool + max(offset, (int64_t)0) * 2;
#pragma unroll
            for (int part = 0; part < DIM / COLUMNS; part++)
                copy_async_16(to + part * (C::KEYS * COLUMNS * 2), from + part * (COLUMNS * 2),
                              offset != places::NOWHERE &&
                                  part * COLUMNS + chunk * 8 < (PART == CPA_KEYS ? a.k_dim : a.v_dim));
        }
        copy_async_commit();
        if (n + 1 < count) rows.look_up(a, piece, walk.tile(count - 2 - n), warp, lane);
        copy_async_wait<0>();
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&full[stage]));
    }
}

/* ---- a consuming warpgroup ---- */

/* What a loop over tiles is compiled for, as code that others need would lie in its way: no rules; ALiBi and a temperature
 * over linear keys; a softcap alone, in bf16; bits alone, over linear keys; and any. */
enum loop_rules { NO_RULES, SLOPES, SOFTCAP, BITS, ANY_RULES };

/* The rules of a thread's two rows: what makes natural logarithms and those in base 2 of their scores, the slope of ALiBi
 * in the unit of scores, and what it adds to all scores of a tile that the thread has of a row. */
struct thread_rules {
    float scale[2], slope[2], alike[2];
};
struct no_rules {};

/* What a thread has of its warpgroup's rows `row` and row + 8. */
template <typename C>
struct thread_state {
    float o[C::PARTS][C::PART / 2];
    float tail[C::TAIL > 0 ? C::TAIL / 2 : 1]; /* the columns of O that are left over */
    float max[2], sum[2]; /* max of raw scores; sum over this thread's columns */
    row_keys keys[2];
    typename std::conditional<C::RULED, thread_rules, no_rules>::type rules;
};

/* Where a chunk of 8 columns of a row of queries lies in their tiles. */
template <typename C>
__device__ uint32_t chunk_at(int row, int chunk) {
    if (C::TAIL > 0 && chunk >= C::K_WHOLE / 8) {
        const int in_tail = (chunk - C::K_WHOLE / 8) ^ (row * C::TAIL * 2 / 128 & (C::TAIL / 8 - 1));
        return GROUP_ROWS * C::K_WHOLE * 2 + row * C::TAIL * 2 + in_tail * 16;
    }
    return chunk / 8 * (GROUP_ROWS * COLUMNS * 2) + swizzled<COLUMNS>(row, chunk % 8);
}

/* The warpgroup's 64 rows of queries, swizzled as the bulk copies write tiles; zeros past the last. */
template <typename C>
__device__ void load_queries(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group, int first_row,
                             uint32_t shared, int thread) {
    constexpr int CHUNKS = C::K_DIM / 8;
    for (int i = thread; i < GROUP_ROWS * CHUNKS; i += WARPGROUP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool valid = first_row + row < piece.row_end && chunk * 8 < a.k_dim;
        row_place place(a, piece.q_row, valid ? first_row + row : piece.row_begin, kv_group);
        const char *q = a.q;
        if (a.rows) {
            const cpa_cuda_listed_row &listed = a.rows[place.state_row];
            place.state_row = listed.row;
            if (listed.ready) q = a.ready_q;
        }
        const char *from =
            q + (place.state_row * a.q_row_stride + (int64_t)place.head * a.k_dim + (valid ? chunk * 8 : 0)) * 2;
        copy_async_16(shared + chunk_at<C>(row, chunk), from, valid);
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* Values past the last key become zeros: whatever lies in the rest of a page, 0 * NaN must not appear. */
template <typename C>
__device__ void clear_values(uint32_t shared, int keys, int thread) {
    constexpr int CHUNKS = C::V_DIM / 8;
    for (int i = keys * CHUNKS + thread; i < C::KEYS * CHUNKS; i += WARPGROUP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        uint32_t at = shared + (chunk / 8 * C::KEYS + row) * COLUMNS * 2 + chunk % 8 * 16;
        if (C::TAIL > 0 && chunk >= C::V_WHOLE / 8)
            at = shared + C::KEYS * C::V_WHOLE * 2 + row * C::TAIL * 2 + (chunk - C::V_WHOLE / 8) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
}

/* A warpgroup's queries as the operand of its products: the first steps from registers, the others from its tile in
 * shared memory. */
template <typename C, loop_rules RULES>
struct query_operand {
    static constexpr int STEPS = RULES == NO_RULES ? C::REGISTER_STEPS : C::RULED_STEPS[RULES];
    uint64_t tile;
    uint32_t part[STEPS + 1][4];

    __device__ query_operand(uint32_t shared, int thread) : tile(wgmma_descriptor(shared, 0)) {
        const int row = thread / 32 * 16 + (thread & 15), chunk = thread / 16 & 1;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            load_matrices(part[step], shared + chunk_at<C>(row, 2 * step + chunk));
    }
    __device__ void multiply(float (&s)[C::KEYS / 2], int step, uint64_t k) const {
        if (step < STEPS) {
            wgmma<typename C::element>::multiply_rows(s, part[step], k, step > 0);
        } else {
            const uint32_t at = step / 4 * (GROUP_ROWS * COLUMNS * 2) + step % 4 * 32;
            wgmma<typename C::element>::multiply(s, wgmma_advance(tile, at), k, step > 0);
        }
    }
};

/* The columns of a tile that are left over, behind WHOLE others. */
template <typename C, int WHOLE>
__device__ uint64_t tail_descriptor(uint32_t tile) {
    return wgmma_descriptor<C::TAIL * 2>(tile + C::KEYS * WHOLE * 2, 0);
}

/* S = Q K^T, begun. */
template <typename C, loop_rules RULES>
__device__ void begin_scores(float (&s)[C::KEYS / 2], const query_operand<C, RULES> &q, uint32_t tile) {
    const uint64_t k = wgmma_descriptor(tile, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::K_WHOLE / 16; step++)
        q.multiply(s, step, wgmma_advance(k, step / 4 * (C::KEYS * COLUMNS * 2) + step % 4 * 32));
    if constexpr (C::TAIL > 0) {
        const uint64_t k_tail = tail_descriptor<C, C::K_WHOLE>(tile);
#pragma unroll
        for (int step = C::K_WHOLE / 16; step < C::K_DIM / 16; step++)
            q.multiply(s, step, wgmma_advance(k_tail, (step - C::K_WHOLE / 16) * 32));
    }
    wgmma_commit();
}

/* O += P V, begun. */
template <typename C>
__device__ void begin_values(thread_state<C> &state, const uint32_t (&p)[C::KEYS / 16][4], uint32_t tile) {
    const uint64_t v = wgmma_descriptor(tile, C::KEYS * COLUMNS * 2);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < C::KEYS / 16; step++) {
#pragma unroll
        for (int part = 0; part < C::PARTS; part++)
            wgmma<typename C::element>::multiply(
                state.o[part], p[step],
                wgmma_advance(v, (part * (C::PART / COLUMNS) * C::KEYS + step * 16) * COLUMNS * 2), 1);
        if constexpr (C::TAIL > 0)
            wgmma<typename C::element>::multiply(
                state.tail, p[step], wgmma_advance(tail_descriptor<C, C::V_WHOLE>(tile), step * 16 * C::TAIL * 2), 1);
    }
    wgmma_commit();
}

/* Keeps the accumulators of O where they are. */
template <typename C>
__device__ void hold_values(thread_state<C> &state) {
#pragma unroll
    for (int part = 0; part < C::PARTS; part++) wgmma_hold(state.o[part]);
    if constexpr (C::TAIL > 0) wgmma_hold(state.tail);
}

/* Scores of codes become those of keys; scales: of the tile, from this thread's first column on. */
template <typename C>
__device__ void scale_scores(float (&s)[C::KEYS / 2], uint32_t scales) {
#pragma unroll
    for (int n = 0; n < C::KEYS / 8; n++) {
        float even, odd;
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(even), "=f"(odd) : "r"(scales + 8 * n * 4) : "memory");
        s[4 * n] *= even, s[4 * n + 1] *= odd;
        s[4 * n + 2] *= even, s[4 * n + 3] *= odd;
    }
}

/* What rules need of a consuming warpgroup's rows, and of its tile and the one before. */
template <typename C>
struct group_scores {
    row_score rows[C::RULED ? GROUP_ROWS : 1];
    ruled_piece piece;
    int32_t indices[C::RULED ? 2 : 1][C::KEYS];
};

/* What a thread's rows see of the tile of step n: 32 of its keys, for the lanes of the quad. */
template <typename C, loop_rules RULES>
__device__ void look_up_bits(uint32_t (&shown)[2], const cpa_cuda_attend_args &a, const thread_state<C> &state,
                             const group_scores<C> &scores, int sinks, int n, int key, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
        shown[half] = shown_of_tile<RULES == BITS>(scores.piece, scores.rows[row + 8 * half], state.keys[half], sinks, a.mask.causal,
                                    scores.indices[n % 2], key, lane);
}

template <typename C>
__device__ void mask_bits(float (&s)[C::KEYS / 2], const uint32_t (&shown)[2], int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        mask_row_bits<C::KEYS>([&](int n, int e) -> float & { return s[4 * n + 2 * half + e]; }, shown[half], lane);
}

/* cap(s): of eight scores of a tile, one eight after the other. */
template <int N, typename Cap>
__device__ void for_eights(float (&s)[N], Cap cap) {
#pragma unroll
    for (int i = 0; i < N; i += 8) {
        float *const eight[] = {&s[i], &s[i + 1], &s[i + 2], &s[i + 3], &s[i + 4], &s[i + 5], &s[i + 6], &s[i + 7]};
        cap(eight);
    }
}

/* ALiBi, but for what all scores of a row have alike. */
template <typename C>
__device__ void slope_scores(float (&s)[C::KEYS / 2], const thread_rules &rules) {
#pragma unroll
    for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[4 * n + e] = fmaf(rules.slope[e / 2], (float)(8 * n + e % 2), s[4 * n + e]);
}
/* That; key: the tile's first. */
template <typename C>
__device__ void slope_alike(thread_rules &rules, const group_scores<C> &scores, int key, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
        rules.alike[half] =
            rules.slope[half] * (float)(scores.piece.first + key + 2 * (lane % 4) - scores.rows[row + 8 * half].index);
}
/* All of it, where neighbouring keys are none in the sequence. */
template <typename C>
__device__ void slope_apart(float (&s)[C::KEYS / 2], const thread_rules &rules, const group_scores<C> &scores, int n,
                            int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
        (void)slope_row([&](int i, int e) -> float & { return s[4 * i + 2 * half + e]; }, rules.slope[half],
                        scores.piece, scores.rows[row + 8 * half], scores.indices[n % 2], 0, 2 * (lane % 4));
}

/* Those of a thread's rows. */
template <typename C>
__device__ void begin_rules(const cpa_cuda_attend_args &a, thread_state<C> &state, const group_scores<C> &scores,
                            int thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const row_score &of = scores.rows[row + 8 * half];
        const float unit = a.score.transforms ? of.factor : 1;
        state.rules.scale[half] = unit * a.scale;
        state.rules.slope[half] = of.slope / unit;
        state.rules.alike[half] = 0;
    }
}

template <typename C>
__device__ void mask_scores(float (&s)[C::KEYS / 2], const thread_state<C> &state, int sinks, int key) {
#pragma unroll
    for (int n = 0; n < C::KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (!sees(state.keys[e / 2], sinks, key + 8 * n + e % 2)) s[4 * n + e] = -INFINITY;
}

/* Turns scores into probabilities relative to the new maximum; keep[half] is what the old sums and O are worth. */
template <typename C>
__device__ void online_softmax(float (&s)[C::KEYS / 2], thread_state<C> &state, float (&keep)[2], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = C::RULED ? -INFINITY : state.max[half], sum = 0, alike = 0;
        if constexpr (C::RULED) {
            scale_log2 = state.rules.scale[half] * (float)M_LOG2E;
            alike = state.rules.alike[half];
        }
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++) max = fmaxf(max, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
        max = C::RULED ? fmaxf(state.max[half], quad_max(max + alike)) : quad_max(max);
        float base = max == -INFINITY ? 0 : max * scale_log2;
        keep[half] = exp2_fast(state.max[half] * scale_log2 - base);
        state.max[half] = max;
        if (C::RULED) base -= alike * scale_log2;
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[4 * n + e] = exp2_fast(s[4 * n + e] * scale_log2 - base);
                sum += s[4 * n + e];
            }
        }
        state.sum[half] = state.sum[half] * keep[half] + sum;
    }
}

/* The same of scores within bounds, which are exponents already: what is old keeps its worth. */
template <typename C>
__device__ void bounded_softmax(float (&s)[C::KEYS / 2], thread_state<C> &state) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[4 * n + e] = exp2_fast(s[4 * n + e]);
                sum += s[4 * n + e];
            }
        }
        state.sum[half] += sum;
    }
}
/* The maximum that the sums are relative to, then. */
template <typename C>
__device__ void end_bounded(thread_state<C> &state, float reference) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (quad_sum(state.sum[half]) != 0) state.max[half] = reference / state.rules.scale[half];
}

template <typename C>
__device__ void pack_probabilities(uint32_t (&p)[C::KEYS / 16][4], const float (&s)[C::KEYS / 2]) {
#pragma unroll
    for (int k = 0; k < C::KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = pack_pair<typename C::element>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

template <typename C>
__device__ void rescale(thread_state<C> &state, const float (&keep)[2]) {
#pragma unroll
    for (int part = 0; part < C::PARTS; part++)
#pragma unroll
        for (int i = 0; i < C::PART / 2; i++) state.o[part][i] *= keep[i / 2 % 2];
#pragma unroll
    for (int i = 0; i < C::TAIL / 2; i++) state.tail[i] *= keep[i / 2 % 2];
}

/* The turn of one of two warpgroups with the tensor cores: between take_turn and pass_turn. Barriers 1 and 2 are those
 * of each alone. */
__device__ inline int turn_barrier(int consumer) {
    return 3 + consumer;
}
__device__ inline void take_turn(int consumer) {
    named_sync(turn_barrier(consumer), 2 * WARPGROUP);
}
__device__ inline void pass_turn(int consumer) {
    named_arrive(turn_barrier(1 - consumer), 2 * WARPGROUP);
}

/* The exponentials are to run under the product that follows them in the program: ptxas moves a wait above them, but
 * not above a store. No sum is negative, so nothing is stored. */
__device__ inline void pin_before_wait(float sum, uint32_t shared) {
    asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" ::"f"(sum), "r"(shared)
                 : "memory");
}

/* All tiles of the piece, the last keys first. */
template <typename C, loop_rules RULES>
__device__ void attend_tiles(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                             const hopper_walk<C> &walk, thread_state<C> &state, group_scores<C> &scores,
                             uint32_t shared, stage_barriers &barriers, int consumer, int thread) {
    const int lane = thread % 32, column = 2 * (lane % 4), count = walk.count;
    const query_operand<C, RULES> q(shared + consumer * C::Q_BYTES, thread);
    float s[C::KEYS / 2], keep[2];
    uint32_t p[C::KEYS / 16][4];
    auto k_tile = [&](int n) { return shared + C::K_AT + n % STAGES * C::K_BYTES; };
    auto v_tile = [&](int n) { return shared + C::V_AT + n % STAGES * C::V_BYTES; };
    auto wait_full = [&](uint64_t *full, int n) { barrier_wait(shared_address(&full[n % STAGES]), phase_of(n)); };
    auto release_keys = [&](int n) {
        if (C::SCALED || lane == 0) barrier_arrive(shared_address(&barriers.k_empty[n % STAGES]));
    };
    auto release_values = [&](int n) {
        if (lane == 0) barrier_arrive(shared_address(&barriers.v_empty[n % STAGES]));
    };
    auto scale = [&](int n) {
        if constexpr (C::SCALED)
            scale_scores<C>(s, shared + C::SCALES_AT + n % STAGES * C::SCALE_BYTES + column * 4);
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
            if (has_bits && is_masked) look_up_bits<C, RULES>(shown, a, state, scores, walk.sinks, n, key_of(n), thread);
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
        if constexpr (RULES == SOFTCAP)
            for_eights(s, [&](float *const(&some)[8]) {
                const cpa_cuda_capped &line = a.score.capped;
                cap_scores_of(a.score.tanh, line.far_scale, line.far_shift, line.near, line.near_shift, some);
            });
        if constexpr (RULES == ANY_RULES) {
            if (!a.score.transforms) return;
            if (a.score.softcap > 0)
                for_eights(s, [&](float *const(&some)[8]) { cap_scores_of(a.score.tanh, some); });
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
            online_softmax<C>(s, state, keep, a.scale_log2);
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
    if (!C::ROWS && keys < C::KEYS) { /* rows that are copied one by one end there */
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

template <typename C>
__device__ void attend_by_rules(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                                const hopper_walk<C> &walk, thread_state<C> &state, group_scores<C> &scores,
                                uint32_t shared, stage_barriers &barriers, int consumer, int thread) {
    if constexpr (C::RULED) {
        begin_rules<C>(a, state, scores, thread);
        const bool capped = a.score.softcap > 0, linear = scores.piece.linear;
        if constexpr (std::is_same<typename C::element, __nv_bfloat16>::value) { /* the probabilities of fp16 overflow */
            if (capped && a.score.capped.fits && !a.score.custom.bits && !a.score.alibi_slopes &&
                a.score.temperature_len == 0)
                return attend_tiles<C, SOFTCAP>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
        }
        if (a.score.custom.bits && !a.score.transforms && linear) {
            attend_tiles<C, BITS>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
        } else if (a.score.custom.bits || capped || (a.score.alibi_slopes && !linear)) {
            attend_tiles<C, ANY_RULES>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
        } else {
            attend_tiles<C, SLOPES>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
        }
    } else {
        attend_tiles<C, NO_RULES>(a, piece, walk, state, scores, shared, barriers, consumer, thread);
    }
}

/* Where a row goes. */
__device__ row_sink sink_at(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int row, int kv_group,
                            float lse) {
    return a.rows ? row_sink(a, piece, row, kv_group, lse, a.rows) : row_sink(a, piece, row, kv_group, lse);
}

/* Columns of a row of a thread, in pairs, whose old values are loaded together. */
constexpr int PAIRS_AT_ONCE = 16;

template <typename C>
__device__ void store_state(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int kv_group,
                            const thread_state<C> &state, int row, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int at = row + 8 * half;
        const float sum = quad_sum(state.sum[half]), inverse = inverse_of_sum(sum);
        float scale = a.scale;
        if constexpr (C::RULED) scale = state.rules.scale[half];
        const float lse = lse_of(state.max[half], sum, state.max[half] * scale + logf(sum));
        if (at < piece.row_end) {
            const row_sink sink = sink_at(a, piece, at, kv_group, lse);
            const auto column_of = [&](int n) { return 8 * n + 2 * (lane % 4); };
#pragma unroll
            for (int first = 0; first < C::V_DIM / 8; first += PAIRS_AT_ONCE) {
                float old[PAIRS_AT_ONCE][2];
#pragma unroll
                for (int n = first; n < first + PAIRS_AT_ONCE && n < C::V_DIM / 8; n++)
                    if (column_of(n) < a.v_dim) sink.load_old(column_of(n), old[n - first]);
#pragma unroll
                for (int n = first; n < first + PAIRS_AT_ONCE && n < C::V_DIM / 8; n++) {
                    const int part = 8 * n / C::PART, i = 4 * (n % (C::PART / 8)) + 2 * half;
                    const float *from = part < C::PARTS ? &state.o[part][i] : &state.tail[i];
                    const float o[2] = {from[0] * inverse, from[1] * inverse};
                    if (column_of(n) < a.v_dim) sink.template store<typename C::element>(column_of(n), o, old[n - first]);
                }
            }
            __syncwarp(0xfu << (lane & ~3)); /* the quad of the row */
            if (lane % 4 == 0) sink.store_lse();
        }
    }
}

template <typename C>
__device__ void consume(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                        const hopper_walk<C> &walk, int kv_group, group_scores<C> &scores, uint32_t shared,
                        stage_barriers &barriers, int consumer, int thread) {
    const int lane = thread % 32, first_row = piece.row_begin + consumer * GROUP_ROWS;
    const int row = first_row + thread / 32 * 16 + lane / 4;
    thread_state<C> state;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state.max[half] = -INFINITY;
        state.sum[half] = 0;
        state.keys[half] = walk.keys_of(a, piece, row + 8 * half, a.rows);
    }
#pragma unroll
    for (int part = 0; part < C::PARTS; part++)
#pragma unroll
        for (int i = 0; i < C::PART / 2; i++) state.o[part][i] = 0;
#pragma unroll
    for (int i = 0; i < C::TAIL / 2; i++) state.tail[i] = 0;
    if constexpr (C::RULED) state.rules = {};
    if (walk.count > 0) {
        load_queries<C>(a, piece, kv_group, first_row, shared + consumer * C::Q_BYTES, thread);
        if constexpr (C::RULED) {
            if (thread == 0) scores.piece.fill(a, piece);
            if (thread < GROUP_ROWS)
                fill_row_score(scores.rows[thread], a, piece, first_row + thread, kv_group,
                               ruled_piece::origin_of(a, piece));
        }
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
    __shared__ stage_barriers barriers;
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
            barrier_init(shared_address(&barriers.v_full[stage]), C::LOADERS);
            barrier_init(shared_address(&barriers.k_empty[stage]), busy_consumers<C>(piece) * C::KEY_READERS);
            barrier_init(shared_address(&barriers.v_empty[stage]), busy_consumers<C>(piece) * (WARPGROUP / 32));
        }
        barrier_init_fence();
    }
    __syncthreads();
    if constexpr (C::RULED) {
        static_assert(sizeof(typename hopper_walk<C>::scratch) <= C::SHARED_BYTES - TILE_ALIGNMENT, "before any tile");
        walk.start(a, piece, *(typename hopper_walk<C>::scratch *)(shared + (tiles - shared_address(shared))));
        async_proxy_fence(); /* the tiles come where that was */
    } else {
        walk.start(a, piece, a.rows);
    }
    if (a.rows) { /* the decode kernel behind may take the multiprocessors that are left over, and then those of this one */
        dependent_wait();
        dependent_allow();
    }
    if (warpgroup == 0) {
        registers_shrink<C::LOADER_REGISTERS>();
        if constexpr (C::ROWS) {
            const int warp = thread / 32 % LOADING_PAIR, lane = thread % 32;
            if (thread < 32 * LOADING_PAIR) {
                load_rows<C, CPA_KEYS>(a, piece, walk, kv_group, tiles + C::K_AT, barriers.k_full, barriers.k_empty,
                                       warp, lane);
            } else {
                load_rows<C, CPA_VALUES>(a, piece, walk, kv_group, tiles + C::V_AT, barriers.v_full, barriers.v_empty,
                                         warp, lane);
            }
        } else if (thread < 32) {
            load_tiles<C, C::K_DIM, C::SCALED>(args, &args.maps.k, &args.maps.k_tail, piece, walk, kv_group,
                                               tiles + C::K_AT, tiles + C::SCALES_AT, barriers.k_full,
                                               barriers.k_empty, thread);
        } else if (thread < 64) {
            load_tiles<C, C::V_DIM, false>(args, &args.maps.v, &args.maps.v_tail, piece, walk, kv_group,
                                           tiles + C::V_AT, 0, barriers.v_full, barriers.v_empty, thread - 32);
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
    const int shape = shape_of(args.a.k_dim, args.a.v_dim, Loads == BOXES && !Ruled, Ruled);
    switch (shape) {
    case 0: return launch<config<Element, 0, Loads, Ruled>>(args, n_pieces, stream);
    case 3: return launch<config<Element, 3, Loads, Ruled>>(args, n_pieces, stream);
    }
    if constexpr (!Ruled)
        if (shape == 4) return launch<config<Element, 4, Loads, Ruled>>(args, n_pieces, stream);
    if constexpr (Loads == BOXES_AND_SCALES) {
        return cpa_cuda_check(&stream->error, cudaErrorNotSupported, "attend: heads too wide for scales of keys");
    } else if constexpr (Loads == BOXES && !Ruled) {
        if (shape == 1) return launch<config<Element, 1, Loads, Ruled>>(args, n_pieces, stream);
        if (shape == 2) return launch<config<Element, 2, Loads, Ruled>>(args, n_pieces, stream);
        return launch<config<Element, 5, Loads, Ruled>>(args, n_pieces, stream);
    } else {
        return launch<config<Element, 5, Loads, Ruled>>(args, n_pieces, stream);
    }
}

template <typename Element>
cpa_status launch_loads(const hopper_args &args, int32_t n_pieces, cpa_stream *stream) {
    if (args.a.k_scales) return launch_widths<Element, BOXES_AND_SCALES, false>(args, n_pieces, stream);
    if (cpa_cuda_hopper_takes_rows(1 << args.a.block_shift))
        return launch_widths<Element, EACH_ROW, false>(args, n_pieces, stream);
    return args.a.score.any ? launch_widths<Element, BOXES, true>(args, n_pieces, stream)
                            : launch_widths<Element, BOXES, false>(args, n_pieces, stream);
}

} // namespace

extern "C" int32_t cpa_cuda_hopper_box(int32_t k_dim, int32_t v_dim, int32_t block_size, int32_t ruled) {
    const int32_t keys = keys_of(shape_of(k_dim, v_dim, true, ruled), ruled);
    return block_size < keys ? block_size : keys;
}

extern "C" int32_t cpa_cuda_hopper_rows(int32_t k_dim, int32_t v_dim) {
    return TILES[shape_of(k_dim, v_dim, true, false)].consumers * GROUP_ROWS;
}

extern "C" int32_t cpa_cuda_hopper_tail(int32_t k_dim, int32_t v_dim) {
    return tail_of(shape_of(k_dim, v_dim, true, false));
}

extern "C" cpa_status cpa_cuda_attend_hopper(const cpa_cuda_attend_args *args, const cpa_cuda_hopper_maps *maps,
                                             int32_t n_pieces, cpa_stream *stream) {
    const int32_t box = cpa_cuda_hopper_box(args->k_dim, args->v_dim, 1 << args->block_shift, args->score.any);
    const hopper_args all = {*maps, *args, box, 1 << args->block_shift == CPA_TENSOR_BLOCK};
    return args->q_dtype == CPA_BF16 ? launch_loads<__nv_bfloat16>(all, n_pieces, stream)
                                     : launch_loads<__half>(all, n_pieces, stream);
}
