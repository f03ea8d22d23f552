/* Score rules in GCC vector code, for attend_vector.h: what cpattn/score.h says of softcap, temperature, ALiBi, bias
 * and bits, on a row of scores of a tile. Every lane is for itself, so a score does not depend on what shares its
 * tile. */
#include "base/convert.h"

/* tanh: below 0.36 x times a polynomial in x^2 (weighted least squares on it, relative error 4e-8), else
 * (1 - e) / (1 + e) with e = exp(-2 |x|). Off by at most 3e-7 of its value. */
INLINE vec tanh_vec(vec x) {
    const ivec sign = (ivec)x & (ivec)broadcast(-0.0f);
    const vec magnitude = (vec)((ivec)x ^ sign), square = x * x;
    vec p = isa_fma(square, broadcast(-0x1.8ed9eep-5f), broadcast(0x1.1035eap-3f));
    p = isa_fma(p, square, broadcast(-0x1.555286p-2f));
    p = isa_fma(p, square, broadcast(1.0f)) * magnitude;
    const vec e = exp2_vec(magnitude * broadcast(-0x1.715476p1f)); /* 2 log2(e) */
    const vec quotient = (broadcast(1) - e) / (broadcast(1) + e);
    const ivec small = magnitude < broadcast(0.36f);
    const vec tanh = (vec)(((ivec)p & small) | ((ivec)quotient & ~small));
    return (vec)((ivec)tanh | sign);
}

/* What a row and head adds to the score of a key. */
static float bias_of(const cpa_attend_tile_score *score, const cpa_attend_row_score *row, int64_t index) {
    float value;
    const int64_t at = index - score->bias_first;
    if (at < 0 || at >= score->bias_width) return 0;
    cpa_widen(&value, row->bias + at * cpa_dtype_bytes(score->bias_dtype), score->bias_dtype, 1);
    return value;
}

static void add_bias(const cpa_attend_tile *tile, const cpa_attend_row_score *row, float *s) {
    for (int32_t j = tile->begin; j < tile->end; j++) s[j] += bias_of(tile->score, row, tile->score->key_index[j]);
}

/* How far the keys of lanes from j on are behind the query, where one is too far for 32 bits. */
static __attribute__((noinline)) vec far_distances(const cpa_attend_tile_score *score, int64_t query, int32_t j) {
    vec distances;
    for (int i = 0; i < ISA_LANES; i++) distances[i] = (float)(score->key_index[j + i] - query);
    return distances;
}

/* Scores in their natural scale become those of the rules, times log2(e). */
static void transform_row(const cpa_attend_tile *tile, const cpa_attend_row_score *row, float *s, int32_t begin,
                          int32_t end) {
    const cpa_attend_tile_score *score = tile->score;
    const int64_t most = 1 << 30, apart = score->key_index[0] - row->index;
    const int near = apart >= -most && apart <= most && score->key_after[TILE - 1] < INT32_MAX / 2;
    const int32_t offset = near ? (int32_t)apart : 0;
    const vec log2_e = broadcast(0x1.715476p0f);
    for (int32_t j = begin; j < end; j += ISA_LANES) {
        vec x = load(s + j);
        if (score->softcap > 0) x = tanh_vec(x * score->softcap_inverse);
        x = x * row->factor;
        if (score->alibi) {
            ivec after;
            memcpy(&after, score->key_after + j, sizeof after);
            x += row->slope *
                 (near ? __builtin_convertvector(after + offset, vec) : far_distances(score, row->index, j));
        }
        store(s + j, x);
    }
    if (row->bias) add_bias(tile, row, s);
    for (int32_t j = begin; j < end; j += ISA_LANES) store(s + j, load(s + j) * log2_e);
}

/* Hides the keys that a row's bits hide; those before the first bit are left to the mask, which is causal or not. */
static void mask_bits(const cpa_attend_tile *tile, const cpa_attend_row_score *row, float *s) {
    for (int32_t j = tile->begin; j < tile->end; j++) {
        const int64_t index = tile->score->key_index[j], bit = index - row->bits_first;
        const int seen = bit < 0                  ? !tile->score->causal || index <= row->index
                         : index >= row->bits_end ? 0
                                                  : row->bits[bit / 32] >> (bit % 32) & 1;
        if (!seen) s[j] = -INFINITY;
    }
}

static __attribute__((noinline)) void score_row(const cpa_attend_tile *tile, int32_t i, float *s, int32_t begin,
                                                int32_t end) {
    const cpa_attend_row_score *row = &tile->score->rows[i];
    if (tile->score->transforms) transform_row(tile, row, s, begin, end);
    if (row->bits) mask_bits(tile, row, s);
    if (tile->score->selects) cpa_attend_hide_keys(&row->keys, tile->score->key_index, tile->begin, tile->end, s);
}
