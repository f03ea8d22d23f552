/* The inner loops of attend in GCC vector code. A file that has the vectors of an instruction set (isa/vector.h),
 * defines
 *     ISA_ROWS                 rows of a full group: ISA_ROWS x 2 accumulators fit the registers
 *     SCALES_LATE              if 1, products leave scores to be scaled
 * and includes this one gets pack_tile and attend_rows. */
#include <math.h>
#include <string.h>

#include "kernels/host/attend/attend_isa.h"
#include "kernels/host/cache/row_codes.h"
#include "kernels/host/cache/row_runs.h"
#include "kernels/host/isa/vector.h"

#ifndef SCALES_LATE
#define SCALES_LATE 0
#endif

enum {
    PANEL = 2 * ISA_LANES,
    TILE = CPA_ATTEND_TILE,
    /* From panel to panel of packed values: one row more than a tile, so that the panels do not share cache sets. */
    V_STRIDE = (TILE + 1) * PANEL
};

typedef uint32_t uvec __attribute__((vector_size(ISA_LANES * 4))); /* wraps around, whatever a NaN's bits are */

/* ---- Pages ---- */

static const float ZEROS[CPA_MAX_HEAD_DIM];

INLINE const char *row_at(const cpa_attend_pages *pages, int32_t head, int64_t key) {
    int64_t block = pages->table[key >> pages->block_shift];
    int64_t token = key & (((int64_t)1 << pages->block_shift) - 1);
    return pages->first + head * pages->head_stride + block * pages->block_stride + token * pages->token_stride;
}

/* The row of a lane; zeros outside the lanes in use. */
INLINE const char *row_of_lane(const cpa_attend_tile *tile, const cpa_attend_pages *pages, int32_t head, int32_t lane) {
    if (lane < tile->begin || lane >= tile->end) return (const char *)ZEROS;
    return row_at(pages, head, tile->key0 + lane);
}

/* The scales of a row behind the rows of its block; NULL: it has none there. */
INLINE const char *scales_at(const cpa_attend_pages *pages, int32_t head, int64_t key) {
    if (!pages->scales) return NULL;
    const int64_t block = pages->table[key >> pages->block_shift];
    const int64_t token = key & (((int64_t)1 << pages->block_shift) - 1);
    return pages->scales + head * pages->scale_head_stride + block * pages->block_stride + token * pages->scale_bytes;
}

/* A row of the pages as floats, for those whose rows do not lie there as elements in one piece. */
static __attribute__((noinline)) void make_row(const cpa_attend_pages *pages, int32_t head, int64_t key, float *to) {
    char whole[CPA_MAX_HEAD_DIM * sizeof(float)];
    const char *row = row_at(pages, head, key);
    if (pages->run_bytes > 0) {
        cpa_runs_gather(whole, row, pages->run_bytes, pages->run_stride,
                        cpa_kv_row_bytes(pages->dtype, CPA_KEYS, pages->dim));
        row = whole;
    }
    if (!cpa_dtype_is_quantised(pages->dtype)) {
        cpa_widen(to, row, pages->dtype, pages->dim);
        return;
    }
    float scale = pages->tensor_scale;
    if (pages->head_scales) scale *= pages->head_scales[head * pages->head_scale_step];
    cpa_dequantise_row(to, row, scales_at(pages, head, key), pages->dtype, pages->part, scale, pages->row_dim,
                       pages->dim);
}

/* The same of a lane; zeros outside the lanes in use. */
INLINE void make_lane(const cpa_attend_tile *tile, const cpa_attend_pages *pages, int32_t head, int32_t lane,
                      float *to) {
    if (lane < tile->begin || lane >= tile->end) {
        memset(to, 0, (size_t)pages->dim * sizeof *to);
        return;
    }
    make_row(pages, head, tile->key0 + lane, to);
}

/* ---- Softmax ---- */

/* 2^x for x <= 0, within 1.5 units in the last place, exactly 1 at 0, and 0 below 2^-126. x = n + f with |f| <= 1/2;
 * adding and subtracting 1.5 * 2^23 rounds to n. Coefficients: Chebyshev fit of 2^f, relative error 2e-9. */
INLINE vec exp2_vec(vec x) {
    const vec magic = broadcast(0x1.8p23f);
    vec shifted = x + magic, n = shifted - magic, f = x - n;
    vec p = broadcast(0x1.444p-13f);
    p = isa_fma(p, f, broadcast(0x1.5f48c0p-10f));
    p = isa_fma(p, f, broadcast(0x1.3b2a1cp-7f));
    p = isa_fma(p, f, broadcast(0x1.c6aeccp-5f));
    p = isa_fma(p, f, broadcast(0x1.ebfbe0p-3f));
    p = isa_fma(p, f, broadcast(0x1.62e430p-1f));
    p = isa_fma(p, f, broadcast(1.0f));
    vec power = (vec)(((uvec)shifted - (uvec)magic + 127u) << 23);
    return isa_zero_below(p * power, x, -126.0f);
}

/* Sets the scores of the lanes of [begin, end) that a row does not see to -inf; none sees a lane before `least`. */
INLINE void mask_row(float *s, int32_t begin, int32_t end, int32_t least, cpa_attend_lanes visible) {
    ivec lane;
    for (int i = 0; i < ISA_LANES; i++) lane[i] = begin + i;
    for (int32_t j = begin; j < end; j += ISA_LANES, lane += ISA_LANES) {
        ivec sees = (lane >= least) & (lane < visible.end) & ((lane >= visible.first) | (lane < visible.sinks));
        store(s + j, (vec)(((ivec)load(s + j) & sees) | ((ivec)broadcast(-INFINITY) & ~sees)));
    }
}

/* Weights of lanes [j, j + PANEL) of a row. */
#ifdef ISA_PAIRS
/* Rounded to bf16, those of lanes 2 i and 2 i + 1 as word i; rows begin in different cache sets. In place of scores:
 * a row's weights lie behind none that is still to be read. */
enum { P_STRIDE = TILE / 2 + ISA_LANES };
INLINE void store_weights(float *to, int32_t j, vec left, vec right) {
    _mm512_storeu_si512(to + j / 2, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}
#else
enum { P_STRIDE = TILE };
INLINE void store_weights(float *to, int32_t j, vec left, vec right) {
    store(to + j, left);
    store(to + j + ISA_LANES, right);
}
#endif

INLINE void scale_row(float *s, int32_t begin, int32_t end, float scale) {
    for (int32_t j = begin; j < end; j += ISA_LANES) store(s + j, load(s + j) * scale);
}

INLINE float largest_of_row(const float *s, int32_t begin, int32_t end, float scale) {
    vec left = broadcast(-INFINITY), right = left;
    for (int32_t j = begin; j < end; j += PANEL) {
        left = isa_max(left, load(s + j) * scale);
        right = isa_max(right, load(s + j + ISA_LANES) * scale);
    }
    return isa_max_of(isa_max(left, right));
}

/* Turns a row of scores [begin, end), times `scale`, into weights, 2^(score - base); returns their sum. */
INLINE float weigh_row(const float *s, int32_t begin, int32_t end, float scale, float base, float *to) {
    vec total = broadcast(0);
    for (int32_t j = begin; j < end; j += PANEL) {
        const vec left = exp2_vec(load(s + j) * scale - base), right = exp2_vec(load(s + j + ISA_LANES) * scale - base);
        store_weights(to, j, left, right);
        total += left;
        total += right;
    }
    return isa_sum_of(total);
}

#include "kernels/host/attend/attend_score_vector.h"

/* Whether all rows, of such largest scores, have the tile so far below what they have met that it is left out. */
INLINE int is_skipped(const cpa_attend_tile *tile, const cpa_attend_group *group, const float *largest) {
    if (tile->skip == 0) return 0;
    tile->counts[0]++;
    for (int32_t i = 0; i < group->heads * group->rows; i++)
        if (!(largest[i] < fmaxf(group->max[i], group->top[i]) - tile->skip)) return 0;
    tile->counts[1]++;
    return 1;
}

/* Turns the scores [begin, end) of the rows into 2^(score - max) and updates the rows' max and sum; `shrink` becomes
 * what was accumulated before shrinks by. While a row has seen no key all stays 0. All rows' max come first, so that
 * exponentials do not wait for those of their row. Returns 0, and leaves the rows as they were, if the tile is left
 * out. */
static __attribute__((noinline)) int softmax_group(const cpa_attend_tile *tile, const cpa_attend_group *group,
                                                   int32_t begin, int32_t end, float *shrink) {
    const int32_t rows = group->heads * group->rows;
    const float scale = SCALES_LATE && !tile->score && !tile->masked ? tile->scale : 1;
    float largest[CPA_ATTEND_GROUP_ROWS];
    for (int32_t i = 0; i < rows; i++) {
        float *s = group->scores + i * TILE;
        if (SCALES_LATE && (tile->score || tile->masked)) scale_row(s, begin, end, tile->scale);
        if (tile->score) score_row(tile, i, s, begin, end);
        if (tile->masked) mask_row(s, begin, end, tile->begin, tile->visible[i % group->rows]);
        for (int32_t j = begin; tile->weighs && j < end; j++) tile->weighs[j] = s[j] != -INFINITY;
        largest[i] = largest_of_row(s, begin, end, scale);
    }
    if (is_skipped(tile, group, largest)) return 0;
    for (int32_t i = 0; i < rows; i++) {
        const float max = largest[i] > group->max[i] ? largest[i] : group->max[i];
        shrink[i] = group->max[i] - max;
        group->max[i] = max;
    }
    for (int32_t i = rows; i % ISA_LANES; i++) shrink[i] = 0;
    for (int32_t i = 0; i < rows; i += ISA_LANES) store(shrink + i, exp2_vec(load(shrink + i)));
    for (int32_t i = 0; i < rows; i++)
        group->sum[i] = group->sum[i] * shrink[i] + weigh_row(group->scores + i * TILE, begin, end, scale,
                                                              group->max[i], group->scores + i * P_STRIDE);
    return 1;
}

/* ---- Products ---- */

/* A block of sums: one accumulator an element, ISA_ROWS x PANEL at most. */
typedef struct block {
    vec left[ISA_ROWS], right[ISA_ROWS];
} block;

#ifdef ISA_PAIRS
#include "kernels/host/attend/attend_pairs.h"
#else
#include "kernels/host/attend/attend_floats.h"
#endif

INLINE void attend_rows(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group) {
    float shrink[CPA_ATTEND_GROUP_ROWS];
    int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    if (tile->k)
        score_tile(rows, tile, group, begin, end);
    else
        score_pages(rows, tile, group, begin, end);
    if (!softmax_group(tile, group, begin, end, shrink)) return;
    if (tile->v)
        weigh_tile(rows, tile, group, begin, end, shrink);
    else
        weigh_pages(rows, tile, group, begin, end, shrink);
}
