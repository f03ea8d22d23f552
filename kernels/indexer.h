/* What the back ends share of an indexer (cpattn/indexer.h): the head of its plan, which keys a row sees, and where they
 * lie. */
#ifndef CPA_KERNELS_INDEXER_H
#define CPA_KERNELS_INDEXER_H

#include <cpattn/indexer.h>

#include "kernels/kv_view.h"
#include "kernels/norm_codes.h"

/* The elements of MXFP4 that share a scale; the code of x, rounded to nearest, ties to the even one, NaN as 0; and the
 * scale of elements of which the largest has that magnitude. */
enum { CPA_INDEX_MXFP4_BLOCK = 32 };
CPA_HOST_DEVICE static inline uint8_t cpa_index_e2m1(float x) {
    const float size = x < 0 ? -x : x;
    const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                     (size >= 3.5f) + (size > 5.0f);
    return (uint8_t)(code | (x < 0 ? 8 : 0));
}
CPA_HOST_DEVICE static inline float cpa_index_mxfp4_scale(float largest) {
    const float most = 6, least = 6 * 0x1p-126f;
    return cpa_pow2_above((largest > least ? largest : least) / most);
}

/* The items of a setting that have rows, those with the most first: whatever few rows are, they come last. */
typedef struct cpa_index_items {
    cpa_owner_map map;
    int32_t tokens_per_key;
    const cpa_attend_item *items;
    int64_t n;
} cpa_index_items;

/* The head of every back end's plan; index_plan.c. */
struct cpa_index_plan {
    cpa_device *device;
    int is_set;
    int64_t max_block; /* largest block id in use, -1 without any */
    int32_t block_size;
    int64_t rows;      /* end of the rows of all items */
    int64_t most_keys; /* largest k_count of an item that has rows */
    cpa_index_items items;
    cpa_attend_item *memory; /* that items are in */
    int64_t capacity;
    /* Of a reserved plan, whose rows and most_keys are these; items 0: it is not reserved. Its items are filled up with
     * some of no rows. */
    cpa_index_limits limits;
};

/* Takes over what a batch says, but its tables; refuses what is beyond the limits of a reserved plan. */
cpa_status cpa_index_plan_describe(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                   cpa_error *err);
void cpa_index_plan_release(cpa_index_plan *plan);

/* How many of the keys of an item the row sees that is its `row`-th: the first ones. */
CPA_HOST_DEVICE static inline int64_t cpa_index_keys_seen(const cpa_index_items *of, const cpa_attend_item *item,
                                                          int64_t row) {
    const int64_t position = cpa_token_position(of->map, item->q_set, item->q_first + row);
    const int32_t run = of->map.interleave / of->tokens_per_key;
    const cpa_owner_map of_keys = {of->map.cp_size, run > 0 ? run : 1};
    const int64_t seen = cpa_tokens_before(of_keys, item->k_set, (position + 1) / of->tokens_per_key) - item->k_first;
    return seen < 0 ? 0 : seen < item->k_count ? seen : item->k_count;
}

/* Where the keys of logits lie. */
typedef struct cpa_index_keys {
    const char *rows;
    const float *scales;                /* of rows; NULL: there are none */
    int64_t block_stride, token_stride; /* bytes, of rows */
    int64_t scale_stride;               /* floats from the scales of a block to those of the next */
    float scale;                        /* of all keys */
    int64_t num_blocks;
} cpa_index_keys;

static inline cpa_index_keys cpa_index_keys_of(const cpa_index_logits_args *args) {
    const cpa_kv_view kv = cpa_kv_view_resolve(args->cache.kv);
    const cpa_kv_pool pool = cpa_kv_pool_of(&kv, CPA_KEYS);
    cpa_index_keys keys = {.rows = pool.memory,
                           .block_stride = pool.block_stride,
                           .token_stride = pool.token_stride,
                           .scale = kv.k_scale != 0 ? kv.k_scale : 1,
                           .num_blocks = kv.num_blocks};
    if (args->k_scales) {
        keys.scales = args->k_scales;
        keys.scale_stride = kv.block_size;
    } else if (pool.scale_bytes) {
        keys.scales = (const float *)(const void *)(pool.memory + pool.scales_at);
        keys.scale_stride = pool.block_stride / (int64_t)sizeof(float);
    }
    return keys;
}

#endif
