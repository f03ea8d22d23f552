/* What back ends and the library derive from the view of a cache: its strides, and where rows and scales lie. */
#ifndef CPA_KV_VIEW_H
#define CPA_KV_VIEW_H

#include <cpattn/types.h>

/* Elements of a run of CPA_VLLM_X keys: 16 bytes. */
static inline int32_t cpa_kv_key_run(cpa_dtype dtype) {
    return (int32_t)(16 / cpa_dtype_bytes(dtype));
}

/* The scale of all keys, or of all values; 1 where each head has one, and 0 where each row has its own. */
static inline float cpa_kv_tensor_scale(const cpa_kv_view *kv, cpa_kv_part part) {
    return kv->k_scales ? 1 : part == CPA_KEYS || kv->v_in_k ? kv->k_scale : kv->v_scale;
}

/* Whether tiles of a row have scales, as rows of latents may. */
static inline int cpa_dtype_has_tiles(cpa_dtype dtype) {
    return cpa_dtype_traits_of(dtype)->rows[CPA_KEYS].tile > 0;
}

/* How many pools a view has: those of keys and of values, or that of keys alone, which hold their values. */
static inline int cpa_kv_parts(const cpa_kv_view *kv) {
    return kv->v_in_k ? 1 : 2;
}

/* A view whose zero strides are replaced by those of its layout; values that lie in keys have all that keys have. */
static inline cpa_kv_view cpa_kv_view_resolve(cpa_kv_view kv) {
    const int64_t unit = cpa_dtype_bytes(kv.dtype);
    const int64_t k_row = cpa_kv_row_bytes(kv.dtype, CPA_KEYS, kv.k_dim) / unit;
    const int64_t v_row = cpa_kv_row_bytes(kv.dtype, CPA_VALUES, kv.v_dim) / unit;
    const int by_head = kv.layout != CPA_TOKEN_MAJOR;
    if (kv.layout == CPA_VLLM_X) {
        kv.k_token_stride = cpa_kv_key_run(kv.dtype);
        kv.v_token_stride = 1;
    }
    if (!kv.k_head_stride) kv.k_head_stride = by_head ? kv.block_size * k_row : k_row;
    if (!kv.k_token_stride) kv.k_token_stride = by_head ? k_row : kv.kv_heads * k_row;
    if (!kv.k_block_stride)
        kv.k_block_stride = cpa_kv_block_bytes(kv.dtype, CPA_KEYS, cpa_kv_tensor_scale(&kv, CPA_KEYS), kv.block_size,
                                               kv.kv_heads, kv.k_dim) /
                            unit;
    if (!kv.v_head_stride) kv.v_head_stride = by_head ? kv.block_size * v_row : v_row;
    if (!kv.v_token_stride) kv.v_token_stride = by_head ? v_row : kv.kv_heads * v_row;
    if (!kv.v_block_stride)
        kv.v_block_stride = cpa_kv_block_bytes(kv.dtype, CPA_VALUES, cpa_kv_tensor_scale(&kv, CPA_VALUES),
                                               kv.block_size, kv.kv_heads, kv.v_dim) /
                            unit;
    if (!kv.v_in_k) return kv;
    kv.v = kv.k;
    kv.v_block_stride = kv.k_block_stride, kv.v_token_stride = kv.k_token_stride, kv.v_head_stride = kv.k_head_stride;
    kv.v_scale = kv.k_scale, kv.v_scales = kv.k_scales;
    return kv;
}

/* The view, whose strides are not set, with those of a layout. */
static inline cpa_kv_view cpa_kv_view_order(cpa_kv_view kv, cpa_kv_layout layout) {
    kv.layout = layout;
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
    kv.k_scales = shape->k_scales;
    kv.v_scales = shape->v_scales;
    kv.n_scales = shape->n_scales;
    kv.v_in_k = shape->v_in_k;
    return cpa_kv_view_order(kv, shape->layout);
}

/* What a view says of the shape of its cache; there are as many query heads as KV heads. */
static inline cpa_attention_shape cpa_kv_view_shape(const cpa_kv_view *kv) {
    cpa_attention_shape shape = {0};
    shape.q_heads = shape.kv_heads = kv->kv_heads;
    shape.k_dim = kv->k_dim;
    shape.v_dim = kv->v_dim;
    shape.kv_dtype = kv->dtype;
    shape.layout = kv->layout;
    shape.k_scale = kv->k_scale;
    shape.v_scale = kv->v_scale;
    shape.k_scales = kv->k_scales;
    shape.v_scales = kv->v_scales;
    shape.n_scales = kv->n_scales;
    shape.v_in_k = kv->v_in_k;
    return shape;
}

/* The keys, or the values, of a resolved view; what is not a pointer, a width or a scale is in bytes. A row is one run
 * of bytes, or under CPA_VLLM_X several. Values that lie in keys are their first elements. */
typedef struct cpa_kv_pool {
    char *memory;
    cpa_kv_part part;
    int32_t dim;     /* elements of a key, or a value */
    int32_t row_dim; /* elements of a row as it lies; more than dim where a value is a part of its key */
    float tensor_scale;
    const float *head_scales; /* device: scales of heads, by which tensor_scale is multiplied; NULL: none */
    int32_t head_scale_step;  /* elements from the scale of a head to that of the next; 0: all have the first */
    int32_t runs;             /* runs of a row */
    int64_t block_stride, token_stride, head_stride;
    int64_t row_bytes, run_bytes;
    int64_t run_stride;
    int64_t
        scale_bytes;   /* of a row, in the array [kv_heads, block_size] behind the rows of a block; 0: none is there */
    int64_t scales_at; /* from the start of a block to that array, or to where it would end */
} cpa_kv_pool;

static inline cpa_kv_pool cpa_kv_pool_of(const cpa_kv_view *kv, cpa_kv_part part) {
    const int64_t unit = cpa_dtype_bytes(kv->dtype);
    const int keys = part == CPA_KEYS;
    cpa_kv_pool pool;
    pool.memory = (char *)(keys ? kv->k : kv->v);
    pool.part = part;
    pool.dim = keys ? kv->k_dim : kv->v_dim;
    pool.row_dim = keys || kv->v_in_k ? kv->k_dim : kv->v_dim;
    pool.tensor_scale = cpa_kv_tensor_scale(kv, part);
    pool.block_stride = (keys ? kv->k_block_stride : kv->v_block_stride) * unit;
    pool.token_stride = (keys ? kv->k_token_stride : kv->v_token_stride) * unit;
    pool.head_stride = (keys ? kv->k_head_stride : kv->v_head_stride) * unit;
    pool.row_bytes = cpa_kv_row_bytes(kv->dtype, part, pool.row_dim);
    pool.run_bytes = kv->layout == CPA_VLLM_X ? pool.token_stride : pool.row_bytes;
    pool.run_stride = kv->block_size * pool.run_bytes;
    pool.runs = (int32_t)(pool.row_bytes / pool.run_bytes);
    pool.head_scales = keys ? kv->k_scales : kv->v_scales;
    pool.head_scale_step = kv->n_scales > 1;
    pool.scale_bytes = cpa_kv_scale_bytes(kv->dtype, part, pool.tensor_scale);
    pool.scales_at = cpa_kv_scales_at(kv->dtype, part, pool.tensor_scale, kv->block_size, kv->kv_heads, pool.row_dim);
    return pool;
}

/* The scale of the rows of a head that have none of their own, where the scales are in host memory. */
static inline float cpa_kv_head_scale(const cpa_kv_pool *pool, int64_t head) {
    return pool->head_scales ? pool->tensor_scale * pool->head_scales[head * pool->head_scale_step]
                             : pool->tensor_scale;
}

/* Whether a row has the same bytes in two resolved views of one shape, and the same scales. */
static inline int cpa_kv_same_form(const cpa_kv_view *a, const cpa_kv_view *b) {
    return a->dtype == b->dtype && a->k_scale == b->k_scale && a->v_scale == b->v_scale && a->k_scales == b->k_scales &&
           a->v_scales == b->v_scales && a->n_scales == b->n_scales;
}

/* log2 of the elements of a run, for kernels that find an element by its column; CPA_KV_ONE_RUN, that of more elements
 * than any row has, where a row is one run. */
enum { CPA_KV_ONE_RUN = 30 };
static inline int32_t cpa_kv_run_shift(const cpa_kv_view *kv, cpa_kv_part part) {
    int32_t shift = 0;
    if (kv->layout != CPA_VLLM_X) return CPA_KV_ONE_RUN;
    while (part == CPA_KEYS && 1 << shift < cpa_kv_key_run(kv->dtype)) shift++;
    return shift;
}

/* From the start of a block of keys, or of values, to the scales of its rows, in bytes; 0 where none are there. */
static inline int64_t cpa_kv_words_at(const cpa_kv_view *kv, cpa_kv_part part) {
    const cpa_kv_pool pool = cpa_kv_pool_of(kv, part);
    return pool.scale_bytes ? pool.scales_at : 0;
}

/* The tokens of a span from the `done`-th on that lie in one block: its entry in block_tables, and where they begin. */
typedef struct cpa_span_run {
    int64_t entry;
    int32_t first, count;
} cpa_span_run;
static inline cpa_span_run cpa_span_run_of(const cpa_kv_span *span, int64_t done, int64_t block_size) {
    const int64_t token = span->first + done, first = token % block_size, left = span->count - done;
    return (cpa_span_run){span->table + token / block_size, (int32_t)first,
                          (int32_t)(left < block_size - first ? left : block_size - first)};
}

#endif
