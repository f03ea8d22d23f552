/* A group that reads the pages, for attend_vector.h: decode. Each key is used by few rows, so that memory sets the
 * pace. Keys are taken STEP at a time and two heads at a time, so that two heads' sums fill the arithmetic's latency,
 * and so that little lies between a row's arrival in the first-level cache and its use: 16 KiB in fp32 with AVX-512. */
#ifndef CPA_HOST_ATTEND_PAGES_H
#define CPA_HOST_ATTEND_PAGES_H

enum { STEP = ISA_LANES }; /* keys that are taken at a time */
_Static_assert(ISA_CELL == STEP, "a step of keys is transposed in squares");

#include "kernels/host/attend/attend_coming.h"

/* ---- Steps ---- */

/* The rows of a step of one head, in place where the loops can read them there, and else as floats. */
typedef struct step_rows {
    const char *row[STEP];
    cpa_dtype dtype;
} step_rows;

typedef float wide_rows[STEP][CPA_MAX_HEAD_DIM];

/* Lanes that are not in use, or whose value weighs nothing for a row that asks so, are zeros. */
static __attribute__((noinline)) void find_rows(const cpa_attend_tile *tile, const cpa_attend_pages *pages,
                                                const uint8_t *weighs, int32_t head, int32_t key, int32_t granule,
                                                step_rows *out, wide_rows wide) {
    const int in_place = !cpa_attend_makes_rows(pages) && pages->dim % granule == 0;
    out->dtype = in_place ? pages->dtype : CPA_F32;
    if (in_place && !weighs && key >= tile->begin && key + STEP <= tile->end) {
        find_step(pages, head, tile->key0 + key, out->row);
        return;
    }
    for (int i = 0; i < STEP; i++) {
        const int32_t lane = key + i;
        const int zero = lane < tile->begin || lane >= tile->end || (weighs && !weighs[lane]);
        out->row[i] = zero ? (const char *)ZEROS : in_place ? row_at(pages, head, tile->key0 + lane) : (char *)wide[i];
        if (zero || in_place) continue;
        make_row(pages, head, tile->key0 + lane, wide[i]);
        const int32_t rest = (pages->dim + granule - 1) / granule * granule - pages->dim;
        memset(wide[i] + pages->dim, 0, (size_t)rest * sizeof(float));
    }
}

/* Elements [d, d + ISA_CELL) of a step's rows, transposed: [ISA_CELL][STEP]. */
static __attribute__((noinline)) void transpose_step(float *to, const step_rows *rows, int32_t d) {
    switch (rows->dtype) {
        case CPA_BF16: isa_transpose(to, STEP, rows->row, CPA_BF16, d); break;
        case CPA_F16: isa_transpose(to, STEP, rows->row, CPA_F16, d); break;
        default: isa_transpose(to, STEP, rows->row, CPA_F32, d); break;
    }
}

/* s[head][r][0..STEP) = scale * sum over d of q[head][d][r] * k[head][0..STEP)[d]. */
INLINE void score_step(const int rows, const int heads, const float *q, const step_rows *k, int32_t k_dim, float scale,
                       float *s, coming *next) {
    vec acc[HEADS * ISA_ROWS];
    float cell[HEADS][ISA_CELL * STEP];
    const int32_t lines = lines_of(STEP * heads * cpa_dtype_bytes(k[0].dtype)); /* of an element of each row */
#pragma GCC unroll 32
    for (int r = 0; r < heads * rows; r++) acc[r] = broadcast(0);
    for (int32_t d = 0; d < k_dim; d += ISA_CELL) {
        const int32_t n = k_dim - d < ISA_CELL ? k_dim - d : ISA_CELL;
        for (int head = 0; head < heads; head++) {
            request(next, lines * (ISA_CELL / 2) / heads);
            transpose_step(cell[head], &k[head], d);
        }
        for (int32_t i = 0; i < n; i++) {
            if (i % 2 == 0) request(next, lines);
#pragma GCC unroll 2
            for (int head = 0; head < heads; head++) {
                const vec keys = load(cell[head] + i * STEP);
                const float *of_head = q + ((int64_t)head * k_dim + d + i) * rows;
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++)
                    acc[head * rows + r] = isa_fma(broadcast(of_head[r]), keys, acc[head * rows + r]);
            }
        }
    }
#pragma GCC unroll 32
    for (int r = 0; r < heads * rows; r++) store(s + r * TILE, acc[r] * scale);
}

/* o[r][0..PANEL) = shrink[r] * o[r] + sum over the step's keys of p[r][key] * v[key][d..d + PANEL). */
INLINE void weigh_step_as(const int rows, const cpa_dtype dtype, const float *p, const step_rows *v, int32_t d,
                          const float *shrink, float *o, int64_t o_stride, coming *next) {
    const int64_t element = cpa_dtype_bytes(dtype), at = d * element;
    const int32_t lines = lines_of(2 * PANEL * element);
    block acc;
    load_sums(rows, &acc, o, o_stride, shrink);
    for (int key = 0; key < STEP; key++) {
        const char *row = v->row[key] + at;
        if (key % 2 == 0) request(next, lines);
        accumulate(rows, &acc, p + key, TILE, isa_load(row, dtype), isa_load(row + ISA_LANES * element, dtype));
    }
    store_sums(rows, &acc, o, o_stride);
}

INLINE void weigh_step(const int rows, const float *p, const step_rows *v, int32_t d, const float *shrink, float *o,
                       int64_t o_stride, coming *next) {
    switch (v->dtype) {
        case CPA_BF16: weigh_step_as(rows, CPA_BF16, p, v, d, shrink, o, o_stride, next); break;
        case CPA_F16: weigh_step_as(rows, CPA_F16, p, v, d, shrink, o, o_stride, next); break;
        default: weigh_step_as(rows, CPA_F32, p, v, d, shrink, o, o_stride, next); break;
    }
}

/* ---- Tiles ---- */

/* The scores of a tile from its pages. Values come next. */
INLINE void score_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end) {
    const cpa_attend_pages *k = tile->k_pages;
    step_rows keys[HEADS];
    wide_rows wide[HEADS];
    for (int32_t key = begin; key < end; key += STEP) {
        for (int32_t head = 0; head < group->heads; head += HEADS) {
            coming next;
            expect_after(&next, tile, k, group, head, key, end, tile->v_pages, tile->key0 + begin);
            const float *q = group->q + (int64_t)head * rows * k->dim;
            float *s = group->scores + head * rows * TILE + key;
            find_rows(tile, k, NULL, head, key, ISA_CELL, &keys[0], wide[0]);
            if (head + 1 < group->heads) {
                find_rows(tile, k, NULL, head + 1, key, ISA_CELL, &keys[1], wide[1]);
                score_step(rows, HEADS, q, keys, k->dim, tile->scale, s, &next);
            } else {
                score_step(rows, 1, q, keys, k->dim, tile->scale, s, &next);
            }
        }
    }
}

/* Weighs the values of a tile from its pages. The next tile's keys come next. */
INLINE void weigh_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end, const float *shrink) {
    const cpa_attend_pages *v = tile->v_pages;
    step_rows values;
    wide_rows wide;
    float one[ISA_ROWS];
    for (int r = 0; r < rows; r++) one[r] = 1;
    for (int32_t key = begin; key < end; key += STEP) {
        for (int32_t first = 0; first < group->heads; first += HEADS) {
            coming next;
            expect_after(&next, tile, v, group, first, key, end, tile->k_pages, tile->key0 + TILE);
            for (int32_t head = first; head < group->heads && head < first + HEADS; head++) {
                const float *p = group->scores + head * rows * TILE + key;
                float *o = group->o + head * rows * group->o_stride;
                find_rows(tile, v, tile->weighs, head, key, PANEL, &values, wide);
                for (int32_t d = 0; d < group->o_stride; d += PANEL)
                    weigh_step(rows, p, &values, d, key == begin ? shrink + head * rows : one, o + d, group->o_stride,
                               &next);
            }
        }
    }
}

#endif
