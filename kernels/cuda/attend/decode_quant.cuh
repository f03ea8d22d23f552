/* The decode kernel's way through a quantised cache. Codes are loaded as they lie, become fp16 in registers, where
 * every code is exact, and are multiplied in fp16 whatever the dtype of the queries; scales are applied in fp32, to the
 * scores of a key and to its probability.
 *
 * Neither product minds in which order its inner index runs, and the columns of O may have any order, so that a lane
 * reads 16 neighbouring codes at once where mma wants single elements:
 *     S = Q K^T  lane c of a quad takes the dims [64 j + 16 c, + 16) of a key for the four k16 steps 4 j ..
 *     O = P V    lane group r takes the columns [16 r, + 16) of every 128; byte t of them is its column of tile t
 *
 * fp16 has few exponents. A query is divided by a power of two, so that its largest element is between 1 and 2. A
 * probability times its value's scale is kept relative to the largest scale that the warp has met, times 2^14. */
#ifndef CPA_CUDA_DECODE_QUANT_CUH
#define CPA_CUDA_DECODE_QUANT_CUH

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/cache/quant.cuh"

constexpr int DECODE_RUN = 16; /* keys of a stage: one k16 step of P V, within one page */
constexpr float DECODE_P_SCALE = 16384;

/* Neighbouring columns of O of a lane. */
template <typename C>
__host__ __device__ constexpr int lane_columns() {
    return C::V_DIM >= 128 ? 16 : 8;
}

__device__ inline void copy_async_4(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0));
}

template <int WORDS>
__device__ inline void load_shared(uint32_t (&to)[WORDS], uint32_t address) {
    if constexpr (WORDS == 4) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
    }
}

__device__ inline void store_shared(uint32_t address, uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ inline void store_shared(uint32_t address, const uint32_t (&words)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

/* Rows of codes in a stage, and the byte offset of a 16-byte chunk, such that the lanes that read together meet
 * different banks. */
template <int DIM>
struct key_codes {
    static constexpr int BYTES = DIM;
    static __device__ constexpr int twist(int row) { return DIM / 64 % 2 ? 0 : (row & 1) << 2; }
};
template <int DIM>
struct value_codes {
    static constexpr int BYTES = DIM;
    static __device__ constexpr int twist(int row) { return DIM >= 128 ? row & 6 : 0; }
};
template <typename Rows>
__device__ inline uint32_t chunk_at(int row, int chunk) {
    return (uint32_t)(row * Rows::BYTES + ((chunk ^ Rows::twist(row)) << 4));
}

/* The scales of a run, if its rows have any: a lane has that of the lane-th key or value, at `token` of `block`; zeros
 * if there is none. */
template <typename C>
__device__ void load_words(const cpa_cuda_attend_args &a, int kv_head, int block, int64_t token, bool valid,
                           uint32_t shared, int lane) {
    if (!a.k_words_at) return;
    const bool of_key = lane < DECODE_RUN;
    const char *words = of_key ? scale_word_at(a, a.k, a.k_block_stride, a.k_words_at, block, kv_head, token)
                               : scale_word_at(a, a.v, a.v_block_stride, a.v_words_at, block, kv_head, token);
    copy_async_4(shared + C::WORDS_AT + lane * 4, words, valid);
}

/* The queries as A operands in the order of the keys' codes, 16 bytes a lane and step, of which every gang writes some;
 * and the factor that was taken out of each row, times the scale of the head's keys if heads have scales. By_chunk: a
 * step has the 16 dims of a chunk, four neighbouring ones a lane. */
template <typename C, bool By_chunk = false>
__device__ void store_query_codes(uint32_t shared, float (&q_scale)[2], const cpa_cuda_attend_args &a,
                                  const cpa_cuda_piece &piece, int kv_group, int gang, int lane) {
    using element = typename C::element;
    const float keys_scale = head_scale(1, a.k_head_scales, a.head_scale_step, kv_group);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = piece.row_begin + 8 * half + lane / 4;
        const bool valid = row < piece.row_end;
        const row_place place(a, piece.q_row, valid ? row : piece.row_begin, kv_group);
        const element *from =
            (const element *)queries_of(a, piece) + place.state_row * a.q_row_stride + place.head * a.q_head_stride;
        float largest = 0;
#pragma unroll
        for (int pass = 0; pass < 2; pass++) { /* the largest element, then all relative to it */
            largest = quad_max(largest);
            const uint32_t exponent = min(max(__float_as_uint(largest) & 0x7f800000u, 1u << 23), 252u << 23);
            const float inverse = __uint_as_float((254u << 23) - exponent);
            q_scale[half] = __uint_as_float(exponent) * keys_scale;
#pragma unroll
            for (int k = 0; k < C::K_DIM / 16; k++) {
                const int column =
                    By_chunk ? 16 * k + 4 * (lane % 4) : 64 * (k / 4) + 16 * (lane % 4) + 4 * (k % 4);
                float x[4] = {0, 0, 0, 0};
                if (valid && column < a.k_dim) {
                    const uint2 four = *(const uint2 *)(from + column);
                    const element *each = (const element *)&four;
#pragma unroll
                    for (int e = 0; e < 4; e++) x[e] = to_float(each[e]);
                }
                if (pass == 0) {
#pragma unroll
                    for (int e = 0; e < 4; e++) largest = fmaxf(largest, fabsf(x[e]));
                } else if (k % C::GANGS == gang) {
                    store_shared(shared + k * 512 + half * 4, pack_pair<__half>(x[0] * inverse, x[1] * inverse));
                    store_shared(shared + k * 512 + half * 4 + 8, pack_pair<__half>(x[2] * inverse, x[3] * inverse));
                }
            }
        }
    }
}

/* Which key of a run is column `column` of the n-th eight; see decode_runs.cuh. */
template <bool REORDERED>
__device__ int run_key(int n, int column) {
    return REORDERED ? 4 * (column / 2) + 2 * n + column % 2 : 8 * n + column;
}

/* Scores of a run of 16 keys: [8 keys][rows as mma's C]. */
template <typename C>
__device__ void score_codes(float (&s)[2][4], uint32_t queries, const float (&q_scale)[2], uint32_t stage,
                            const uint32_t (&words)[4], bool row_words, int lane) {
    using codes = typename C::codes;
    float odd[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}}; /* every other step: shorter chains of mma that wait for another */
    uint32_t zero[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        uint32_t word = words[0];
        if (row_words)
            asm volatile("ld.shared.b32 %0, [%1];"
                         : "=r"(word)
                         : "r"(stage + C::WORDS_AT + run_key<C::RUNS>(n, lane / 4) * 4));
        zero[n] = codes::zero(word, word);
    }
#pragma unroll
    for (int j = 0; j < C::K_DIM / 64; j++) {
        uint32_t part[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++)
            load_shared(part[n],
                        stage + chunk_at<key_codes<C::K_DIM>>(run_key<C::RUNS>(n, lane / 4), 4 * j + lane % 4));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t q[4];
            load_shared(q, queries + (4 * j + i) * 512);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                uint32_t low, high;
                codes::widen(part[n][i], zero[n], low, high);
                mma<__half>(i % 2 ? odd[n] : s[n], q, low, high);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = (s[n][e] + odd[n][e]) * (codes::scale(words[2 * n + e % 2]) * q_scale[e / 2]);
}

/* o += P V for a run of 16 keys; words: of this lane's keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9. */
template <typename C>
__device__ void weigh_codes(float (&o)[C::V_DIM / 8][4], const uint32_t (&p)[4], uint32_t values,
                            const uint32_t (&words)[4], int lane) {
    using codes = typename C::codes;
    constexpr int LANE_BYTES = lane_columns<C>(), WORDS = LANE_BYTES / 4;
    const uint32_t zeros[2] = {codes::zero(words[0], words[1]), codes::zero(words[2], words[3])};
#pragma unroll
    for (int group = 0; group < C::V_DIM / (8 * LANE_BYTES); group++) {
        uint32_t x[4][WORDS];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 2 * (lane % 4) + (i & 1) + 4 * (i & 2), byte = (8 * group + lane / 4) * LANE_BYTES;
            load_shared(x[i], values + chunk_at<value_codes<C::V_DIM>>(row, byte / 16) + byte % 16);
        }
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            uint32_t b[2][4];
#pragma unroll
            for (int side = 0; side < 2; side++) { /* two keys' codes of four columns, column by column */
                const uint32_t even = x[2 * side][w], odd = x[2 * side + 1][w];
                codes::widen(__byte_perm(even, odd, 0x5140), zeros[side], b[side][0], b[side][1]);
                codes::widen(__byte_perm(even, odd, 0x7362), zeros[side], b[side][2], b[side][3]);
            }
#pragma unroll
            for (int t = 0; t < 4; t++) mma<__half>(o[group * LANE_BYTES + 4 * w + t], p, b[0][t], b[1][t]);
        }
    }
}

/* The rows of a warp's O that this lane has of `half`, in the order of their columns. */
template <typename C>
__device__ void store_code_columns(float *row, const float (&o)[C::V_DIM / 8][4], int half, float factor, int lane) {
    constexpr int LANE_BYTES = lane_columns<C>();
#pragma unroll
    for (int n = 0; n < C::V_DIM / 8; n += 4) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = (8 * (n / LANE_BYTES) + 2 * (lane % 4) + e) * LANE_BYTES + n % LANE_BYTES;
            const float value[4] = {o[n][2 * half + e] * factor, o[n + 1][2 * half + e] * factor,
                                    o[n + 2][2 * half + e] * factor, o[n + 3][2 * half + e] * factor};
            store_floats(row + column, value);
        }
    }
}

#endif
