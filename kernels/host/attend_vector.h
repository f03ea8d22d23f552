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
 * and includes this one gets pack_tile and attend_rows. */
#include <math.h>
#include <string.h>

#include "kernels/host/attend_isa.h"
#include "kernels/host/convert.h"

#define INLINE static inline __attribute__((always_inline))

enum {
    PANEL = 2 * ISA_LANES,
    TILE = CPA_ATTEND_TILE,
    /* From panel to panel of packed values: one row more than a tile, so that the panels do not share cache sets. */
    V_STRIDE = (TILE + 1) * PANEL
};

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
    return pages->first + block * pages->block_stride + token * pages->token_stride;
}

/* The row of a lane of one head; zeros outside the lanes in use. */
INLINE const char *row_of_lane(const cpa_attend_pages *pages, const cpa_attend_tile *tile, int32_t head, int32_t lane) {
    if (lane < tile->begin || lane >= tile->end) return (const char *)ZEROS;
    return row_at(pages, tile->key0 + lane) + head * pages->head_stride;
}

INLINE void pack_key_panel_as(const cpa_dtype dtype, const cpa_attend_tile *tile, int32_t head, int32_t panel,
                              float *to) {
    int32_t dim = tile->k_pages->dim, whole = dim / ISA_CELL * ISA_CELL;
    for (int cell = 0; cell < PANEL; cell += ISA_CELL) {
        const char *rows[ISA_CELL];
        for (int i = 0; i < ISA_CELL; i++) rows[i] = row_of_lane(tile->k_pages, tile, head, panel + cell + i);
        for (int32_t d = 0; d < whole; d += ISA_CELL) isa_transpose(to + d * PANEL + cell, PANEL, rows, dtype, d);
        for (int i = 0; whole < dim && i < ISA_CELL; i++) {
            float rest[ISA_CELL] = {0};
            cpa_widen(rest, rows[i] + whole * cpa_dtype_bytes(dtype), dtype, dim - whole);
            for (int32_t d = whole; d < dim; d++) to[d * PANEL + cell + i] = rest[d - whole];
        }
    }
}

/* Packs the panel of keys that begins at lane `panel`: [k_dim][PANEL]. */
static void pack_key_panel(const cpa_attend_tile *tile, int32_t head, int32_t panel, float *to) {
    switch (tile->k_pages->dtype) {
        case CPA_BF16: pack_key_panel_as(CPA_BF16, tile, head, panel, to); break;
        case CPA_F16: pack_key_panel_as(CPA_F16, tile, head, panel, to); break;
        default: pack_key_panel_as(CPA_F32, tile, head, panel, to); break;
    }
}

INLINE void pack_value_panel_as(const cpa_dtype dtype, const cpa_attend_tile *tile, int32_t head, int32_t panel,
                                float *to, int64_t stride) {
    int64_t bytes = cpa_dtype_bytes(dtype);
    int32_t dim = tile->v_pages->dim, whole = dim / PANEL * PANEL;
    for (int i = 0; i < PANEL; i++, to += PANEL) {
        const char *row = row_of_lane(tile->v_pages, tile, head, panel + i);
        float *column = to;
        for (int32_t d = 0; d < whole; d += PANEL, column += stride) {
            isa_widen(column, row + d * bytes, dtype);
            isa_widen(column + ISA_LANES, row + (d + ISA_LANES) * bytes, dtype);
        }
        if (whole == dim) continue;
        float rest[PANEL] = {0};
        cpa_widen(rest, row + whole * bytes, dtype, dim - whole);
        memcpy(column, rest, sizeof rest);
    }
}

/* Packs the values of the keys of a panel: [panel of v_dim][PANEL keys][PANEL], the panels `stride` floats apart. */
static void pack_value_panel(const cpa_attend_tile *tile, int32_t head, int32_t panel, float *to, int64_t stride) {
    switch (tile->v_pages->dtype) {
        case CPA_BF16: pack_value_panel_as(CPA_BF16, tile, head, panel, to, stride); break;
        case CPA_F16: pack_value_panel_as(CPA_F16, tile, head, panel, to, stride); break;
        default: pack_value_panel_as(CPA_F32, tile, head, panel, to, stride); break;
    }
}

static void pack_tile(const cpa_attend_tile *tile, float *k, float *v) {
    for (int32_t panel = tile->begin / PANEL * PANEL; panel < tile->end; panel += PANEL) {
        pack_key_panel(tile, 0, panel, k + panel * tile->k_pages->dim);
        pack_value_panel(tile, 0, panel, v + panel * PANEL, V_STRIDE);
    }
}

/* ---- Requests to memory ---- */

/* A panel of rows, all heads, on its way to the cache while another is multiplied. Memory and arithmetic run side by
 * side only if the requests are spread over the arithmetic, and memory is fastest in ascending order. */
typedef struct coming {
    const char *rows[PANEL + 1]; /* the last one stands for the end */
    int32_t row, head, heads;
    int64_t offset, row_bytes, head_stride;
    int32_t element_bytes;
} coming;

static void expect_panel(coming *next, const cpa_attend_pages *pages, int64_t key, int32_t heads) {
    int32_t bytes = (int32_t)cpa_dtype_bytes(pages->dtype);
    *next = (coming){.heads = heads,
                     .row_bytes = pages->dim * (int64_t)bytes,
                     .head_stride = pages->head_stride,
                     .element_bytes = bytes};
    int count = 0;
    for (int i = 0; i < PANEL; i++) {
        if (key + i >= 0 && key + i < pages->keys) next->rows[count++] = row_at(pages, key + i);
    }
    next->rows[count] = NULL;
}

/* Requests as much of what comes as `elements` elements of a panel. */
INLINE void request(coming *next, int32_t elements) {
    const int32_t line = 64;
    for (int32_t left = elements * next->element_bytes; left > 0 && next->rows[next->row]; left -= line) {
        __builtin_prefetch(next->rows[next->row] + next->head * next->head_stride + next->offset, 0, 2);
        next->offset += line;
        if (next->offset < next->row_bytes) continue;
        next->offset = 0;
        if (++next->head < next->heads) continue;
        next->head = 0;
        next->row++;
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
INLINE void multiply_keys(const int rows, const float *q, const float *k, int32_t k_dim, float scale, float *s,
                          coming *next) {
    const int32_t between_requests = 16;
    vec acc[ISA_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = broadcast(0);
    for (int32_t begin = 0, end; begin < k_dim; begin = end) {
        end = next && k_dim - begin > between_requests ? begin + between_requests : k_dim;
        if (next) request(next, PANEL * (end - begin));
        for (int32_t d = begin; d < end; d++, q += rows, k += PANEL) {
            vec left = load(k), right = load(k + ISA_LANES);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                vec a = broadcast(q[r]);
                acc[r][0] = isa_fma(a, left, acc[r][0]);
                acc[r][1] = isa_fma(a, right, acc[r][1]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        store(s + r * TILE, acc[r][0] * scale);
        store(s + r * TILE + ISA_LANES, acc[r][1] * scale);
    }
}

/* o[r][0..PANEL) = shrink[r] * o[r] + sum over the keys [0, keys) of p[r][key] * v[key][0..PANEL). */
INLINE void multiply_values(const int rows, const float *p, const float *v, int32_t keys, const float *shrink, float *o,
                            int64_t o_stride) {
    vec acc[ISA_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        acc[r][0] = load(o + r * o_stride) * shrink[r];
        acc[r][1] = load(o + r * o_stride + ISA_LANES) * shrink[r];
    }
    for (int32_t key = 0; key < keys; key++, p++, v += PANEL) {
        vec left = load(v), right = load(v + ISA_LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vec a = broadcast(p[r * TILE]);
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

/* The scores of all rows of a group over the lanes [begin, end), whole panels. */
INLINE void score_packed(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                         int32_t end) {
    int32_t k_dim = tile->k_pages->dim;
    for (int32_t key = begin; key < end; key += PANEL)
        multiply_keys(rows, group->q, tile->k + key * k_dim, k_dim, tile->scale, group->scores + key, NULL);
}

/* The values of a tile, weighed with the scores. */
INLINE void weigh_packed(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                         int32_t end, const float *shrink) {
    for (int32_t d = 0; d < group->o_stride; d += PANEL)
        multiply_values(rows, group->scores + begin, tile->v + d / PANEL * V_STRIDE + begin * PANEL, end - begin,
                        shrink, group->o + d, group->o_stride);
}

/* The same sums from keys and values that are not packed yet: each panel is packed into the first-level cache right
 * before its only use. */
INLINE void score_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end) {
    _Alignas(64) float packed[PANEL * CPA_MAX_HEAD_DIM];
    int32_t k_dim = tile->k_pages->dim;
    coming next;
    for (int32_t key = begin; key < end; key += PANEL) {
        int last = key + PANEL >= end;
        expect_panel(&next, last ? tile->v_pages : tile->k_pages, tile->key0 + (last ? begin : key + PANEL),
                     group->heads);
        for (int32_t head = 0; head < group->heads; head++) {
            pack_key_panel(tile, head, key, packed);
            multiply_keys(rows, group->q + head * rows * k_dim, packed, k_dim, tile->scale,
                          group->scores + head * rows * TILE + key, &next);
        }
    }
}

INLINE void weigh_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end, const float *shrink) {
    _Alignas(64) float packed[PANEL * CPA_MAX_HEAD_DIM];
    float one[ISA_ROWS];
    coming next;
    for (int r = 0; r < rows; r++) one[r] = 1;
    for (int32_t key = begin; key < end; key += PANEL) {
        int last = key + PANEL >= end;
        expect_panel(&next, last ? tile->k_pages : tile->v_pages, tile->key0 + (last ? TILE : key + PANEL),
                     group->heads);
        for (int32_t head = 0; head < group->heads; head++) {
            pack_value_panel(tile, head, key, packed, PANEL * PANEL);
            for (int32_t d = 0; d < group->o_stride; d += PANEL) {
                request(&next, PANEL * PANEL);
                multiply_values(rows, group->scores + head * rows * TILE + key, packed + d * PANEL, PANEL,
                                key == begin ? shrink + head * rows : one, group->o + head * rows * group->o_stride + d,
                                group->o_stride);
            }
        }
    }
}

INLINE void attend_rows(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group) {
    float shrink[CPA_ATTEND_GROUP_ROWS];
    int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    if (tile->k)
        score_packed(rows, tile, group, begin, end);
    else
        score_pages(rows, tile, group, begin, end);
    for (int32_t i = 0; i < group->heads * rows; i++) {
        float *s = group->scores + i * TILE;
        if (tile->masked) mask_row(s, begin, end, tile->begin, tile->visible[i % rows]);
        shrink[i] = softmax_row(s, begin, end, &group->max[i], &group->sum[i]);
    }
    if (tile->v)
        weigh_packed(rows, tile, group, begin, end, shrink);
    else
        weigh_pages(rows, tile, group, begin, end, shrink);
}
