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
    float factor, slope;      /* of temperature, times the softcap or the scale; of ALiBi */
    int32_t index;            /* of the query, relative */
    int32_t bits_first;       /* index of bit 0, relative */
    int32_t words, bias_first; /* of bits; index of the first key of the bias, relative */
    int64_t origin;           /* what indices are relative to */
    row_keys keys;            /* decode: those of the row */
    const uint32_t *bits;     /* NULL: the mask alone decides */
    const char *bias;         /* of key bias.first */
};

__device__ inline int32_t relative(int64_t index, int64_t origin) {
    const int64_t most = 1 << 30, apart = index - origin;
    return (int32_t)(apart < -most ? -most : apart > most ? most : apart);
}

/* The index of a query, or of a key, counted from the item's first. */
__device__ inline int64_t query_index(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t token) {
    const int64_t local = piece.q_first + token;
    return a.map.cp_size == 1 ? local : cpa_token_position(a.map, piece.q_set, local);
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

/* A packed row of a piece; past the last that one's again, and of a piece without rows the first of its item. */
__device__ inline void fill_row_score(row_score &score, const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                                      int32_t packed, int32_t kv_group, int64_t origin) {
    const int32_t row = max(min(packed, piece.row_end - 1), 0);
    const row_place place(a, piece.q_row, row, kv_group);
    const int64_t index = query_index(a, piece, token_of_row(a, row));
    const cpa_cuda_score &rules = a.score;
    score.factor = rules.softcap > 0 ? rules.softcap : rules.pre_scale;
    if (rules.temperature_len > 0 && (float)index > rules.temperature_len)
        score.factor *= log2f((float)index) * rules.temperature_inverse;
    score.slope = rules.alibi_slopes ? rules.alibi_slopes[place.head] : 0;
    score.index = relative(index, origin);
    score.origin = origin;
    score.bits = NULL;
    score.bits_first = 0;
    if (rules.custom.bits) {
        const int64_t entry = rules.custom.row_map ? rules.custom.row_map[place.state_row] : place.state_row;
        const int64_t word = rules.custom.row_word[entry];
        score.bits_first = relative(rules.custom.first[entry], origin);
        score.words = (rules.custom.width[entry] + 31) / 32;
        if (word >= 0) score.bits = rules.custom.bits + word;
    }
    score.bias = NULL;
    score.bias_first = relative(rules.bias.first, origin);
    if (rules.bias.values) {
        const int64_t entry = rules.bias.row_map ? rules.bias.row_map[place.state_row] : place.state_row;
        const int64_t at = entry * rules.bias.row_stride + place.head * rules.bias.head_stride;
        score.bias = (const char *)rules.bias.values + at * element_bytes(rules.bias.dtype);
    }
}

/* tanh of the capped score, of a raw one: below 0.36 x times a polynomial in x^2 (weighted least squares on it, relative
 * error 4e-8), else 1 - 2 / (exp(2 x) + 1). Off by at most 5e-7 of its value with the approximate units. */
__device__ inline float tanh_of(const cpa_cuda_score &rules, float raw) {
    const float x = raw * rules.tanh_scale, square = x * x;
    float p = fmaf(square, -0x1.8ed9eep-5f, 0x1.1035eap-3f), inverse;
    p = fmaf(p, square, -0x1.555286p-2f);
    p = fmaf(p * square, x, x);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2_fast(raw * rules.tanh_scale_log2) + 1));
    return fabsf(x) < 0.36f ? p : fmaf(-2.0f, inverse, 1.0f);
}

/* The value that is added to the score of a key. */
__device__ inline float bias_at(const cpa_score_bias &bias, const char *row, int32_t at) {
    return at < 0 || at >= bias.width ? 0 : read_element(row, bias.dtype, at);
}

/* Which of 32 neighbouring keys, the first of index t, a row with bits sees, as far as bits and causality say. */
__device__ inline uint32_t seen_keys(const row_score &row, bool causal, int32_t t) {
    const int32_t bit = t - row.bits_first;
    const auto word_at = [&](int32_t i) { return i < row.words ? __ldg(row.bits + i) : 0u; };
    uint32_t ordinary = ~0u;
    if (bit >= 0) return __funnelshift_r(word_at(bit / 32), word_at(bit / 32 + 1), bit % 32);
    if (causal && row.index - t < 31) ordinary = row.index < t ? 0 : (2u << (row.index - t)) - 1;
    if (bit <= -32) return ordinary;
    return (ordinary & ((1u << -bit) - 1)) | word_at(0) << -bit;
}

/* ---- which keys a row sees at all, where bits may show more than causality ---- */

/* The keys of a token's rows: the `end` of row_keys is that of its bits; and those before `whole` are all seen, but for
 * the window. */
struct token_keys {
    row_keys keys;
    int32_t whole;
};
__device__ inline token_keys keys_of_token(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t token) {
    const row_keys keys = keys_of_row(a, piece, token * a.group);
    token_keys result = {keys, keys.end};
    const cpa_custom_mask &custom = a.score.custom;
    if (!custom.bits) return result;
    const int64_t row = piece.q_row + token, entry = custom.row_map ? custom.row_map[row] : row;
    if (custom.row_word[entry] < 0) return result;
    const int64_t first = custom.first[entry];
    const int32_t width = custom.width[entry];
    result.whole = min(keys.end, keys_before(a, piece, first));
    result.keys.end = width > 0 ? keys_before(a, piece, first + width) : result.whole;
    return result;
}

/* key_walk of a piece whose rows may have bits, and are not listed. */
template <int TILE>
struct ruled_walk : key_walk<TILE> {
    int32_t whole, end; /* the least and the largest of the rows' */

    /* As those of key_walk. */
    __device__ void start(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece,
                          const cpa_cuda_listed_row * = nullptr) {
        if (threadIdx.x == 0) whole = 0x7fffffff, end = 0;
        key_walk<TILE>::start(a, piece);
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
                                const cpa_cuda_listed_row * = nullptr) const {
        if (!a.score.custom.bits) return key_walk<TILE>::keys_of(a, piece, row);
        return keys_of_token(a, piece, token_of_row(a, min(row, piece.row_end - 1))).keys;
    }
};
template <bool RULED, int TILE>
using walk_of = typename std::conditional<RULED, ruled_walk<TILE>, key_walk<TILE>>::type;

/* ---- the scores of a tile of a prefill kernel ---- */

/* What a tile needs of the piece. */
struct ruled_piece {
    int32_t first;      /* index of key 0 of the item, relative, if they are linear */
    int32_t bias_first; /* of the bias */
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

/* The scores of keys 8 n + column + (0, 1) of a tile, for a row: softcap, temperature, ALiBi and bias. s(n, e): its
 * scores; key: the first of the tile. */
template <bool BIASED, int KEYS, typename Scores>
__device__ inline void rule_row(Scores s, const cpa_cuda_attend_args &a, const ruled_piece &p, const row_score &row,
                                const int32_t (&indices)[KEYS], int key, int column) {
    const cpa_cuda_score &rules = a.score;
    if (!rules.transforms) return;
    const float factor = row.factor;
    if (rules.softcap > 0) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) s(n, e) = tanh_of(rules, s(n, e)) * factor;
    } else {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) s(n, e) *= factor;
    }
    if (rules.alibi_slopes) {
        const float slope = row.slope, apart = (float)(p.first + key + column - row.index);
        if (p.linear) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) s(n, e) = fmaf(slope, apart + (float)(8 * n + e), s(n, e));
        } else {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    s(n, e) = fmaf(slope, (float)(indices[8 * n + column + e] - row.index), s(n, e));
        }
    }
    if (BIASED && row.bias) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = 8 * n + column + e;
                s(n, e) += bias_at(rules.bias, row.bias, (p.linear ? p.first + key + at : indices[at]) - p.bias_first);
            }
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

/* Hides what the bits of a row hide. Each lane of its quad looks at some of the keys. */
template <int KEYS, typename Scores>
__device__ inline void mask_row_bits(Scores s, const ruled_piece &p, const row_score &row, bool causal,
                                     const int32_t (&indices)[KEYS], int key, int lane) {
    constexpr int GROUPS = KEYS / 32;
    static_assert(GROUPS <= 4, "a group a lane");
    const uint32_t own = row.bits ? seen_of_tile(p, row, causal, indices, key, lane % GROUPS * 32) : ~0u;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const uint32_t seen = __shfl_sync(0xffffffff, own, (lane & ~3) | group) >> 2 * (lane % 4);
#pragma unroll
        for (int n = 4 * group; n < 4 * group + 4; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (!(seen >> (8 * (n % 4) + e) & 1)) s(n, e) = -INFINITY;
    }
}

/* ---- sinks ---- */

/* row_sink whose `out` a sink shares in. */
struct ruled_sink : row_sink {
    const float *logit; /* NULL: none */

    __device__ ruled_sink(const cpa_cuda_attend_args &a, int64_t q_row, int64_t state_shift, int32_t row,
                          int32_t kv_group, float lse_new)
        : row_sink(a, q_row, state_shift, row, kv_group, lse_new),
          logit(logit_of(a, row_place(a, q_row, row, kv_group).head)) {}
    __device__ ruled_sink(const cpa_cuda_attend_args &a, const cpa_cuda_piece &piece, int32_t row, int32_t kv_group,
                          float lse_new)
        : row_sink(a, piece, row, kv_group, lse_new),
          logit(logit_of(a, row_place(a, piece.q_row, row, kv_group).head)) {}

    static __device__ const float *logit_of(const cpa_cuda_attend_args &a, int32_t head) {
        return a.score.sink_logits ? a.score.sink_logits + head : NULL;
    }
    template <typename T, int N>
    __device__ void store(int32_t column, const float (&value)[N], const float (&old)[N]) const {
        float result[N];
        for (int i = 0; i < N; i++) result[i] = weights.b != 0 ? weights.b * value[i] : 0;
        if (adds_to_old())
            for (int i = 0; i < N; i++) result[i] += weights.a * old[i];
        if (o && !(resume && out)) store_floats(o + column, result);
        if (!out) return;
        const float kept = logit ? sink_factor(logit, 0, weights.lse) : 1;
        for (int i = 0; i < N; i++) result[i] *= kept;
        store_out<T>(column, result);
    }
    template <typename T, int N>
    __device__ void store(int32_t column, const float (&value)[N]) const {
        float old[N];
        load_old(column, old);
        store<T>(column, value, old);
    }
};
template <bool RULED>
using sink_of = typename std::conditional<RULED, ruled_sink, row_sink>::type;

#endif
