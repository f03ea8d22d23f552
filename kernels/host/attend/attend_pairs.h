/* Packing and products of bf16 for attend_vector.h, where the CPU adds products of pairs of bf16 to sums in fp32: queries
 * and keys as they are, probabilities rounded to bf16 as CUDA's kernels do. A word is a pair: elements 2 i and 2 i + 1
 * of a key, or of two neighbouring keys' values the same element, the first of the two in the lower half. Packed keys
 * are [panel of keys][word][PANEL], packed values [panel of v_dim][pair of keys][PANEL]; queries lie row after row. A
 * file that defines ISA_PAIRS and includes attend_vector.h defines
 *     score_words    the sums of a panel of keys, all words of it in one order
 *     weigh_words    a panel of v_dim plus what some pairs of keys weigh, in ascending order
 * Neither may depend on what rows are beside one another. Results are never denormal, so that adding zeros to what
 * either has stored keeps its bits, up to the sign of a zero. */
#ifndef CPA_HOST_ATTEND_PAIRS_H
#define CPA_HOST_ATTEND_PAIRS_H

enum { STEP = PANEL }; /* keys that are taken at a time from pages */

#include "kernels/host/attend/attend_coming.h"

enum {
    WORDS = 16, /* dims are filled up to whole multiples with zeros */
    Q_WORDS = CPA_PAIR_Q_WORDS,
    PAIR_V_STRIDE = (TILE / 2 + 1) * PANEL
};

/* s[r][0..PANEL) = sum over words of q[r] * k[word][0..PANEL), times scale unless SCALES_LATE. */
INLINE void score_words(const int rows, const float *q, const float *k, int32_t words, float scale, float *s,
                        coming *next);
/* o[r][0..PANEL) += sum over `pairs` pairs, a multiple of WORDS, of p[r][pair] * v[pair][0..PANEL). */
INLINE void weigh_words(const int rows, const float *p, const float *v, int32_t pairs, float *o, int64_t o_stride,
                        coming *next);

INLINE int32_t words_of(int32_t dim) {
    return (dim + 2 * WORDS - 1) / (2 * WORDS) * WORDS;
}

/* ---- Packing ---- */

typedef uint16_t wide_rows[PANEL][CPA_MAX_HEAD_DIM];

/* The rows of a panel of one head: in place if they lie in one piece and have whole multiples of WORDS, and else filled
 * up. Zeros for lanes that are not in use, and for those whose value weighs nothing for a row that asks so. */
static __attribute__((noinline)) void find_panel(const cpa_attend_tile *tile, const cpa_attend_pages *pages,
                                                 const uint8_t *weighs, int32_t head, int32_t panel, const char **rows,
                                                 wide_rows wide) {
    const int32_t words = words_of(pages->dim);
    if (!weighs && !pages->run_bytes && pages->dim == 2 * words && panel >= tile->begin && panel + STEP <= tile->end) {
        find_step(pages, head, tile->key0 + panel, rows);
        return;
    }
    for (int i = 0; i < PANEL; i++) {
        const int32_t lane = panel + i;
        rows[i] = weighs && !weighs[lane] ? (const char *)ZEROS : row_of_lane(tile, pages, head, lane);
        if ((pages->dim == 2 * words && !pages->run_bytes) || rows[i] == (const char *)ZEROS) continue;
        memset(wide[i] + 2 * (words - WORDS), 0, 4 * WORDS);
        const int64_t bytes = pages->dim * (int64_t)sizeof(uint16_t);
        cpa_runs_gather((char *)wide[i], rows[i], pages->run_bytes ? pages->run_bytes : bytes, pages->run_stride,
                        bytes);
        rows[i] = (const char *)wide[i];
    }
}

/* Packs a panel of keys: [words][PANEL]. */
static __attribute__((noinline)) void pack_keys(const char *const *rows, int32_t words, float *to, coming *next) {
    for (int32_t word = 0; word < words; word += WORDS) {
        for (int cell = 0; cell < PANEL; cell += WORDS) {
            if (next) request(next, WORDS / 2);
            isa_transpose(to + word * PANEL + cell, PANEL, rows + cell, CPA_F32, word);
        }
    }
}

/* Packs a panel of values, each two keys together: [panel of v_dim][PANEL / 2][PANEL], the panels `stride` words
 * apart. */
static __attribute__((noinline)) void pack_values(const char *const *rows, int32_t words, float *to, int64_t stride,
                                                  coming *next) {
    const __m512i left = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                          37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i right = _mm512_add_epi16(left, _mm512_set1_epi16(16));
    for (int32_t word = 0; word < words; word += WORDS, to += stride) {
        for (int pair = 0; pair < PANEL / 2; pair++) {
            const __m512i even = _mm512_loadu_si512(rows[2 * pair] + word * 4);
            const __m512i odd = _mm512_loadu_si512(rows[2 * pair + 1] + word * 4);
            if (next) request(next, 1);
            _mm512_storeu_si512(to + pair * PANEL, _mm512_permutex2var_epi16(even, left, odd));
            _mm512_storeu_si512(to + pair * PANEL + ISA_LANES, _mm512_permutex2var_epi16(even, right, odd));
        }
    }
}

static void pack_tile(const cpa_attend_tile *tile, float *k, float *v) {
    const int32_t k_words = words_of(tile->k_pages->dim), v_words = words_of(tile->v_pages->dim);
    const int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    const char *rows[PANEL];
    wide_rows wide;
    for (int32_t lane = begin; lane < end; lane += PANEL) {
        find_panel(tile, tile->k_pages, NULL, 0, lane, rows, wide);
        pack_keys(rows, k_words, k + lane * k_words, NULL);
        find_panel(tile, tile->v_pages, NULL, 0, lane, rows, wide);
        pack_values(rows, v_words, v + lane / 2 * PANEL, PAIR_V_STRIDE, NULL);
    }
}

/* ---- Before values are weighed ---- */

/* What was weighed before shrinks. */
INLINE void shrink_sums(const cpa_attend_group *group, const float *shrink) {
    for (int32_t i = 0; i < group->heads * group->rows; i++) {
        float *o = group->o + i * group->o_stride;
        for (int64_t d = 0; shrink[i] != 1.0f && d < group->o_stride; d += ISA_LANES)
            store(o + d, load(o + d) * shrink[i]);
    }
}

/* ---- Tiles ---- */

INLINE void score_tile(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                       int32_t end) {
    const int32_t words = words_of(tile->k_pages->dim);
    for (int32_t key = begin; key < end; key += PANEL)
        score_words(rows, group->q, tile->k + key * words, words, tile->scale, group->scores + key, NULL);
}

INLINE void weigh_tile(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                       int32_t end, const float *shrink) {
    shrink_sums(group, shrink);
    for (int32_t d = 0; d < group->o_stride; d += PANEL)
        weigh_words(rows, group->scores + begin / 2, tile->v + d / PANEL * PAIR_V_STRIDE + begin / 2 * PANEL,
                    (end - begin) / 2, group->o + d, group->o_stride, NULL);
}

/* A packed panel of a tile's pages. */
typedef float packed_panel[PANEL * CPA_MAX_HEAD_DIM / 2];

/* Packs the panel and head `unit` of the lanes from `begin` on, heads first, and says what comes after it and its
 * neighbours: of those pages, or the first of the others. Returns 0 past the last. */
INLINE int pack_unit(const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t unit, int32_t begin,
                     int32_t end, int values, float *packed, coming *next) {
    const cpa_attend_pages *pages = values ? tile->v_pages : tile->k_pages;
    const int32_t head = unit % group->heads, key = begin + unit / group->heads * STEP;
    const char *rows[PANEL];
    wide_rows wide;
    if (key >= end) return 0;
    if (head % HEADS == 0)
        expect_after(next, tile, pages, group, head, key, end, values ? tile->k_pages : tile->v_pages,
                     tile->key0 + (values ? TILE : begin));
    find_panel(tile, pages, values ? tile->weighs : NULL, head, key, rows, wide);
    if (values)
        pack_values(rows, words_of(pages->dim), packed, PANEL / 2 * PANEL, next);
    else
        pack_keys(rows, words_of(pages->dim), packed, next);
    return 1;
}

/* The scores of a tile from its pages. Values come next. */
INLINE void score_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end) {
    _Alignas(LINE) packed_panel k;
    const int32_t words = words_of(tile->k_pages->dim);
    coming next;
    for (int32_t unit = 0; pack_unit(tile, group, unit, begin, end, 0, k, &next); unit++) {
        const int32_t head = unit % group->heads, key = begin + unit / group->heads * STEP;
        score_words(rows, group->q + (int64_t)head * rows * Q_WORDS, k, words, tile->scale,
                    group->scores + head * rows * TILE + key, &next);
    }
}

/* Weighs the values of a tile from its pages. The next tile's keys come next. */
INLINE void weigh_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end, const float *shrink) {
    _Alignas(LINE) packed_panel v;
    coming next;
    shrink_sums(group, shrink);
    for (int32_t unit = 0; pack_unit(tile, group, unit, begin, end, 1, v, &next); unit++) {
        const int32_t head = unit % group->heads, key = begin + unit / group->heads * STEP;
        for (int32_t d = 0; d < group->o_stride; d += PANEL)
            weigh_words(rows, group->scores + head * rows * P_STRIDE + key / 2, v + d / PANEL * (PANEL / 2 * PANEL),
                        PANEL / 2, group->o + head * rows * group->o_stride + d, group->o_stride, &next);
    }
}

#endif
