/* Packing and products in fp32, for attend_vector.h: every sum has one accumulator, and runs in ascending order of d or
 * of the key. */
#ifndef CPA_HOST_ATTEND_FLOATS_H
#define CPA_HOST_ATTEND_FLOATS_H

/* ---- Packing ---- */

/* Packs the panel of keys that begins at lane `panel`: [k_dim][PANEL]. Rows of a quantised cache, and those in runs,
 * become floats first. */
INLINE void pack_key_panel_as(const cpa_dtype dtype, const int made, const cpa_attend_tile *tile, int32_t panel,
                              float *to) {
    int32_t dim = tile->k_pages->dim, whole = dim / ISA_CELL * ISA_CELL;
    for (int cell = 0; cell < PANEL; cell += ISA_CELL) {
        const char *rows[ISA_CELL];
        float wide[ISA_CELL][CPA_MAX_HEAD_DIM];
        for (int i = 0; i < ISA_CELL; i++) {
            if (made) {
                make_lane(tile, tile->k_pages, 0, panel + cell + i, wide[i]);
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
    switch (cpa_attend_makes_rows(tile->k_pages) ? CPA_KV_DTYPE_COUNT : tile->k_pages->dtype) {
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
    cpa_dtype dtype = tile->v_pages->dtype;
    float wide[CPA_MAX_HEAD_DIM];
    if (cpa_attend_makes_rows(tile->v_pages)) {
        make_lane(tile, tile->v_pages, 0, lane, wide);
        row = (const char *)wide;
        dtype = CPA_F32;
    }
    switch (dtype) {
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

/* ---- Products ---- */

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

#endif
