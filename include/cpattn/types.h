/* The view of a paged KV cache, partial states and masks, which operators, context attention and the engine share. */
#ifndef CPATTN_TYPES_H
#define CPATTN_TYPES_H

#include <cpattn/api.h>
#include <cpattn/shape.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One layer of a paged KV cache: a pool of K blocks and a pool of V blocks, both [num_blocks, block_size, kv_heads,
 * dim] by default and reached through strides, in elements, so that a head-major pool works as well; a stride of 0 is
 * that of the layout's order. The last dimension is contiguous, but under CPA_VLLM_X (cpattn/shape.h), where only
 * blocks may be farther apart than they need: there the strides of tokens and heads are those of the layout or 0, pools
 * are aligned to 16 bytes and the stride of key blocks is a multiple of 16 bytes. A quantised block is
 * cpa_kv_block_bytes long, or longer through its stride, and ends with the scales of its rows. With v_in_k there is one
 * pool, that of keys: v, the strides of values and their scales are not looked at. The memory belongs to the caller and
 * lies on the device that the operators run on. */
typedef struct cpa_kv_view {
    void *k;
    void *v;
    cpa_dtype dtype;
    int32_t block_size; /* tokens in a block, a power of two */
    int64_t num_blocks;
    int32_t kv_heads;
    int32_t k_dim; /* width of a key (and query) head */
    int32_t v_dim; /* width of a value (and output) head */
    int64_t k_block_stride, k_token_stride, k_head_stride;
    int64_t v_block_stride, v_token_stride, v_head_stride;
    /* CPA_FP8_E4M3, CPA_FP8_E5M2: scales of all keys and of all values; both 0: scales are k_scales and v_scales, or each row has its
     * own. */
    float k_scale, v_scale;
    cpa_kv_layout layout; /* strides that are not 0 outweigh it, but for CPA_VLLM_X */
    int32_t n_scales; /* of the same dtypes: scales in k_scales and in v_scales: 1, or kv_heads, one a head; 0: none */
    const float *k_scales, *v_scales; /* device, [n_scales]; NULL: none */
    int32_t v_in_k;                   /* 1: values are the first v_dim elements of keys (cpattn/shape.h) */
    int32_t reserved[15];             /* zero */
} cpa_kv_view;

/* Tokens of a paged sequence, and the rows of a tensor that receive them. */
typedef struct cpa_kv_span {
    int64_t table;       /* index into block_tables of the entry that holds token 0 of the sequence */
    int64_t first;       /* first token, anywhere in a block */
    int64_t count;       /* tokens */
    int64_t dst_row;     /* row that receives the first one; no row is filled twice */
    int64_t reserved[4]; /* zero */
} cpa_kv_span;

/* Partial attention states of some rows over some keys (Milakov and Gimelshein, arXiv:1805.02867): O normalised, fp32,
 * [rows, q_heads, v_dim] and LSE, the natural logarithm of the sum of exp(scaled scores), fp32, [rows, q_heads]. An
 * empty state has LSE = -inf and its O is never read; a row with a score that was no number has NaN for both. Row
 * strides are in elements, 0 for contiguous rows; the inner dimensions are contiguous, so that O and LSE of a row may
 * be interleaved in one message. */
typedef struct cpa_partial {
    float *o;
    int64_t o_row_stride;
    float *lse;
    int64_t lse_row_stride;
    int64_t reserved[4]; /* zero */
} cpa_partial;

/* Cascade attention: rows of sequences whose tables name the same leading blocks read these keys once, together
 * (Juravsky et al., Hydragen, arXiv:2402.05099). */
typedef enum cpa_cascade_attention {
    CPA_CASCADE_AUTO = 0,  /* where that takes less time */
    CPA_CASCADE_OFF = 1,   /* nowhere: every sequence reads all its keys itself */
    CPA_CASCADE_ALWAYS = 2 /* wherever a back end can */
} cpa_cascade_attention;

/* Which keys a query sees, by global position: causal means key <= query; a window w > 0 means query - key < w as well;
 * the first `sinks` keys of the sequence stay visible whatever the window. `right` > 0 means key - query < right: the
 * other side of the window of rows that look ahead, for operators alone; contexts and models have none. */
typedef struct cpa_mask {
    int32_t causal; /* 0 full, 1 causal */
    int32_t sinks;
    int64_t window;      /* 0: no window */
    int64_t right;       /* 0: no bound but `causal` */
    int64_t reserved[5]; /* zero */
} cpa_mask;

CPA_INLINE int cpa_mask_equals(cpa_mask a, cpa_mask b) {
    return a.causal == b.causal && a.sinks == b.sinks && a.window == b.window && a.right == b.right;
}

/* The keys at positions below query + this are seen, as far as the right side goes; 0: all. */
CPA_HOST_DEVICE CPA_INLINE int64_t cpa_mask_ahead(cpa_mask mask) {
    return mask.causal ? 1 : mask.right;
}

#ifdef __cplusplus
}
#endif
#endif
