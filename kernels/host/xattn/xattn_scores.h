/* The scores of a block of queries of a head and a block of keys, which xattn_stats, xattn_block_sums and xattn_scores
 * walk through. */
#ifndef CPA_HOST_XATTN_SCORES_H
#define CPA_HOST_XATTN_SCORES_H

#include <math.h>

#include "base/min_max.h"
#include "kernels/host/device/host.h"
#include "kernels/xattn.h"

enum { CPA_XATTN_LANES = 16 };

/* A row of queries as fp32, and what is asked of it. */
typedef struct cpa_xattn_walk {
    const cpa_xattn_shape *shape;
    const cpa_xattn_chunks *chunks;
    int32_t of_block; /* groups of a block */
    int64_t q_groups, k_groups, width;
} cpa_xattn_walk;

static inline cpa_xattn_walk cpa_xattn_walk_of(const cpa_xattn_shape *shape, const cpa_xattn_chunks *chunks) {
    return (cpa_xattn_walk){shape,
                            chunks,
                            shape->block / shape->stride,
                            cpa_xattn_groups(shape, chunks->q_tokens),
                            cpa_xattn_groups(shape, chunks->k_tokens),
                            cpa_xattn_width(shape)};
}

/* Groups of a block that exist, and of the keys' those that group `i` of a block of queries sees: the first ones. */
static inline int64_t cpa_xattn_in_block(const cpa_xattn_walk *walk, int64_t groups, int64_t block) {
    return cpa_min64(walk->of_block, groups - block * walk->of_block);
}
static inline int64_t cpa_xattn_seen(const cpa_xattn_walk *walk, int64_t q_place, int64_t k_block, int64_t i) {
    const cpa_xattn_chunks *c = walk->chunks;
    const int64_t all = cpa_xattn_in_block(walk, walk->k_groups, k_block);
    const int64_t place = cpa_xattn_place(walk->shape, c->map, c->k_set, c->k_first, k_block);
    if (!walk->shape->causal || place < q_place) return all;
    return place == q_place ? cpa_min64(all, i + 1) : 0;
}

static inline const char *cpa_xattn_key(const cpa_xattn_walk *walk, int32_t head, int64_t group) {
    const int64_t kv_head = head / (walk->shape->q_heads / walk->shape->kv_heads);
    return (const char *)walk->chunks->k +
           (kv_head * walk->chunks->k_stride + group * walk->width) * cpa_dtype_bytes(walk->shape->dtype);
}
static inline const char *cpa_xattn_query(const cpa_xattn_walk *walk, int32_t head, int64_t group) {
    return (const char *)walk->chunks->q +
           (head * walk->q_groups + group) * walk->width * cpa_dtype_bytes(walk->shape->dtype);
}

/* z of two rows: LANES sums side by side, then their sum in order. The width is a multiple of 8. */
static inline float cpa_xattn_score(const cpa_xattn_walk *walk, const float *q, const float *k) {
    float lanes[CPA_XATTN_LANES] = {0}, sum = 0;
    const int64_t whole = walk->width / CPA_XATTN_LANES * CPA_XATTN_LANES;
    for (int64_t d = 0; d < whole; d += CPA_XATTN_LANES)
        for (int l = 0; l < CPA_XATTN_LANES; l++) lanes[l] += q[d + l] * k[d + l];
    for (int64_t d = whole; d < walk->width; d++) lanes[d - whole] += q[d] * k[d];
    for (int l = 0; l < CPA_XATTN_LANES; l++) sum += lanes[l];
    return sum * walk->shape->scale;
}

#endif
