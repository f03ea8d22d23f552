/* The inner loops of attend in GCC vector code. A file that has the vectors of an instruction set (isa/vector.h),
 * defines
 *     ISA_ROWS                 rows of a full group: ISA_ROWS x 2 accumulators fit the registers
 * and includes this one gets pack_tile and attend_rows. */
#include <math.h>
#include <string.h>

#include "kernels/host/attend/attend_isa.h"
#include "kernels/host/cache/quantise.h"
#include "kernels/host/isa/vector.h"

enum {
    PANEL = 2 * ISA_LANES,
    TILE = CPA_ATTEND_TILE,
    /* From panel to panel of packed values: one row more than a tile, so that the panels do not share cache sets. */
    V_STRIDE = (TILE + 1) * PANEL
};

typedef int32_t ivec __attribute__((vector_size(ISA_LANES * 4)));
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

/* The row of a lane of a quantised cache as floats; zeros outside the lanes in use. */
INLINE void dequantise_lane(const cpa_attend_tile *tile, const cpa_attend_pages *pages, int32_t head, int32_t lane,
                            float *to) {
    if (lane < tile->begin || lane >= tile->end) {
        memset(to, 0, (size_t)pages->dim * sizeof *to);
        return;
    }
    int64_t key = tile->key0 + lane, token = key & (((int64_t)1 << pages->block_shift) - 1);
    uint32_t word = 0;
    if (pages->scales) {
        int64_t block = pages->table[key >> pages->block_shift];
        memcpy(&word, pages->scales + head * pages->scale_head_stride + block * pages->block_stride + token * 4,
               sizeof word);
    }
    cpa_dequantise(to, row_at(pages, head, key), pages->dtype, pages->tensor_scale, word, pages->dim);
}

/* ---- Packing ---- */

/* Packs the panel of keys that begins at lane `panel`: [k_dim][PANEL]. Rows of a quantised cache become floats first. */
INLINE void pack_key_panel_as(const cpa_dtype dtype, const int quantised, const cpa_attend_tile *tile, int32_t panel,
                              float *to) {
    int32_t dim = tile->k_pages->dim, whole = dim / ISA_CELL * ISA_CELL;
    for (int cell = 0; cell < PANEL; cell += ISA_CELL) {
        const char *rows[ISA_CELL];
        float wide[ISA_CELL][CPA_MAX_HEAD_DIM];
        for (int i = 0; i < ISA_CELL; i++) {
            if (quantised) {
                dequantise_lane(tile, tile->k_pages, 0, panel + cell + i, wide[i]);
                rows[i] = (const char *)wide[i];
            } else {
                rows[i] = row_of_lane(tile, tile->k_pages, 0, panel + cell + i);
            }
        }
        for (int32_t d = 0; d < whole; d += ISA_CELL) isa_transpose(to + d * PANEL + cell, PANEL, rows, dtype, d);
        for (int i = 0; whole < dim && i < ISA_CELL; i++) {
            float rest[ISA_CELL] = {0};
            cpa_widen(rest, rows[i] + whole * cpa_dtype_bytes(dtype), dtype, dim - whole);
            for (int32_t d = whole; d < dim; d++) to[d * PANEL + cell + i] = rest[d - whole];
        }
    }
}

static void pack_key_panel(const cpa_attend_tile *tile, int32_t panel, float *to) {
    switch (tile->k_pages->dtype) {
        case CPA_BF16: pack_key_panel_as(CPA_BF16, 0, tile, panel, to); break;
        case CPA_F16: pack_key_panel_as(CPA_F16, 0, tile, panel, to); break;
        case CPA_F32: pack_key_panel_as(CPA_F32, 0, tile, panel, to); break;
        default: pack_key_panel_as(CPA_F32, 1, tile, panel, to); break;
    }
}

INLINE void pack_value_as(const cpa_dtype dtype, const char *row, int32_t dim, float *to, int64_t stride) {
    int32_t d = 0;
    for (; d + PANEL <= dim; d += PANEL, row += PANEL * cpa_dtype_bytes(dtype), to += stride) {
        store(to, isa_load(row, dtype));
        store(to + ISA_LANES, isa_load(row + ISA_LANES * cpa_dtype_bytes(dtype), dtype));
    }
    if (d == dim) return;
    memset(to, 0, PANEL * sizeof *to);
    cpa_widen(to, row, dtype, dim - d);
}

/* Packs one value, PANEL elements to each panel of v_dim, the panels V_STRIDE floats apart. */
static void pack_value(const cpa_attend_tile *tile, int32_t lane, float *to) {
    const char *row = row_of_lane(tile, tile->v_pages, 0, lane);
    float wide[CPA_MAX_HEAD_DIM];
    if (cpa_dtype_is_quantised(tile->v_pages->dtype)) {
        dequantise_lane(tile, tile->v_pages, 0, lane, wide);
        row = (const char *)wide;
    }
    switch (tile->v_pages->dtype) {
        case CPA_BF16: pack_value_as(CPA_BF16, row, tile->v_pages->dim, to, V_STRIDE); break;
        case CPA_F16: pack_value_as(CPA_F16, row, tile->v_pages->dim, to, V_STRIDE); break;
        default: pack_value_as(CPA_F32, row, tile->v_pages->dim, to, V_STRIDE); break;
    }
}

static void pack_tile(const cpa_attend_tile *tile, float *k, float *v) {
    int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    for (int32_t lane = begin; lane < end; lane += PANEL) pack_key_panel(tile, lane, k + lane * tile->k_pages->dim);
    for (int32_t lane = begin; lane < end; lane++) pack_value(tile, lane, v + lane * PANEL);
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
    ivec tiny = x < -126.0f;
    return (vec)((ivec)(p * power) & ~tiny);
}

INLINE vec max_vec(vec a, vec b) {
    ivec larger = b > a;
    return (vec)(((ivec)b & larger) | ((ivec)a & ~larger));
}

INLINE float max_of(vec value) {
    float max = value[0];
    for (int i = 1; i < ISA_LANES; i++) max = value[i] > max ? value[i] : max;
    return max;
}

/* Pairs of lanes, then pairs of pairs: a fixed order. */
INLINE float sum_of(vec value) {
    float part[ISA_LANES];
    memcpy(part, &value, sizeof part);
    for (int width = ISA_LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    }
    return part[0];
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

/* Turns a row of scores [begin, end) into 2^(score - max) and updates the row's max and sum; returns the factor by
 * which what was accumulated before shrinks. While a row has seen no key its max is -inf and all stays 0. */
INLINE float softmax_row(float *s, int32_t begin, int32_t end, float *max, float *sum) {
    vec largest = broadcast(-INFINITY), total = broadcast(0);
    for (int32_t j = begin; j < end; j += ISA_LANES) largest = max_vec(largest, load(s + j));
    float tile_max = max_of(largest), new_max = tile_max > *max ? tile_max : *max;
    vec base = broadcast(new_max == -INFINITY ? 0 : new_max);
    for (int32_t j = begin; j < end; j += ISA_LANES) {
        vec p = exp2_vec(load(s + j) - base);
        store(s + j, p);
        total += p;
    }
    float shrink = exp2_vec(broadcast(*max) - base)[0];
    *max = new_max;
    *sum = *sum * shrink + sum_of(total);
    return shrink;
}

#include "kernels/host/attend/attend_score_vector.h"

static __attribute__((noinline)) void softmax_group(const cpa_attend_tile *tile, const cpa_attend_group *group,
                                                    int32_t begin, int32_t end, float *shrink) {
    for (int32_t i = 0; i < group->heads * group->rows; i++) {
        float *s = group->scores + i * TILE;
        if (tile->score) score_row(tile, i, s, begin, end);
        if (tile->masked) mask_row(s, begin, end, tile->begin, tile->visible[i % group->rows]);
        for (int32_t j = begin; tile->weighs && j < end; j++) tile->weighs[j] = s[j] != -INFINITY;
        shrink[i] = softmax_row(s, begin, end, &group->max[i], &group->sum[i]);
    }
}

/* ---- Products ---- */

/* A block of sums: one accumulator an element, ISA_ROWS x PANEL at most. */
typedef struct block {
    vec left[ISA_ROWS], right[ISA_ROWS];
} block;

/* acc[r] += a[r * stride] * (left, right). */
INLINE void accumulate(const int rows, block *acc, const float *a, int64_t stride, vec left, vec right) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vec factor = broadcast(a[r * stride]);
        acc->left[r] = isa_fma(factor, left, acc->left[r]);
        acc->right[r] = isa_fma(factor, right, acc->right[r]);
    }
}

/* s[r][0..PANEL) = scale * sum over d of q[d][r] * k[d][0..PANEL). */
INLINE void score_panel(const int rows, const float *q, const float *k, int32_t k_dim, float scale, float *s) {
    block acc;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc.left[r] = acc.right[r] = broadcast(0);
    for (int32_t d = 0; d < k_dim; d++, q += rows, k += PANEL)
        accumulate(rows, &acc, q, 1, load(k), load(k + ISA_LANES));
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(s + r * TILE, acc.left[r] * scale);
        store(s + r * TILE + ISA_LANES, acc.right[r] * scale);
    }
}

INLINE void load_sums(const int rows, block *acc, const float *o, int64_t o_stride, const float *shrink) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        acc->left[r] = load(o + r * o_stride) * shrink[r];
        acc->right[r] = load(o + r * o_stride + ISA_LANES) * shrink[r];
    }
}

INLINE void store_sums(const int rows, const block *acc, float *o, int64_t o_stride) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(o + r * o_stride, acc->left[r]);
        store(o + r * o_stride + ISA_LANES, acc->right[r]);
    }
}

/* o[r][0..PANEL) = shrink[r] * o[r] + sum over keys of p[r][key] * v[key][0..PANEL), from packed values. */
INLINE void weigh_packed(const int rows, const float *p, const float *v, int32_t keys, const float *shrink, float *o,
                         int64_t o_stride) {
    block acc;
    load_sums(rows, &acc, o, o_stride, shrink);
    for (int32_t key = 0; key < keys; key++, v += PANEL)
        accumulate(rows, &acc, p + key, TILE, load(v), load(v + ISA_LANES));
    store_sums(rows, &acc, o, o_stride);
}

#include "kernels/host/attend/attend_pages.h"

/* ---- Tiles ---- */

INLINE void score_tile(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                       int32_t end) {
    int32_t k_dim = tile->k_pages->dim;
    for (int32_t key = begin; key < end; key += PANEL)
        score_panel(rows, group->q, tile->k + key * k_dim, k_dim, tile->scale, group->scores + key);
}

INLINE void weigh_tile(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                       int32_t end, const float *shrink) {
    for (int32_t d = 0; d < group->o_stride; d += PANEL)
        weigh_packed(rows, group->scores + begin, tile->v + d / PANEL * V_STRIDE + begin * PANEL, end - begin, shrink,
                     group->o + d, group->o_stride);
}

INLINE void attend_rows(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group) {
    float shrink[CPA_ATTEND_GROUP_ROWS];
    int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    if (tile->k)
        score_tile(rows, tile, group, begin, end);
    else
        score_pages(rows, tile, group, begin, end);
    softmax_group(tile, group, begin, end, shrink);
    if (tile->v)
        weigh_tile(rows, tile, group, begin, end, shrink);
    else
        weigh_pages(rows, tile, group, begin, end, shrink);
}
