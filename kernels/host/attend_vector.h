/* The inner loops of attend in GCC vector code. A file that defines
 *     ISA_LANES               floats in a vector
 *     ISA_ROWS                rows of a full group: ISA_ROWS x 2 accumulators fit the registers
 *     ISA_CELL                side of the squares in which keys are transposed
 *     isa_fma(a, b, c)        a * b + c
 *     isa_widen(to, from, dtype)
 *                             ISA_LANES elements as floats
 *     isa_transpose(to, stride, rows, dtype, d)
 *                             elements [d, d + ISA_CELL) of rows [ISA_CELL]: element d + i of row j as a float to
 *                             to[i * stride + j]
 * and includes this one gets pack_keys, pack_values and attend_group. */
#include <math.h>
#include <string.h>

#include "kernels/host/attend_isa.h"
#include "kernels/host/convert.h"

#define INLINE static inline __attribute__((always_inline))

enum { PANEL = 2 * ISA_LANES, TILE = CPA_ATTEND_TILE };

typedef float vec __attribute__((vector_size(ISA_LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(ISA_LANES * 4)));
/* The same in memory that is aligned only as floats are. */
typedef float loose_vec __attribute__((vector_size(ISA_LANES * 4), aligned(4), may_alias));

INLINE vec load(const float *from) {
    return *(const loose_vec *)from;
}

INLINE void store(float *to, vec value) {
    *(loose_vec *)to = value;
}

INLINE vec broadcast(float value) {
    return value - (vec){0};
}

/* ---- Packing ---- */

static const float ZEROS[CPA_MAX_HEAD_DIM];

INLINE const char *row_at(const cpa_attend_pages *pages, int64_t key) {
    int64_t block = pages->table[key >> pages->block_shift];
    int64_t token = key & (((int64_t)1 << pages->block_shift) - 1);
    return pages->head + block * pages->block_stride + token * pages->token_stride;
}

/* Rows of the lanes [lane, lane + n); zeros outside [begin, end). */
INLINE void rows_at(const cpa_attend_pages *pages, int64_t key0, int32_t begin, int32_t end, int32_t lane, int n,
                    const char **rows) {
    for (int i = 0; i < n; i++) {
        int inside = lane + i >= begin && lane + i < end;
        rows[i] = inside ? row_at(pages, key0 + lane + i) : (const char *)ZEROS;
    }
}

INLINE void pack_keys_as(const cpa_dtype dtype, const cpa_attend_pages *pages, int64_t key0, int32_t begin, int32_t end,
                         float *packed) {
    const char *rows[ISA_CELL];
    int32_t dim = pages->dim, whole = dim / ISA_CELL * ISA_CELL;
    for (int32_t lane = begin / PANEL * PANEL; lane < end; lane += ISA_CELL) {
        float *to = packed + lane / PANEL * (int64_t)PANEL * dim + lane % PANEL;
        rows_at(pages, key0, begin, end, lane, ISA_CELL, rows);
        for (int32_t d = 0; d < whole; d += ISA_CELL) isa_transpose(to + (int64_t)d * PANEL, PANEL, rows, dtype, d);
        for (int i = 0; i < ISA_CELL; i++) {
            float rest[ISA_CELL] = {0};
            cpa_widen(rest, rows[i] + whole * cpa_dtype_bytes(dtype), dtype, dim - whole);
            for (int32_t d = whole; d < dim; d++) to[(int64_t)d * PANEL + i] = rest[d - whole];
        }
    }
    /* The last panel's lanes past the last cell. */
    for (int32_t lane = (end + ISA_CELL - 1) / ISA_CELL * ISA_CELL; lane % PANEL; lane++) {
        float *to = packed + lane / PANEL * (int64_t)PANEL * dim + lane % PANEL;
        for (int32_t d = 0; d < dim; d++) to[(int64_t)d * PANEL] = 0;
    }
}

INLINE void pack_values_as(const cpa_dtype dtype, const cpa_attend_pages *pages, int64_t key0, int32_t begin,
                           int32_t end, float *packed) {
    int64_t bytes = cpa_dtype_bytes(dtype);
    int32_t dim = pages->dim, whole = dim / ISA_LANES * ISA_LANES;
    int32_t last = (end + PANEL - 1) / PANEL * PANEL, padded = (dim + PANEL - 1) / PANEL * PANEL;
    for (int32_t lane = begin / PANEL * PANEL; lane < last; lane++) {
        const char *row;
        rows_at(pages, key0, begin, end, lane, 1, &row);
        float *to = packed + (int64_t)lane * PANEL;
        for (int32_t d = 0; d < whole; d += ISA_LANES)
            isa_widen(to + d / PANEL * (int64_t)TILE * PANEL + d % PANEL, row + d * bytes, dtype);
        if (whole == padded) continue;
        float rest[PANEL] = {0};
        cpa_widen(rest, row + whole * bytes, dtype, dim - whole);
        for (int32_t d = whole; d < padded; d++) to[d / PANEL * (int64_t)TILE * PANEL + d % PANEL] = rest[d - whole];
    }
}

static void pack_keys(const cpa_attend_pages *pages, int64_t key0, int32_t begin, int32_t end, float *packed) {
    switch (pages->dtype) {
        case CPA_BF16: pack_keys_as(CPA_BF16, pages, key0, begin, end, packed); break;
        case CPA_F16: pack_keys_as(CPA_F16, pages, key0, begin, end, packed); break;
        default: pack_keys_as(CPA_F32, pages, key0, begin, end, packed); break;
    }
}

static void pack_values(const cpa_attend_pages *pages, int64_t key0, int32_t begin, int32_t end, float *packed) {
    switch (pages->dtype) {
        case CPA_BF16: pack_values_as(CPA_BF16, pages, key0, begin, end, packed); break;
        case CPA_F16: pack_values_as(CPA_F16, pages, key0, begin, end, packed); break;
        default: pack_values_as(CPA_F32, pages, key0, begin, end, packed); break;
    }
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
    vec power = (vec)(((ivec)shifted - (ivec)magic + 127) << 23);
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

/* ---- Products ---- */

/* s[r][0..PANEL) = scale * sum over d of q[d][r] * k[d][0..PANEL). */
INLINE void multiply_keys(const int rows, const float *q, const float *k, int32_t k_dim, float scale, float *s) {
    vec acc[ISA_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = broadcast(0);
    for (int32_t d = 0; d < k_dim; d++, q += rows, k += PANEL) {
        vec left = load(k), right = load(k + ISA_LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec a = broadcast(q[r]);
            acc[r][0] = isa_fma(a, left, acc[r][0]);
            acc[r][1] = isa_fma(a, right, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(s + r * TILE, acc[r][0] * scale);
        store(s + r * TILE + ISA_LANES, acc[r][1] * scale);
    }
}

/* o[r][0..PANEL) = shrink[r] * o[r] + sum over keys of p[r][key] * v[key][0..PANEL). */
INLINE void multiply_values(const int rows, const float *p, const float *v, int32_t begin, int32_t end,
                            const float *shrink, float *o, int64_t o_stride) {
    vec acc[ISA_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        acc[r][0] = load(o + r * o_stride) * shrink[r];
        acc[r][1] = load(o + r * o_stride + ISA_LANES) * shrink[r];
    }
    v += (int64_t)begin * PANEL;
    for (int32_t key = begin; key < end; key++, v += PANEL) {
        vec left = load(v), right = load(v + ISA_LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec a = broadcast(p[r * TILE + key]);
            acc[r][0] = isa_fma(a, left, acc[r][0]);
            acc[r][1] = isa_fma(a, right, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(o + r * o_stride, acc[r][0]);
        store(o + r * o_stride + ISA_LANES, acc[r][1]);
    }
}

INLINE void attend_rows(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group) {
    _Alignas(64) float s[ISA_ROWS * TILE];
    float shrink[ISA_ROWS];
    int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    for (int32_t key = begin; key < end; key += PANEL)
        multiply_keys(rows, group->q, tile->k + (int64_t)key * tile->k_dim, tile->k_dim, tile->scale, s + key);
    for (int r = 0; r < rows; r++) {
        if (tile->masked) mask_row(s + r * TILE, begin, end, tile->begin, tile->visible[r]);
        shrink[r] = softmax_row(s + r * TILE, begin, end, &group->max[r], &group->sum[r]);
    }
    for (int32_t panel = 0; panel < tile->v_panels; panel++)
        multiply_values(rows, s, tile->v + (int64_t)panel * TILE * PANEL, tile->begin, tile->end, shrink,
                        group->o + (int64_t)panel * PANEL, tile->o_stride);
}
