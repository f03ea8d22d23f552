/* What back ends and the library derive from the view of a cache: its strides, and where rows and scales lie. */
#ifndef CPA_KV_VIEW_H
#define CPA_KV_VIEW_H

#include <cpattn/types.h>

/* A view whose zero strides are replaced by those of the default order [num_blocks, block_size, kv_heads, dim]. */
static inline cpa_kv_view cpa_kv_view_resolve(cpa_kv_view kv) {
    const int64_t unit = cpa_dtype_bytes(kv.dtype);
    const int64_t k_row = cpa_kv_row_bytes(kv.dtype, CPA_KEYS, kv.k_dim) / unit;
    const int64_t v_row = cpa_kv_row_bytes(kv.dtype, CPA_VALUES, kv.v_dim) / unit;
    if (!kv.k_head_stride) kv.k_head_stride = k_row;
    if (!kv.k_token_stride) kv.k_token_stride = kv.kv_heads * k_row;
    if (!kv.k_block_stride)
        kv.k_block_stride =
            cpa_kv_block_bytes(kv.dtype, CPA_KEYS, kv.k_scale, kv.block_size, kv.kv_heads, kv.k_dim) / unit;
    if (!kv.v_head_stride) kv.v_head_stride = v_row;
    if (!kv.v_token_stride) kv.v_token_stride = kv.kv_heads * v_row;
    if (!kv.v_block_stride)
        kv.v_block_stride =
            cpa_kv_block_bytes(kv.dtype, CPA_VALUES, kv.v_scale, kv.block_size, kv.kv_heads, kv.v_dim) / unit;
    return kv;
}

/* The view with the strides of a layout. */
static inline cpa_kv_view cpa_kv_view_order(cpa_kv_view kv, cpa_kv_layout layout) {
    if (layout == CPA_HEAD_MAJOR) {
        const int64_t unit = cpa_dtype_bytes(kv.dtype);
        kv.k_token_stride = cpa_kv_row_bytes(kv.dtype, CPA_KEYS, kv.k_dim) / unit;
        kv.k_head_stride = kv.block_size * kv.k_token_stride;
        kv.v_token_stride = cpa_kv_row_bytes(kv.dtype, CPA_VALUES, kv.v_dim) / unit;
        kv.v_head_stride = kv.block_size * kv.v_token_stride;
    }
    return cpa_kv_view_resolve(kv);
}

/* The view of so many blocks of a cache of that shape, without memory, in the order of the shape's layout. */
static inline cpa_kv_view cpa_kv_view_of(const cpa_attention_shape *shape, int32_t block_size, int64_t num_blocks) {
    cpa_kv_view kv = {0};
    kv.dtype = shape->kv_dtype;
    kv.block_size = block_size;
    kv.num_blocks = num_blocks;
    kv.kv_heads = shape->kv_heads;
    kv.k_dim = shape->k_dim;
    kv.v_dim = shape->v_dim;
    kv.k_scale = shape->k_scale;
    kv.v_scale = shape->v_scale;
    return cpa_kv_view_order(kv, shape->layout);
}

/* The keys, or the values, of a resolved view; what is not a pointer, a width or a scale is in bytes. */
typedef struct cpa_kv_pool {
    char *memory;
    int32_t dim;
    float tensor_scale;
    int64_t block_stride, token_stride, head_stride;
    int64_t row_bytes;
    int64_t
        scale_bytes;   /* of a row, in the array [kv_heads, block_size] behind the rows of a block; 0: none is there */
    int64_t scales_at; /* from the start of a block to that array, or to where it would end */
} cpa_kv_pool;

static inline cpa_kv_pool cpa_kv_pool_of(const cpa_kv_view *kv, cpa_kv_part part) {
    const int64_t unit = cpa_dtype_bytes(kv->dtype);
    const int keys = part == CPA_KEYS;
    cpa_kv_pool pool;
    pool.memory = (char *)(keys ? kv->k : kv->v);
    pool.dim = keys ? kv->k_dim : kv->v_dim;
    pool.tensor_scale = keys ? kv->k_scale : kv->v_scale;
    pool.block_stride = (keys ? kv->k_block_stride : kv->v_block_stride) * unit;
    pool.token_stride = (keys ? kv->k_token_stride : kv->v_token_stride) * unit;
    pool.head_stride = (keys ? kv->k_head_stride : kv->v_head_stride) * unit;
    pool.row_bytes = cpa_kv_row_bytes(kv->dtype, part, pool.dim);
    pool.scale_bytes = cpa_kv_scale_bytes(kv->dtype, part, pool.tensor_scale);
    pool.scales_at = cpa_kv_block_bytes(kv->dtype, part, pool.tensor_scale, kv->block_size, kv->kv_heads, pool.dim) -
                     (int64_t)kv->kv_heads * kv->block_size * pool.scale_bytes;
    return pool;
}

/* From the start of a block of keys, or of values, to the scales of its rows, in bytes; 0 where none are there. */
static inline int64_t cpa_kv_words_at(const cpa_kv_view *kv, cpa_kv_part part) {
    const cpa_kv_pool pool = cpa_kv_pool_of(kv, part);
    return pool.scale_bytes ? pool.scales_at : 0;
}

#endif
