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

/* Rows, all heads of each, on their way to the cache while others are worked on. Memory and arithmetic run side by
 * side only if the requests are spread over the arithmetic: a processor drops those that come too fast. */
typedef struct coming {
    const char *at, *end; /* what is left of the row at hand */
    int64_t second, step; /* of a request: from its first to its second line, and to the next request */
    const cpa_attend_pages *pages;
    int64_t key, last_key;
    int32_t head, heads;
} coming;

enum { LINE = 64, REQUEST_ELEMENTS = 32 };

INLINE coming expect_rows(const cpa_attend_pages *pages, int64_t key, int64_t keys, int32_t heads) {
    int wide = pages->dtype == CPA_F32;
    return (coming){.second = wide ? LINE : 0,
                    .step = wide ? 2 * LINE : LINE,
                    .pages = pages,
                    .key = key > 0 ? key : 0,
                    .last_key = key + keys < pages->keys ? key + keys : pages->keys,
                    .heads = heads};
}

static __attribute__((noinline)) void next_row(coming *next) {
    if (next->key >= next->last_key) {
        next->at = (const char *)ZEROS;
        next->end = next->at + 1;
        next->step = 0;
        return;
    }
    next->at = row_at(next->pages, next->head, next->key);
    next->end = next->at + next->pages->dim * cpa_dtype_bytes(next->pages->dtype);
    if (++next->head < next->heads) return;
    next->head = 0;
    next->key++;
}

/* Requests the next REQUEST_ELEMENTS elements. */
INLINE void request(coming *next) {
    if (next->at >= next->end) next_row(next);
    __builtin_prefetch(next->at, 0, 3);
    __builtin_prefetch(next->at + next->second, 0, 3);
    next->at += next->step;
}

/* ---- Packing ---- */

/* Packs the panel of keys that begins at lane `panel`: [k_dim][PANEL]. Requests half as much as it packs. Rows of a
 * quantised cache become floats first. */
INLINE void pack_key_panel_as(const cpa_dtype dtype, const int quantised, const cpa_attend_tile *tile, int32_t head,
                              int32_t panel, float *to, coming *next) {
    int32_t dim = tile->k_pages->dim, whole = dim / ISA_CELL * ISA_CELL;
    for (int cell = 0; cell < PANEL; cell += ISA_CELL) {
        const char *rows[ISA_CELL];
        float wide[ISA_CELL][CPA_MAX_HEAD_DIM];
        for (int i = 0; i < ISA_CELL; i++) {
            if (quantised) {
                dequantise_lane(tile, tile->k_pages, head, panel + cell + i, wide[i]);
                rows[i] = (const char *)wide[i];
            } else {
                rows[i] = row_of_lane(tile, tile->k_pages, head, panel + cell + i);
            }
        }
        for (int32_t d = 0; d < whole; d += ISA_CELL) {
            isa_transpose(to + d * PANEL + cell, PANEL, rows, dtype, d);
            if (next && d % (2 * REQUEST_ELEMENTS / ISA_CELL) == 0) request(next);
        }
        for (int i = 0; whole < dim && i < ISA_CELL; i++) {
            float rest[ISA_CELL] = {0};
            cpa_widen(rest, rows[i] + whole * cpa_dtype_bytes(dtype), dtype, dim - whole);
            for (int32_t d = whole; d < dim; d++) to[d * PANEL + cell + i] = rest[d - whole];
        }
    }
}

static void pack_key_panel(const cpa_attend_tile *tile, int32_t head, int32_t panel, float *to, coming *next) {
    switch (tile->k_pages->dtype) {
        case CPA_BF16: pack_key_panel_as(CPA_BF16, 0, tile, head, panel, to, next); break;
        case CPA_F16: pack_key_panel_as(CPA_F16, 0, tile, head, panel, to, next); break;
        case CPA_F32: pack_key_panel_as(CPA_F32, 0, tile, head, panel, to, next); break;
        default: pack_key_panel_as(CPA_F32, 1, tile, head, panel, to, next); break;
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

/* Packs one value, PANEL elements to each panel of v_dim, the panels `stride` floats apart. */
static void pack_value(const cpa_attend_tile *tile, int32_t head, int32_t lane, float *to, int64_t stride) {
    const char *row = row_of_lane(tile, tile->v_pages, head, lane);
    float wide[CPA_MAX_HEAD_DIM];
    if (tile->weighs && !tile->weighs[lane]) {
        row = (const char *)ZEROS;
    } else if (cpa_dtype_is_quantised(tile->v_pages->dtype)) {
        dequantise_lane(tile, tile->v_pages, head, lane, wide);
        row = (const char *)wide;
    }
    switch (tile->v_pages->dtype) {
        case CPA_BF16: pack_value_as(CPA_BF16, row, tile->v_pages->dim, to, stride); break;
        case CPA_F16: pack_value_as(CPA_F16, row, tile->v_pages->dim, to, stride); break;
        default: pack_value_as(CPA_F32, row, tile->v_pages->dim, to, stride); break;
    }
}

static void pack_tile(const cpa_attend_tile *tile, float *k, float *v) {
    int32_t begin = tile->begin / PANEL * PANEL, end = (tile->end + PANEL - 1) / PANEL * PANEL;
    for (int32_t lane = begin; lane < end; lane += PANEL)
        pack_key_panel(tile, 0, lane, k + lane * tile->k_pages->dim, NULL);
    for (int32_t lane = begin; lane < end; lane++) pack_value(tile, 0, lane, v + lane * PANEL, V_STRIDE);
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

static __attribute__((noinline)) void softmax_group(const cpa_attend_tile *tile, const cpa_attend_group *group,
                                                    int32_t begin, int32_t end, float *shrink) {
    for (int32_t i = 0; i < group->heads * group->rows; i++) {
        float *s = group->scores + i * TILE;
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

/* s[r][0..PANEL) = scale * sum over d of q[d][r] * k[d][0..PANEL). Requests half as much as it multiplies. */
INLINE void score_panel(const int rows, const float *q, const float *k, int32_t k_dim, float scale, float *s,
                        coming *next) {
    block acc;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc.left[r] = acc.right[r] = broadcast(0);
    for (int32_t d = 0, until; d < k_dim; d = until) {
        const int32_t run = 2 * REQUEST_ELEMENTS / PANEL;
        until = next && k_dim - d > run ? d + run : k_dim;
        if (next) request(next);
        for (int32_t i = d; i < until; i++, q += rows, k += PANEL)
            accumulate(rows, &acc, q, 1, load(k), load(k + ISA_LANES));
    }
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

/* The same from values as they lie in the pages, PANEL elements of each of PANEL rows `stride` bytes apart. Requests
 * half as much as it reads. */
INLINE void weigh_rows(const int rows, const cpa_dtype dtype, const float *p, const char *v, int64_t stride,
                       const float *shrink, float *o, int64_t o_stride, coming *next) {
    const int64_t half = ISA_LANES * cpa_dtype_bytes(dtype);
    const int32_t run = 2 * REQUEST_ELEMENTS / PANEL;
    block acc;
    load_sums(rows, &acc, o, o_stride, shrink);
    for (int32_t key = 0; key < PANEL; key += run) {
        request(next);
        for (int32_t i = key; i < key + run; i++, v += stride)
            accumulate(rows, &acc, p + i, TILE, isa_load(v, dtype), isa_load(v + half, dtype));
    }
    store_sums(rows, &acc, o, o_stride);
}

/* ---- Tiles ---- */

INLINE void score_tile(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                       int32_t end) {
    int32_t k_dim = tile->k_pages->dim;
    for (int32_t key = begin; key < end; key += PANEL)
        score_panel(rows, group->q, tile->k + key * k_dim, k_dim, tile->scale, group->scores + key, NULL);
}

INLINE void weigh_tile(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                       int32_t end, const float *shrink) {
    for (int32_t d = 0; d < group->o_stride; d += PANEL)
        weigh_packed(rows, group->scores + begin, tile->v + d / PANEL * V_STRIDE + begin * PANEL, end - begin, shrink,
                     group->o + d, group->o_stride);
}

/* The scores of a tile that is not packed: each panel of keys is packed into the first-level cache right before its
 * only use. The values of the first keys come next. */
INLINE void score_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end) {
    _Alignas(LINE) float packed[PANEL * CPA_MAX_HEAD_DIM];
    int32_t k_dim = tile->k_pages->dim;
    for (int32_t key = begin; key < end; key += PANEL) {
        coming next = key + PANEL < end ? expect_rows(tile->k_pages, tile->key0 + key + PANEL, PANEL, group->heads)
                                        : expect_rows(tile->v_pages, tile->key0 + begin, PANEL, group->heads);
        for (int32_t head = 0; head < group->heads; head++) {
            pack_key_panel(tile, head, key, packed, &next);
            score_panel(rows, group->q + head * rows * k_dim, packed, k_dim, tile->scale,
                        group->scores + head * rows * TILE + key, &next);
        }
    }
}

/* Weighs a panel of values of one head, all in use and in one page. */
INLINE void weigh_page(const int rows, const cpa_dtype dtype, const cpa_attend_tile *tile,
                       const cpa_attend_group *group, int32_t head, int32_t key, const float *shrink, coming *next) {
    const char *v = row_at(tile->v_pages, head, tile->key0 + key);
    for (int32_t d = 0; d < group->o_stride; d += PANEL, v += PANEL * cpa_dtype_bytes(dtype)) {
        for (int32_t i = 0; i < PANEL * PANEL / 2; i += REQUEST_ELEMENTS) request(next);
        weigh_rows(rows, dtype, group->scores + head * rows * TILE + key, v, tile->v_pages->token_stride, shrink,
                   group->o + head * rows * group->o_stride + d, group->o_stride, next);
    }
}

/* The same for any panel, by way of the first-level cache. */
INLINE void weigh_any(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t head,
                      int32_t key, const float *shrink, coming *next) {
    _Alignas(LINE) float packed[PANEL * CPA_MAX_HEAD_DIM];
    for (int32_t i = 0; i < PANEL; i++) {
        for (int32_t d = 0; d < tile->v_pages->dim; d += REQUEST_ELEMENTS) request(next);
        pack_value(tile, head, key + i, packed + i * PANEL, PANEL * PANEL);
    }
    for (int32_t d = 0; d < group->o_stride; d += PANEL)
        weigh_packed(rows, group->scores + head * rows * TILE + key, packed + d * PANEL, PANEL, shrink,
                     group->o + head * rows * group->o_stride + d, group->o_stride);
}

/* The values of a tile that is not packed. The first keys of the next tile come next. */
INLINE void weigh_pages(const int rows, const cpa_attend_tile *tile, const cpa_attend_group *group, int32_t begin,
                        int32_t end, const float *shrink) {
    const cpa_attend_pages *v = tile->v_pages;
    float one[ISA_ROWS];
    for (int r = 0; r < rows; r++) one[r] = 1;
    for (int32_t key = begin; key < end; key += PANEL) {
        int64_t first = tile->key0 + key, last = first + PANEL - 1;
        int together = !cpa_dtype_is_quantised(v->dtype) && key >= tile->begin && key + PANEL <= tile->end &&
                       v->dim % PANEL == 0 && first >> v->block_shift == last >> v->block_shift && !tile->weighs;
        coming next = key + PANEL < end ? expect_rows(v, first + PANEL, PANEL, group->heads)
                                        : expect_rows(tile->k_pages, tile->key0 + TILE, PANEL, group->heads);
        for (int32_t head = 0; head < group->heads; head++) {
            const float *factor = key == begin ? shrink + head * rows : one;
            if (!together)
                weigh_any(rows, tile, group, head, key, factor, &next);
            else if (v->dtype == CPA_F32)
                weigh_page(rows, CPA_F32, tile, group, head, key, factor, &next);
            else if (v->dtype == CPA_BF16)
                weigh_page(rows, CPA_BF16, tile, group, head, key, factor, &next);
            else
                weigh_page(rows, CPA_F16, tile, group, head, key, factor, &next);
        }
    }
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
