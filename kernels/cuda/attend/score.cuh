/* What the kernels of attend do to scores beside the mask of the layer: softcap, temperature, ALiBi, bias, bits and
 * sinks, as cpattn/score.h says. They are compiled with it (RULED) and without; which rules there are is seen at run
 * time. Rows and keys have their indices in the sequence relative to an origin, the index of the piece's first row. */
#ifndef CPA_CUDA_SCORE_CUH
#define CPA_CUDA_SCORE_CUH

#include <type_traits>

#include "kernels/cuda/attend/attend.cuh"
#include "kernels/cuda/attend/mma.cuh"
#include "kernels/cuda/attend/state.cuh"

/* What a row adds; in shared memory. */
struct row_score {
    float factor, slope;       /* factor of temperature, times the softcap or the scale; slope of ALiBi */
    int32_t index;             /* index of the query, from `origin` on */
    int32_t bits_first;        /* index of bit 0, from `origin` on */
    int32_t words, bias_first; /* words of bits; index of the first key of the bias, from `origin` on */
    int64_t origin;            /* index in the sequence that the other indices are counted from */
    row_keys keys;             /* decode: which keys the row attends */
    const uint32_t *bits;      /* NULL: the mask alone decides */
    const char *bias;          /* values of the bias, from key bias.first on */
};

__device__ inline int32_t relative(int64_t index, int64_t origin) {
    const int64_t most = 1 << 30, apart = index - origin;
    return (int32_t)(apart < -most ? -most : apart > most ? most : apart);
}

/* The index of a query, or of a key, counted from the item's first. */
__device__ inline int64_t query_index(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t token) {
    if (a.rows) return a.rows[piece.q_row + token].position;
    const int64_t local = piece.q_first + token;
    return a.map.cp_size == 1 ? local : cpa_token_position(a.map, piece.q_set, local);
}
/* Its row among those of the queries, by which bits and biases are found. */
__device__ inline int64_t query_row(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t token) {
    return a.rows ? a.rows[piece.q_row + token].row : piece.q_row + token;
}
__device__ inline int64_t key_index(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t key) {
    const int64_t local = piece.k_first + key;
    return a.map.cp_size == 1 || piece.k_set.kind == CPA_TOKENS_ALL ? local
                                                                    : cpa_token_index(a.map, piece.k_set, local);
}
/* Whether neighbouring keys of the item are neighbours in the sequence, all of them. */
__device__ inline bool keys_are_linear(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece) {
    return a.map.cp_size == 1 || piece.k_set.kind == CPA_TOKENS_ALL;
}
/* The same of `keys` keys from a multiple of it on. */
__device__ inline bool runs_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int keys) {
    return keys_are_linear(a, piece) || (a.map.interleave % keys == 0 && piece.k_first % keys == 0);
}

/* The bits of a row of the queries, which has the index `index`. */
__device__ inline void fill_row_bits(row_score &score, const cpa_cuda_attend_args &a, int64_t query_row, int64_t index,
                                     int64_t origin) {
    const cpa_key_bits &custom = a.score.custom;
    score.index = relative(index, origin);
    score.bits = NULL;
    score.bits_first = score.words = 0;
    if (!custom.bits) return;
    const int64_t entry = custom.row_map ? custom.row_map[query_row] : query_row, word = custom.row_word[entry];
    score.bits_first = relative(custom.first[entry], origin);
    score.words = custom.width[entry] / 32 + (custom.width[entry] % 32 > 0);
    if (word >= 0) score.bits = custom.bits + word;
}

/* A packed row of a piece; past the last that one's again, and of a piece without rows the first of its item. */
__device__ inline void fill_row_score(row_score &score, const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                                      int32_t packed, int32_t kv_group, int64_t origin) {
    const int32_t row = max(min(packed, piece.row_end - 1), 0);
    const row_place place(a, piece.q_row, row, kv_group);
    const int32_t token = token_of_row(a, row);
    const int64_t index = query_index(a, piece, token), of_queries = query_row(a, piece, token);
    const cpa_cuda_score &rules = a.score;
    score.factor = rules.softcap > 0 ? rules.softcap : rules.pre_scale;
    if (rules.temperature_len > 0 && (float)index > rules.temperature_len)
        score.factor *= log2f((float)index) * rules.temperature_inverse;
    score.slope = rules.alibi_slopes ? rules.alibi_slopes[place.head] : 0;
    score.origin = origin;
    fill_row_bits(score, a, of_queries, index, origin);
    score.bias = NULL;
    score.bias_first = relative(rules.bias.first, origin);
    if (rules.bias.values) {
        const int64_t entry = rules.bias.row_map ? rules.bias.row_map[of_queries] : of_queries;
        const int64_t at = entry * rules.bias.row_stride + place.head * rules.bias.head_stride;
        score.bias = (const char *)rules.bias.values + at * element_bytes(rules.bias.dtype);
    }
}

/* N raw scores become a line over tanh, which is 1 - 2 / (exp(2 x) + 1), or near 0 x times a polynomial in x^2; off by at
 * most 9e-7 of its value with the approximate units (attend.h has the constants). Step by step, as each of them waits
 * for the one before. */
template <int N>
__device__ inline void cap_scores_of(const cpa_cuda_tanh &tanh, const cpa_cuda_tanh_line &line, float *(&s)[N]) {
    float e[N], p[N];
#pragma unroll
    for (int i = 0; i < N; i++) e[i] = exp2_fast(*s[i] * tanh.exp_scale), *s[i] *= tanh.scale;
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = *s[i] * *s[i];
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = fmaf(p[i], fmaf(p[i], line.near[2], line.near[1]), line.near[0]);
#pragma unroll
    for (int i = 0; i < N; i++) e[i] += 1;
#pragma unroll
    for (int i = 0; i < N; i++) asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(e[i]));
#pragma unroll
    for (int i = 0; i < N; i++) {
        float result = fmaf(line.far_scale, e[i], line.far_shift);
        asm("{ .reg .pred is_near; setp.lt.f32 is_near, %1, %2; @is_near fma.rn.f32 %0, %3, %4, %5; }"
            : "+f"(result)
            : "f"(fabsf(*s[i])), "f"(CPA_CUDA_TANH_NEAR), "f"(*s[i]), "f"(p[i]), "f"(line.near_shift));
        *s[i] = result;
    }
}
/* The same where all of them are within the middle of tanh: its units of exponentials and inverses stay free, of which
 * softmax needs those of exponentials. */
template <int N>
__device__ inline void cap_middle_scores_of(const cpa_cuda_tanh &tanh, const cpa_cuda_tanh_line &line,
                                            float *(&s)[N]) {
    float u[N], p[N];
#pragma unroll
    for (int i = 0; i < N; i++) *s[i] *= tanh.scale;
#pragma unroll
    for (int i = 0; i < N; i++) u[i] = *s[i] * *s[i], p[i] = line.middle[CPA_CUDA_TANH_MIDDLE_TERMS - 1];
#pragma unroll
    for (int term = CPA_CUDA_TANH_MIDDLE_TERMS - 2; term >= 0; term--)
#pragma unroll
        for (int i = 0; i < N; i++) p[i] = fmaf(p[i], u[i], line.middle[term]);
#pragma unroll
    for (int i = 0; i < N; i++) *s[i] = fmaf(*s[i], p[i], line.near_shift);
}

/* The value that is added to the score of a key. */
__device__ inline float bias_at(const cpa_score_bias &bias, const char *row, int32_t at) {
    return at < 0 || at >= bias.width ? 0 : read_element(row, bias.dtype, at);
}

/* The lowest n bits. */
__device__ inline uint32_t low_bits(int32_t n) {
    return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1;
}

/* Which of 32 neighbouring keys, the first of index t, a row with bits sees, as far as bits and causality say. Without
 * a branch, so that the loads of several can be under way. */
__device__ inline uint32_t seen_keys(const row_score &row, bool causal, int32_t t) {
    const int32_t bit = t - row.bits_first, word = bit >> 5;
    const auto word_at = [&](int32_t i) { return i >= 0 && i < row.words ? __ldg(row.bits + i) : 0u; };
    const uint32_t ordinary = causal ? low_bits(row.index - t + 1) : ~0u;
    return __funnelshift_r(word_at(word), word_at(word + 1), bit & 31) | (ordinary & low_bits(-bit));
}

/* Those of 32 keys of the item from `key` on that its bounds let a row see. */
__device__ inline uint32_t seen_within(row_keys keys, int32_t sinks, int32_t key) {
    return low_bits(keys.end - key) & (~low_bits(keys.first - key) | low_bits(sinks - key));
}

/* ---- which keys a row sees at all, where bits may show more than causality ---- */

/* The keys of a token's rows: the `end` of row_keys is that of its bits; and those before `whole` are all seen, but for
 * the window. */
struct token_keys {
    row_keys keys;
    int32_t whole;
};
__device__ inline token_keys keys_of_token(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t token) {
    const row_keys keys = keys_of_row(a, piece, token * a.group, a.rows);
    token_keys result = {keys, keys.end};
    const cpa_key_bits &custom = a.score.custom;
    if (!custom.bits) return result;
    const int64_t row = query_row(a, piece, token), entry = custom.row_map ? custom.row_map[row] : row;
    if (custom.row_word[entry] < 0) return result;
    const int64_t first = custom.first[entry];
    const int32_t width = custom.width[entry];
    result.whole = min(keys.end, keys_before(a, piece, first));
    result.keys.end = width > 0 ? keys_before(a, piece, first + width) : result.whole;
    return result;
}

/* key_walk of a piece whose rows may have bits. */
template <int TILE>
struct ruled_walk : key_walk<TILE> {
    int32_t whole, end; /* the least and the largest of the rows' */

    /* As those of key_walk. */
    __device__ void start(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                          const cpa_cuda_listed_row *rows = nullptr) {
        if (threadIdx.x == 0) whole = 0x7fffffff, end = 0;
        key_walk<TILE>::start(a, piece, rows);
        if (!a.score.custom.bits) return;
        const int32_t first = token_of_row(a, piece.row_begin), last = token_of_row(a, piece.row_end - 1);
        for (int32_t token = first + (int32_t)threadIdx.x; token <= last; token += blockDim.x) take(a, piece, token);
        __syncthreads();
        if (threadIdx.x == 0) widen(piece);
        __syncthreads();
    }
    __device__ void start_warp(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int lane) {
        if (lane == 0) whole = 0x7fffffff, end = 0;
        key_walk<TILE>::start_warp(a, piece, lane);
        if (!a.score.custom.bits) return;
        const int32_t first = token_of_row(a, piece.row_begin), last = token_of_row(a, piece.row_end - 1);
        for (int32_t token = first + lane; token <= last; token += 32) take(a, piece, token);
        __syncwarp();
        if (lane == 0) widen(piece);
        __syncwarp();
    }
    __device__ void take(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t token) {
        const token_keys of = keys_of_token(a, piece, token);
        atomicMin(&whole, of.whole);
        atomicMax(&end, of.keys.end);
    }
    __device__ void widen(const cpa_cuda_piece &piece) {
        if (piece.row_begin >= piece.row_end) return;
        this->low.end = whole;
        this->high.end = end;
        this->count_tiles(piece);
    }
    __device__ row_keys keys_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t row,
                                const cpa_cuda_listed_row *rows = nullptr) const {
        if (!a.score.custom.bits) return key_walk<TILE>::keys_of(a, piece, row, rows);
        return keys_of_token(a, piece, token_of_row(a, min(row, piece.row_end - 1))).keys;
    }
};
template <bool RULED, int TILE>
using walk_of = typename std::conditional<RULED, ruled_walk<TILE>, key_walk<TILE>>::type;

/* ---- the scores of a tile of a prefill kernel ---- */

/* What a tile needs of the piece. */
struct ruled_piece {
    int32_t first;      /* index of key 0 of the item, from the origin on, if indices are linear */
    int32_t bias_first; /* index of the first key of the bias, from the origin on */
    bool linear, runs;  /* keys_are_linear, runs_of 32 */

    __device__ void fill(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece) {
        const int64_t origin = origin_of(a, piece);
        linear = keys_are_linear(a, piece);
        runs = runs_of(a, piece, 32);
        first = linear ? relative(key_index(a, piece, 0), origin) : 0;
        bias_first = relative(a.score.bias.first, origin);
    }
    static __device__ int64_t origin_of(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece) {
        return query_index(a, piece, token_of_row(a, piece.row_begin));
    }
};

/* The indices of the keys of a tile that are not linear, by `threads` threads. */
template <int KEYS>
__device__ inline void index_tile(int32_t (&indices)[KEYS], const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                                  int key, int thread, int threads) {
    const int64_t origin = ruled_piece::origin_of(a, piece);
    for (int i = thread; i < KEYS; i += threads) indices[i] = relative(key_index(a, piece, key + i), origin);
}

/* Raw scores of keys 8 n + (0, 1) of a tile, for a row, are capped. s(n, e): those scores. */
template <int KEYS, typename Scores>
__device__ inline void cap_row(Scores s, const cpa_cuda_score &rules) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n += 2) {
        float *four[] = {&s(n, 0), &s(n, 1), &s(n + 1, 0), &s(n + 1, 1)};
        cap_scores_of(rules.tanh, rules.tanh_line, four);
    }
}

/* ALiBi of those keys, 8 n + column + (0, 1), and its slope in the unit of the scores. key: the first of the tile.
 * Where keys are linear, what all of this thread's have alike is not added but given back. */
template <int KEYS, typename Scores>
__device__ inline float slope_row(Scores s, float slope, const ruled_piece &p, const row_score &row,
                                  const int32_t (&indices)[KEYS], int key, int column) {
    if (!p.linear) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) s(n, e) = fmaf(slope, (float)(indices[8 * n + column + e] - row.index), s(n, e));
        return 0;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) s(n, e) = fmaf(slope, (float)(8 * n + e), s(n, e));
    return slope * (float)(p.first + key + column - row.index);
}

/* The bias of those keys. */
template <int KEYS, typename Scores>
__device__ inline void bias_row(Scores s, const cpa_score_bias &bias, const ruled_piece &p, const row_score &row,
                                const int32_t (&indices)[KEYS], int key, int column) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int at = 8 * n + column + e;
            s(n, e) += bias_at(bias, row.bias, (p.linear ? p.first + key + at : indices[at]) - p.bias_first);
        }
}

/* Which of the 32 keys from `at` of the tile on a row with bits sees. */
template <int KEYS>
__device__ inline uint32_t seen_of_tile(const ruled_piece &p, const row_score &row, bool causal,
                                        const int32_t (&indices)[KEYS], int key, int at) {
    if (p.runs) return seen_keys(row, causal, p.linear ? p.first + key + at : indices[at]);
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < 32; i++) seen |= (seen_keys(row, causal, indices[at + i]) & 1) << i;
    return seen;
}

/* Of a row, 32 of the tile's keys for each lane of its quad: those that its bounds and its bits show. Linear: keys
 * are. */
template <bool LINEAR = false, int KEYS>
__device__ inline uint32_t shown_of_tile(const ruled_piece &p, const row_score &row, row_keys keys, int32_t sinks,
                                         bool causal, const int32_t (&indices)[KEYS], int key, int lane) {
    constexpr int GROUPS = KEYS / 32;
    static_assert(GROUPS <= 4, "a group a lane");
    const int at = lane % GROUPS * 32;
    const uint32_t within = seen_within(keys, sinks, key + at);
    if (!row.bits) return within;
    if (LINEAR) return within & seen_keys(row, causal, p.first + key + at);
    return within & seen_of_tile(p, row, causal, indices, key, at);
}

/* Hides what is not among those. */
template <int KEYS, typename Scores>
__device__ inline void mask_row_bits(Scores s, uint32_t shown, int lane) {
#pragma unroll
    for (int group = 0; group < KEYS / 32; group++) {
        const uint32_t seen = __shfl_sync(0xffffffff, shown, (lane & ~3) | group) >> 2 * (lane % 4);
#pragma unroll
        for (int n = 4 * group; n < 4 * group + 4; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (!(seen >> (8 * (n % 4) + e) & 1)) s(n, e) = -INFINITY;
    }
}

#endif
