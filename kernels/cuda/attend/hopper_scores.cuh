/* What a consuming warpgroup of the Hopper kernel does with a tile: the products by wgmma, the rules of scores, and the
 * online softmax. */
#ifndef CPA_CUDA_HOPPER_SCORES_CUH
#define CPA_CUDA_HOPPER_SCORES_CUH

#include "kernels/cuda/attend/hopper_loads.cuh"
#include "kernels/cuda/attend/online_softmax.cuh"
#include "kernels/cuda/attend/wgmma.cuh"

namespace {

/* What a loop over tiles is compiled for, as code that others need would lie in its way: no rules; ALiBi and a
 * temperature over linear keys; a softcap alone, in bf16; bits alone, over linear keys; and any. */
enum loop_rules { NO_RULES, SLOPES, SOFTCAP, BITS, ANY_RULES };

/* The rules of a thread's two rows: what makes natural logarithms and those in base 2 of their scores, the slope of
 * ALiBi in the unit of scores, and what it adds to all scores of a tile that the thread has of a row. */
struct thread_rules {
    float scale[2], slope[2], alike[2];
};
struct no_rules {};

/* What a thread has of its warpgroup's rows `row` and row + 8. */
template <typename C>
struct thread_state {
    float o[C::PARTS][C::PART / 2];
    float tail[C::V_TAIL > 0 ? C::V_TAIL / 2 : 1]; /* the columns of O that are left over */
    float max[2], sum[2];                          /* max of raw scores; sum over this thread's columns */
    row_keys keys[2];
    float top[2]; /* the largest raw score, where it is asked for (sparse_latent.cu, hopper_skip.cuh) */
    typename std::conditional<C::RULED, thread_rules, no_rules>::type rules;
};

template <typename C>
__device__ void clear_values(thread_state<C> &state) {
#pragma unroll
    for (int part = 0; part < C::PARTS; part++)
#pragma unroll
        for (int i = 0; i < C::PART / 2; i++) state.o[part][i] = 0;
#pragma unroll
    for (int i = 0; i < C::V_TAIL / 2; i++) state.tail[i] = 0;
}
/* That of rows that have seen nothing. */
template <typename C>
__device__ void clear_state(thread_state<C> &state, float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) state.max[half] = lowest_max(scale_log2), state.sum[half] = 0;
    clear_values(state);
    if constexpr (C::RULED) state.rules = {};
}

/* Where a chunk of 8 columns of a row of queries lies in their tiles. */
template <typename C>
__device__ uint32_t chunk_at(int row, int chunk) {
    if (C::TAIL > 0 && chunk >= C::K_WHOLE / 8) {
        const int in_tail = (chunk - C::K_WHOLE / 8) ^ (row * C::TAIL * 2 / 128 & (C::TAIL / 8 - 1));
        return GROUP_ROWS * C::K_WHOLE * 2 + row * C::TAIL * 2 + in_tail * 16;
    }
    return chunk / 8 * (GROUP_ROWS * COLUMNS * 2) + swizzled<COLUMNS>(row, chunk % 8);
}

/* The warpgroup's 64 rows of queries, swizzled as the bulk copies write tiles; zeros past the last. A group of copies. */
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
            q + (place.state_row * a.q_row_stride + place.head * a.q_head_stride + (valid ? chunk * 8 : 0)) * 2;
        copy_async_16(shared + chunk_at<C>(row, chunk), from, valid);
    }
    copy_async_commit();
}

/* Values past the last key of KEYS become zeros: whatever lies in the rest of a page, 0 * NaN must not appear. */
template <typename C, int KEYS = C::KEYS>
__device__ void clear_values(uint32_t shared, int keys, int thread) {
    constexpr int CHUNKS = C::V_COLUMNS / 8;
    for (int i = keys * CHUNKS + thread; i < KEYS * CHUNKS; i += WARPGROUP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        uint32_t at = shared + (chunk / 8 * C::KEYS + row) * COLUMNS * 2 + chunk % 8 * 16;
        if (C::V_TAIL > 0 && chunk >= C::V_WHOLE / 8)
            at = shared + C::KEYS * C::V_WHOLE * 2 + row * C::TAIL * 2 + (chunk - C::V_WHOLE / 8) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
}

/* A warpgroup's queries as the operand of its products: the first steps from registers, the others from its tile in
 * shared memory. */
template <typename C, loop_rules RULES>
struct query_operand {
    static constexpr int STEPS = RULES == NO_RULES ? C::REGISTER_STEPS : C::RULED_STEPS[RULES];
    uint64_t tile, tail; /* the latter is set where a tail is read from shared memory */
    uint32_t part[STEPS + 1][4];

    __device__ query_operand(uint32_t shared, int thread) : tile(wgmma_descriptor(shared, 0)) {
        if constexpr (STEPS < C::K_DIM / 16 && C::TAIL > 0)
            tail = wgmma_descriptor<C::TAIL * 2>(shared + GROUP_ROWS * C::K_WHOLE * 2, 0);
        const int row = thread / 32 * 16 + (thread & 15), chunk = thread / 16 & 1;
#pragma unroll
        for (int step = 0; step < STEPS; step++) load_matrices(part[step], shared + chunk_at<C>(row, 2 * step + chunk));
    }
    template <int N>
    __device__ void multiply(float (&s)[N], int step, uint64_t k) const {
        if constexpr (STEPS > 0)
            if (step < STEPS) return wgmma<typename C::element>::multiply_rows(s, part[step], k, step > 0);
        if (step >= C::K_WHOLE / 16) {
            wgmma<typename C::element>::multiply(s, wgmma_advance(tail, (step - C::K_WHOLE / 16) * 32), k, step > 0);
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

/* S = Q K^T, begun, of the first 2 N keys of the tile. */
template <typename C, loop_rules RULES, int N>
__device__ void begin_scores(float (&s)[N], const query_operand<C, RULES> &q, uint32_t tile) {
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

/* Adds to a part of the columns of O what 16 keys give. */
template <typename C>
__device__ void multiply_values(thread_state<C> &state, const uint32_t (&p)[4], uint64_t v, int step, int part) {
    wgmma<typename C::element>::multiply(
        state.o[part], p, wgmma_advance(v, (part * (C::PART / COLUMNS) * C::KEYS + step * 16) * COLUMNS * 2), 1);
}

/* O += P V, begun. */
template <typename C, int STEPS>
__device__ void begin_values(thread_state<C> &state, const uint32_t (&p)[STEPS][4], uint32_t tile) {
    const uint64_t v = wgmma_descriptor(tile, C::KEYS * COLUMNS * 2);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int part = 0; part < C::PARTS; part++) multiply_values<C>(state, p[step], v, step, part);
        if constexpr (C::V_TAIL > 0)
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
    if constexpr (C::V_TAIL > 0) wgmma_hold(state.tail);
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
        shown[half] = shown_of_tile<RULES == BITS>(scores.piece, scores.rows[row + 8 * half], state.keys[half], sinks,
                                                   a.mask.causal, scores.indices[n % 2], key, lane);
}

template <typename C>
__device__ void mask_bits(float (&s)[C::KEYS / 2], const uint32_t (&shown)[2], int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++)
        mask_row_bits<C::KEYS>([&](int n, int e) -> float & { return s[4 * n + 2 * half + e]; }, shown[half], lane);
}

/* cap(s): of four scores of a tile, one four after the other: more at once would need registers. */
template <int N, typename Cap>
__device__ void for_fours(float (&s)[N], Cap cap) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        float *four[] = {&s[i], &s[i + 1], &s[i + 2], &s[i + 3]};
        cap(four);
    }
}

/* Raw scores of a tile become a line over tanh. BY_MIDDLE: there are registers for another way, where all scores of a
 * warp are far from the cap, as most are: it leaves the unit of exponentials, which is the narrowest, to the softmax. */
template <bool BY_MIDDLE, int N>
__device__ void cap_tile(float (&s)[N], const cpa_cuda_tanh &tanh, const cpa_cuda_tanh_line &line) {
    if constexpr (BY_MIDDLE) {
        float largest[4] = {}; /* of those that are not NaN, which both ways leave as they are */
#pragma unroll
        for (int i = 0; i < N; i++) largest[i % 4] = fmaxf(largest[i % 4], fabsf(s[i]));
        const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        if (__all_sync(0xffffffff, all * tanh.scale < CPA_CUDA_TANH_MIDDLE))
            return for_fours(s, [&](float *(&some)[4]) { cap_middle_scores_of(tanh, line, some); });
    }
    for_fours(s, [&](float *(&some)[4]) { cap_scores_of(tanh, line, some); });
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
        state.max[half] = lowest_max(state.rules.scale[half] * (float)M_LOG2E);
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

/* Scores of a half become probabilities relative to `base`; `sum` grows by them. */
template <int N>
__device__ void exponentials(float (&s)[N], float &sum, int half, float scale_log2, float base) {
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
            s[4 * n + e] = exp2_fast(s[4 * n + e] * scale_log2 - base);
            sum += s[4 * n + e];
        }
    }
}

/* Turns scores into probabilities relative to the new maximum; keep[half] is what the old sums and O are worth.
 * OF_ROWS: rows have scales of their own, and what all their scores of the tile have alike. */
template <typename C, bool OF_ROWS>
__device__ void online_softmax(float (&s)[C::KEYS / 2], thread_state<C> &state, float (&keep)[2], float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float max = OF_ROWS ? -INFINITY : state.max[half], sum = 0, alike = 0;
        if constexpr (OF_ROWS) {
            scale_log2 = state.rules.scale[half] * (float)M_LOG2E;
            alike = state.rules.alike[half];
        }
#pragma unroll
        for (int n = 0; n < C::KEYS / 8; n++) max = fmaxf(max, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
        max = OF_ROWS ? fmaxf(state.max[half], quad_max(max + alike)) : quad_max(max);
        float base = max * scale_log2;
        keep[half] = worth_of(state.max[half], max, scale_log2);
        state.max[half] = max;
        if (OF_ROWS) base -= alike * scale_log2;
        exponentials(s, sum, half, scale_log2, base);
        state.sum[half] = state.sum[half] * keep[half] + sum;
    }
}

/* Raises the maxima of a thread's rows to their scores of a tile, as far as the thread has these. */
template <int N>
__device__ void raise_to_scores(float (&max)[2], const float (&s)[N]) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < N / 4; n++)
            max[half] = fmaxf(max[half], fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
}

/* The same as online_softmax, where the maximum follows the scores only when they exceed it by so much, in powers of
 * two: probabilities may be that large, which costs them no precision, and O has seldom to be rescaled. max: of the old
 * maximum and the scores that the thread has of each row. Returns whether O has to be rescaled. */
constexpr float LAG = 8;
template <typename C, int N>
__device__ bool lagging_softmax(float (&s)[N], thread_state<C> &state, float (&max)[2], float (&keep)[2],
                                float scale_log2) {
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; half++) grown |= (max[half] - state.max[half]) * scale_log2 > LAG;
    grown = __any_sync(0xffffffff, grown);
    if (grown) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            max[half] = quad_max(max[half]);
            keep[half] = worth_of(state.max[half], max[half], scale_log2);
            state.max[half] = max[half];
            state.sum[half] *= keep[half];
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = 0;
        exponentials(s, sum, half, scale_log2, state.max[half] * scale_log2);
        state.sum[half] += sum;
    }
    return grown;
}
template <typename C, int N>
__device__ bool lagging_softmax(float (&s)[N], thread_state<C> &state, float (&keep)[2], float scale_log2) {
    float max[2] = {state.max[0], state.max[1]};
    raise_to_scores(max, s);
    return lagging_softmax<C>(s, state, max, keep, scale_log2);
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

template <typename C, int STEPS>
__device__ void pack_probabilities(uint32_t (&p)[STEPS][4], const float (&s)[8 * STEPS]) {
#pragma unroll
    for (int k = 0; k < STEPS; k++)
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
    for (int i = 0; i < C::V_TAIL / 2; i++) state.tail[i] *= keep[i / 2 % 2];
}

} // namespace

#endif
