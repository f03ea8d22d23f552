/* Data types and the view of a paged KV cache that operators, context attention and the engine share. */
#ifndef CPATTN_TYPES_H
#define CPATTN_TYPES_H

#include <stddef.h>
#include <stdint.h>

#include <cpattn/api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The dtypes up to CPA_DTYPE_COUNT are those of queries, keys, values and results; a cache may also hold its keys and
 * values quantised. */
typedef enum cpa_dtype {
    CPA_F32 = 0,
    CPA_BF16,
    CPA_F16,
    CPA_DTYPE_COUNT,
    CPA_FP8_E4M3 = CPA_DTYPE_COUNT, /* 1 sign, 4 exponent, 3 mantissa bits; no infinity, at most 448 */
    CPA_INT8,
    CPA_KV_DTYPE_COUNT
} cpa_dtype;

/* Bytes of one element; 0 for a value that is no dtype. */
CPA_INLINE int64_t cpa_dtype_bytes(cpa_dtype dtype) {
    return dtype == CPA_F32                             ? 4
           : dtype == CPA_BF16 || dtype == CPA_F16      ? 2
           : dtype == CPA_FP8_E4M3 || dtype == CPA_INT8 ? 1
                                                        : 0;
}

/* "fp32", "bf16", "fp16", "fp8_e4m3" or "int8"; "none" for a value that is no dtype. */
CPA_INLINE const char *cpa_dtype_name(cpa_dtype dtype) {
    return dtype == CPA_F32        ? "fp32"
           : dtype == CPA_BF16     ? "bf16"
           : dtype == CPA_F16      ? "fp16"
           : dtype == CPA_FP8_E4M3 ? "fp8_e4m3"
           : dtype == CPA_INT8     ? "int8"
                                   : "none";
}

CPA_INLINE int cpa_dtype_is_quantised(cpa_dtype dtype) {
    return dtype == CPA_FP8_E4M3 || dtype == CPA_INT8;
}

/* The widest key or value head that the operators accept. */
#define CPA_MAX_HEAD_DIM 256

/* Quantised caches. A row is the key, or the value, of one token and head.
 *
 *     CPA_FP8_E4M3  x = scale * code; scale given for the whole tensor, or that of the row, max |x| / 448
 *     CPA_INT8      x = scale * (code - zero); scale and the integer zero are those of the row, for its range and 0
 *
 * Scales of rows travel with their block: the last kv_heads * block_size * 4 of its cpa_kv_block_bytes are an array
 * [kv_heads, block_size] of 32-bit words, whatever the order of the rows before it and whatever the stride. A word is
 * the scale as a float; for int8 the low 8 bits of the word hold the zero (as a signed byte), and the scale is the word
 * with those bits cleared. Codes are rounded to nearest even. What lies beyond the range saturates, infinities do as
 * well, and NaN becomes 0; neither takes part in the scale of a row. A row of zeros gives zeros exactly. */

/* Bytes of the scales of one row: 0 where rows have none. tensor_scale: that of the view, k_scale or v_scale. */
CPA_INLINE int64_t cpa_kv_scale_bytes(cpa_dtype dtype, float tensor_scale) {
    return dtype == CPA_INT8 || (dtype == CPA_FP8_E4M3 && tensor_scale == 0) ? 4 : 0;
}

/* Bytes of one block of keys, or of values, with its scales. Those of quantised blocks are a multiple of 16. */
CPA_INLINE int64_t cpa_kv_block_bytes(cpa_dtype dtype, float tensor_scale, int32_t block_size, int32_t kv_heads,
                                      int32_t dim) {
    int64_t rows = (int64_t)block_size * kv_heads;
    int64_t bytes = rows * (dim * cpa_dtype_bytes(dtype) + cpa_kv_scale_bytes(dtype, tensor_scale));
    return cpa_dtype_is_quantised(dtype) ? (bytes + 15) / 16 * 16 : bytes;
}

/* The order of the rows of a block: [block_size, kv_heads] or [kv_heads, block_size]. */
typedef enum cpa_kv_layout { CPA_TOKEN_MAJOR = 0, CPA_HEAD_MAJOR } cpa_kv_layout;

/* One layer of a paged KV cache: a pool of K blocks and a pool of V blocks, both [num_blocks, block_size, kv_heads,
 * dim] by default and reached through strides, in elements, so that a head-major pool works as well; a stride of 0 is
 * that of the default order. The last dimension is contiguous. A quantised block is cpa_kv_block_bytes long, or longer
 * through its stride, and ends with the scales of its rows. The memory belongs to the caller and lies on the device
 * that the operators run on. */
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
    float k_scale, v_scale; /* CPA_FP8_E4M3: of all keys and of all values; both 0: each row has its own */
} cpa_kv_view;

/* Partial attention states of some rows over some keys (Milakov and Gimelshein, arXiv:1805.02867): O normalised, fp32,
 * [rows, q_heads, v_dim] and LSE, the natural logarithm of the sum of exp(scaled scores), fp32, [rows, q_heads]. An
 * empty state has LSE = -inf and its O is never read. Row strides are in elements, 0 for contiguous rows; the inner
 * dimensions are contiguous, so that O and LSE of a row may be interleaved in one message. */
typedef struct cpa_partial {
    float *o;
    int64_t o_row_stride;
    float *lse;
    int64_t lse_row_stride;
} cpa_partial;

/* Which keys a query sees, by global position: causal means key <= query; a window w > 0 means query - key < w as well;
 * the first `sinks` keys of the sequence stay visible whatever the window. */
typedef struct cpa_mask {
    int32_t causal; /* 0 full, 1 causal */
    int32_t sinks;
    int64_t window; /* 0: no window */
} cpa_mask;

CPA_INLINE int cpa_mask_equals(cpa_mask a, cpa_mask b) {
    return a.causal == b.causal && a.sinks == b.sinks && a.window == b.window;
}

#ifdef __cplusplus
}
#endif
#endif
