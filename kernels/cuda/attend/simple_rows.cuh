/* A row of a head by a warp, in fp32 without tensor cores, for any dtype, width and block size: what the plain kernels
 * share. The lanes share the elements of a head. */
#ifndef CPA_CUDA_SIMPLE_ROWS_CUH
#define CPA_CUDA_SIMPLE_ROWS_CUH

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/cache/quant.cuh"
#include "kernels/cuda/cache/tiles.cuh"
#include "kernels/cuda/cache/turboquant.cuh"
#include "kernels/cuda/device/warp.cuh"

namespace {

constexpr int WARPS = 4;
/* Elements of a head, a lane: of most heads; and of wide ones and rows of latents with scales of tiles, which take more
 * registers. */
constexpr int NARROW = 256 / WARP_LANES, WIDE = CPA_MAX_HEAD_DIM / WARP_LANES;

/* A key or a value of the cache. */
struct cached_row {
    const char *pool;
    int64_t at; /* element of the pool with which the row begins */
    int32_t run_shift;
    int64_t run_stride;
    uint32_t word; /* of the row, if it is quantised */
    const uint8_t *bytes; /* scales of a row of CPA_FP8_T64 */
    int bits;             /* of codes of CPA_TQ_, 0: of other rows */

    /* An element, or of a rotated key the centroid of its code. */
    template <int ELEMENTS>
    __device__ float read(const cpa_cuda_attend_args &a, int32_t column) const {
        if constexpr (ELEMENTS == WIDE) {
            if (has_tiles(a.kv_dtype)) return read_tiled(pool + at, bytes, a.kv_dtype, a.k_dim, column);
        } else if (bits) {
            return read_turboquant(a, column);
        }
        const int64_t i = at + (column >> run_shift) * run_stride + (column & ((1 << run_shift) - 1));
        return a.kv_dtype >= CPA_DTYPE_COUNT ? read_code(pool, a.kv_dtype, i, word) : read_element(pool, a.kv_dtype, i);
    }
    __device__ bool is_key(const cpa_cuda_attend_args &a) const { return pool == a.k; }
    __device__ float read_turboquant(const cpa_cuda_attend_args &a, int32_t column) const {
        if (bits == 8) return read_code(pool, CPA_FP8_E4M3, at + column, __float_as_uint(1.0f));
        const char *row = pool + at;
        const int code = tq_code(row, bits, column);
        if (is_key(a)) return tq_centroid(bits, code);
        return tq_half(row, bits, a.v_dim, 0) * (float)code + tq_half(row, bits, a.v_dim, 1);
    }
};

/* The scale word of a row, or that of the tensor. */
__device__ uint32_t word_of(const cpa_cuda_attend_args &a, const char *pool, int64_t block_stride, int64_t words_at,
                            float tensor_scale, int64_t block, int head, int64_t token) {
    if (!words_at || has_tiles(a.kv_dtype)) return __float_as_uint(tensor_scale);
    return *(const uint32_t *)scale_word_at(a, pool, block_stride, words_at, block, head, token);
}

/* The key and the value of a token and KV head. */
struct cached_token {
    cached_row k, v;
};
__device__ cached_token token_at(const cpa_cuda_attend_args &a, int64_t block, int64_t token, int kv_head) {
    const int64_t k_at = block * a.k_block_stride + token * a.k_token_stride + kv_head * a.k_head_stride;
    const int64_t v_at = block * a.v_block_stride + token * a.v_token_stride + kv_head * a.v_head_stride;
    const float k_scale = head_scale(a.k_scale, a.k_head_scales, a.head_scale_step, kv_head);
    const float v_scale = head_scale(a.v_scale, a.v_head_scales, a.head_scale_step, kv_head);
    const bool turboquant = cpa_dtype_is_turboquant(a.kv_dtype);
    const int k_bits = turboquant ? tq_key_bits(a.kv_dtype) : 0, v_bits = turboquant ? tq_value_bits(a.kv_dtype) : 0;
    const uint8_t *bytes = (const uint8_t *)a.k + block * a.k_block_stride + a.k_words_at + token * POWER_SCALES;
    return {{a.k, k_at, a.k_run_shift, a.k_run_stride,
             word_of(a, a.k, a.k_block_stride, a.k_words_at, k_scale, block, kv_head, token), bytes, k_bits},
            {a.v, v_at, a.v_run_shift, a.v_run_stride,
             word_of(a, a.v, a.v_block_stride, a.v_words_at, v_scale, block, kv_head, token), bytes, v_bits}};
}

template <int ELEMENTS>
struct row_state {
    float o[ELEMENTS], max, sum; /* max of scaled scores; O not yet divided by the sum */
    float o_lost[ELEMENTS], sum_lost;
};

/* Adds x to a sum and keeps what rounding lost (Kahan, 1965): a plain sum over a hundred thousand keys would be off by
 * more than the tolerance of fp32. Of an infinite sum nothing is lost: inf - inf would make it NaN. */
__device__ void add(float &sum, float &lost, float x) {
    const float corrected = x - lost, next = sum + corrected;
    lost = isinf(next) ? 0 : (next - sum) - corrected;
    sum = next;
}

template <int ELEMENTS>
__device__ void clear_state(row_state<ELEMENTS> &state) {
    state = {{0}, CPA_LOWEST_EXPONENT * (float)M_LN2, 0, {0}, 0};
}

/* q = H q without its factor; column d is element d / 32 of lane d mod 32. */
template <int ELEMENTS>
__device__ void rotate_query(float (&q)[ELEMENTS], int dim, int lane) {
#pragma unroll
    for (int step = 1; step < WARP_LANES; step *= 2) {
#pragma unroll
        for (int i = 0; i < ELEMENTS; i++) {
            const float other = __shfl_xor_sync(0xffffffff, q[i], step);
            q[i] = lane & step ? other - q[i] : q[i] + other;
        }
    }
#pragma unroll
    for (int step = 1; step < NARROW; step *= 2) {
        if (step * WARP_LANES >= dim) break;
#pragma unroll
        for (int i = 0; i < NARROW; i++) {
            if (i & step) continue;
            const float a = q[i], b = q[i + step];
            q[i] = a + b;
            q[i + step] = a - b;
        }
    }
}

/* The query of a row and head, rotated where keys are. */
template <int ELEMENTS>
__device__ void load_query(float (&q)[ELEMENTS], const cpa_cuda_attend_args &a, int64_t row, int head, int lane) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        const int d = lane + i * WARP_LANES;
        const int64_t at = row * a.q_row_stride + head * a.q_head_stride + d;
        q[i] = d < a.k_dim ? read_element(a.q, a.q_dtype, at) : 0;
    }
    if constexpr (ELEMENTS == NARROW) {
        if (cpa_dtype_is_turboquant(a.kv_dtype) && tq_key_bits(a.kv_dtype) < 8) rotate_query(q, a.k_dim, lane);
    }
}

/* Q K^T of a key, for all lanes. */
template <int ELEMENTS>
__device__ float raw_score(const cpa_cuda_attend_args &a, const float (&q)[ELEMENTS], const cached_row &k, int lane) {
    float dot = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        if (d >= a.k_dim) continue;
        const float element = k.read<ELEMENTS>(a, d);
        dot += q[i] * element;
        squares += element * element;
    }
    dot = warp_sum(dot);
    if (ELEMENTS != NARROW || k.bits == 0 || k.bits == 8) return dot;
    return dot * tq_half(k.pool + k.at, k.bits, a.k_dim, 0) / sqrtf(warp_sum(squares) * (float)a.k_dim);
}

template <int ELEMENTS>
__device__ void add_key(const cpa_cuda_attend_args &a, row_state<ELEMENTS> &state, float score, const cached_row &v,
                        int lane) {
    const float max = fmaxf(state.max, score);
    if (score == -INFINITY) return; /* weighs nothing, whatever its value holds */
    const float keep = expf(state.max - max), p = expf(score - max);
    state.max = max;
    state.sum *= keep;
    state.sum_lost *= keep;
    add(state.sum, state.sum_lost, p);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        if (d >= a.v_dim) continue;
        state.o[i] *= keep;
        state.o_lost[i] *= keep;
        add(state.o[i], state.o_lost[i], p * v.read<ELEMENTS>(a, d));
    }
}

/* Stores a row, joined with the state that is there if the call resumes it. */
template <bool RULED, int ELEMENTS>
__device__ void store_row(const cpa_cuda_attend_args &a, const row_state<ELEMENTS> &state, int64_t row,
                          int64_t state_shift, bool refused, int head, int lane) {
    float *o = a.o ? a.o + row * a.o_row_stride + (int64_t)head * a.v_dim + state_shift : NULL;
    float *lse_at = a.lse ? a.lse + row * a.lse_row_stride + head * a.lse_head_stride + state_shift : NULL;
    const float seen = state.sum == 0 ? -INFINITY : state.max + logf(state.sum); /* NaN if the sum is */
    const float lse = refused ? NAN : seen;
    const merge_weights weights(a.resume ? *lse_at : -INFINITY, lse);
    const float kept = RULED && a.score.sink_logits ? sink_factor(a.score.sink_logits, head, weights.lse) : 1;
    __syncwarp(); /* all lanes have read the LSE that is there */
#pragma unroll
    for (int i = 0; i < ELEMENTS; i++) {
        int d = lane + i * WARP_LANES;
        if (d >= a.v_dim) continue;
        float value = weights.b != 0 ? weights.b * (state.o[i] / state.sum) : 0;
        if (weights.a > 0) value += weights.a * o[d];
        if (o) o[d] = value;
        if (RULED) value *= kept;
        const int64_t at = row * a.out_row_stride + head * a.out_head_stride + d;
        if (!a.out) continue;
        if (a.out_scale) {
            a.out[at] = (char)e4m3_code(value * __fdiv_rn(1, __ldg(a.out_scale)));
        } else {
            write_element(a.out, a.q_dtype, at, value);
        }
    }
    if (lse_at && lane == 0) *lse_at = weights.lse;
}

} // namespace

#endif
