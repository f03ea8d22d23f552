/* Data types, how a cache stores rows of them, and the shape of an attention: what operators, context attention, the
 * engine and their caches have in common. */
#ifndef CPATTN_SHAPE_H
#define CPATTN_SHAPE_H

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
    CPA_FP8_T128, /* rows of latents: e4m3 with a scale for every 128, and the last 64 elements in bf16 */
    CPA_FP8_E5M2, /* 1 sign, 5 exponent, 2 mantissa bits: the upper byte of fp16; finite up to 57,344 */
    CPA_FP8_T64,  /* rows of latents of 512: 448 of e4m3, a power of two for every 64, and the last 64 in bf16 */
    CPA_TQ_K8V4,  /* TurboQuant: keys in e4m3 without a scale, values in 4 bits with a scale and a minimum */
    CPA_TQ_4BIT,  /* keys, rotated, in 4 bits with their length, values in 4 bits */
    CPA_TQ_K3V4,  /* keys in 3 bits, values in 4 */
    CPA_TQ_3BIT,  /* both in 3 bits */
    CPA_KV_DTYPE_COUNT
} cpa_dtype;

/* The two sides of a cache. */
typedef enum cpa_kv_part { CPA_KEYS = 0, CPA_VALUES } cpa_kv_part;

/* How a cache stores a row, the key or the value of one token and head: its elements, packed and filled up to a byte,
 * and the scales of the row, either right behind them or behind all rows of the block. Elements at the end of the row
 * that are none of a tile lie behind its elements and the scales that are in it, in bf16. */
typedef struct cpa_row_traits {
    int32_t element_bits;
    int32_t scale_bytes;  /* of a row's scale, or a tile's; of all tiles of a row where they lie behind the rows */
    int32_t scale_in_row; /* 1: behind the row's elements, if it has any; 0: behind the rows of the block */
    int32_t tile;         /* elements that share a scale; 0: the row has one, if any */
    int32_t tail;         /* last elements of a row, which are bf16 whatever the others are */
    int32_t width;        /* elements of every row; 0: any number */
} cpa_row_traits;

typedef struct cpa_dtype_traits {
    const char *name;
    int32_t quantised;      /* 1: elements are codes, for caches alone */
    int32_t tensor_scale;   /* 1: one scale may serve all keys and one all values; no row has its own then */
    int32_t block_multiple; /* bytes; a block of a layer's keys, or values, is rounded up to a multiple */
    cpa_row_traits rows[2]; /* traits of a row of keys, and of a row of values */
} cpa_dtype_traits;

/* All that is known of a dtype but its arithmetic; NULL for a value that is no dtype. */
CPA_INLINE const cpa_dtype_traits *cpa_dtype_traits_of(cpa_dtype dtype) {
    static const cpa_dtype_traits table[CPA_KV_DTYPE_COUNT] = {
        {"fp32", 0, 0, 1, {{32, 0, 0, 0, 0, 0}, {32, 0, 0, 0, 0, 0}}},
        {"bf16", 0, 0, 1, {{16, 0, 0, 0, 0, 0}, {16, 0, 0, 0, 0, 0}}},
        {"fp16", 0, 0, 1, {{16, 0, 0, 0, 0, 0}, {16, 0, 0, 0, 0, 0}}},
        {"fp8_e4m3", 1, 1, 16, {{8, 4, 0, 0, 0, 0}, {8, 4, 0, 0, 0, 0}}},
        {"int8", 1, 0, 16, {{8, 4, 0, 0, 0, 0}, {8, 4, 0, 0, 0, 0}}},
        {"fp8_t128", 1, 0, 16, {{8, 4, 1, 128, 64, 0}, {8, 4, 1, 128, 64, 0}}},
        {"fp8_e5m2", 1, 1, 16, {{8, 4, 0, 0, 0, 0}, {8, 4, 0, 0, 0, 0}}},
        {"fp8_t64", 1, 0, 576, {{8, 8, 0, 64, 64, 512}, {8, 8, 0, 64, 64, 512}}},
        {"tq_k8v4", 1, 0, 16, {{8, 0, 1, 0, 0, 0}, {4, 4, 1, 0, 0, 0}}},
        {"tq_4bit", 1, 0, 16, {{4, 2, 1, 0, 0, 0}, {4, 4, 1, 0, 0, 0}}},
        {"tq_k3v4", 1, 0, 16, {{3, 2, 1, 0, 0, 0}, {4, 4, 1, 0, 0, 0}}},
        {"tq_3bit", 1, 0, 16, {{3, 2, 1, 0, 0, 0}, {3, 4, 1, 0, 0, 0}}},
    };
    return (uint32_t)dtype < CPA_KV_DTYPE_COUNT ? &table[dtype] : NULL;
}

/* "fp32", "bf16", "fp16", "fp8_e4m3", "int8", "fp8_t128", "fp8_e5m2", "fp8_t64", "tq_k8v4", "tq_4bit", "tq_k3v4" or
 * "tq_3bit"; "none" for a value that is no dtype. */
CPA_INLINE const char *cpa_dtype_name(cpa_dtype dtype) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(dtype);
    return traits ? traits->name : "none";
}

/* Whether queries, keys, values and results may have the dtype; and whether it is one of caches alone. */
CPA_INLINE int cpa_dtype_is_plain(cpa_dtype dtype) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(dtype);
    return traits && !traits->quantised;
}
CPA_INLINE int cpa_dtype_is_quantised(cpa_dtype dtype) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(dtype);
    return traits && traits->quantised;
}

/* Whether it is one of TurboQuant's, whose keys and values have codes of different kinds. */
CPA_HOST_DEVICE CPA_INLINE int cpa_dtype_is_turboquant(cpa_dtype dtype) {
    return dtype >= CPA_TQ_K8V4 && dtype <= CPA_TQ_3BIT;
}

/* Bytes of what strides of a tensor or cache of the dtype count: of an element, or 1 where an element is less than a
 * byte; 0 for a value that is no dtype. */
CPA_INLINE int64_t cpa_dtype_bytes(cpa_dtype dtype) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(dtype);
    return !traits ? 0 : traits->rows[CPA_KEYS].element_bits < 8 ? 1 : traits->rows[CPA_KEYS].element_bits / 8;
}

/* The widest key or value head that the operators accept: a latent of 512 and 64 rotated elements. */
#define CPA_MAX_HEAD_DIM 576

/* Quantised caches. A row is the key, or the value, of one token and head.
 *
 *     CPA_FP8_E4M3  x = scale * code; scale given for the whole tensor, or for each KV head, or that of the row,
 *                   max |x| / 448
 *     CPA_FP8_E5M2  the same with codes of that form, and max |x| / 57344
 *     CPA_INT8      x = scale * (code - zero); scale and the integer zero are those of the row, for its range and 0
 *     CPA_FP8_T128  x = bf16(scale * code); scale, fp32, that of 128 elements, max(max |x| / 448, FLT_MIN); the last 64
 *                   elements are bf16. Rows of latents alone (v_in_k): 512 codes, 4 scales and 64 elements, 656 bytes
 *                   (vLLM's fp8_ds_mla). Any positive scales are read.
 *     CPA_FP8_T64   x = 2^e * code, exact in bf16, of x rounded to bf16; e that of 64 elements, the least with
 *                   2^e >= max(max |x|, 1e-4) / 448, as a byte e + 127 (UE8M0); the last 64 elements are bf16. Rows of
 *                   latents alone, of 512: 448 codes and 64 elements, 576 bytes, and 8 more behind all rows of the
 *                   block, right where these end: the bytes of 7 tiles, and 0 (DeepSeek-V4's cache, FlashMLA's and
 *                   vLLM's). Blocks are a multiple of 576 bytes apart: 64 tokens are 37,440. Any bytes but 255 are
 *                   read.
 *
 *     CPA_TQ_*      TurboQuant (Zandieh et al., arXiv:2504.19874) as vLLM stores it. Keys of b = 3 or 4 bits: y = H x /
 *                   |x|, H the Hadamard matrix in Sylvester's order, the width n a power of two; a code is the number
 *                   of midpoints of the codebook that are at most y, and stands for c, its centroid (kernels/codebook.h:
 *                   Lloyd's of the normal distribution). x = length / sqrt(n sum of c^2) * H c: the length, fp16, lies
 *                   behind the codes. Values of b bits: x = scale * code + least, both fp16 behind the codes, scale that
 *                   of (most - least) / (2^b - 1), at least 1e-8. Keys of CPA_TQ_K8V4: x = code, of e4m3. Two codes of 4
 *                   bits lie in a byte, the first in its lower half; eight of 3 bits in three bytes, from the lowest bit
 *                   on. What is not finite counts as 0; it is told of. At 128 columns a key and a value take 196,
 *                   134, 118 and 102 bytes.
 *
 * Other scales of rows that do not lie in them travel with their block: the last kv_heads * block_size * 4 of its
 * cpa_kv_block_bytes are an array [kv_heads, block_size] of 32-bit words, whatever the order of the rows before it and whatever the stride. A word is
 * the scale as a float; for int8 the low 8 bits of the word hold the zero (as a signed byte), and the scale is the word
 * with those bits cleared. Codes are rounded to nearest even. What lies beyond the range saturates, infinities do as
 * well, and NaN becomes 0; neither takes part in the scale of a row, and cpa_kv_write tells of both. A row of zeros
 * gives zeros exactly. */

/* Bytes of a row of `dim` elements, with the scales that lie in it. */
CPA_INLINE int64_t cpa_row_bytes(const cpa_row_traits *row, int32_t dim) {
    const int64_t coded = dim - row->tail, tail_bytes = 2 * (int64_t)row->tail;
    const int64_t scales = !row->scale_in_row ? 0 : row->tile ? (coded + row->tile - 1) / row->tile : 1;
    return (coded * row->element_bits + 7) / 8 + scales * row->scale_bytes + tail_bytes;
}

/* Bytes of one block of keys, or of values, of a layer: its rows, and the scales behind them, unless the tensor has
 * one. The one place that knows how long a block is. */
CPA_INLINE int64_t cpa_traits_block_bytes(const cpa_dtype_traits *traits, cpa_kv_part part, float tensor_scale,
                                          int32_t block_size, int32_t kv_heads, int32_t dim) {
    const cpa_row_traits *row = &traits->rows[part];
    int behind = !row->scale_in_row && !(traits->tensor_scale && tensor_scale != 0);
    int64_t bytes = (int64_t)block_size * kv_heads * (cpa_row_bytes(row, dim) + (behind ? row->scale_bytes : 0));
    return (bytes + traits->block_multiple - 1) / traits->block_multiple * traits->block_multiple;
}

/* The same of a dtype; tensor_scale: that of the view, k_scale or v_scale. */
CPA_INLINE int64_t cpa_kv_row_bytes(cpa_dtype dtype, cpa_kv_part part, int32_t dim) {
    return cpa_row_bytes(&cpa_dtype_traits_of(dtype)->rows[part], dim);
}
CPA_INLINE int64_t cpa_kv_block_bytes(cpa_dtype dtype, cpa_kv_part part, float tensor_scale, int32_t block_size,
                                      int32_t kv_heads, int32_t dim) {
    return cpa_traits_block_bytes(cpa_dtype_traits_of(dtype), part, tensor_scale, block_size, kv_heads, dim);
}

/* From the start of a block to the scales behind its rows, or to where they would be: right behind its rows where tiles
 * have scales, else at the end of the block. */
CPA_INLINE int64_t cpa_kv_scales_at(cpa_dtype dtype, cpa_kv_part part, float tensor_scale, int32_t block_size,
                                    int32_t kv_heads, int32_t dim) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(dtype);
    const cpa_row_traits *row = &traits->rows[part];
    const int64_t rows = (int64_t)block_size * kv_heads;
    const int behind = !row->scale_in_row && !(traits->tensor_scale && tensor_scale != 0);
    if (row->tile) return rows * cpa_row_bytes(row, dim);
    return cpa_traits_block_bytes(traits, part, tensor_scale, block_size, kv_heads, dim) -
           (behind ? rows * row->scale_bytes : 0);
}

/* Bytes that a row has in the scales behind the rows of its block; 0 where it has none there. */
CPA_INLINE int64_t cpa_kv_scale_bytes(cpa_dtype dtype, cpa_kv_part part, float tensor_scale) {
    const cpa_dtype_traits *traits = cpa_dtype_traits_of(dtype);
    int behind = !traits->rows[part].scale_in_row && !(traits->tensor_scale && tensor_scale != 0);
    return behind ? traits->rows[part].scale_bytes : 0;
}

/* The order of a block: of rows, [block_size, kv_heads, dim] or [kv_heads, block_size, dim]; or that of vLLM's paged
 * kernels (csrc/attention/attention_kernels.cuh), where no row is contiguous: keys [kv_heads, k_dim / x, block_size, x]
 * with x elements in 16 bytes, values [kv_heads, v_dim, block_size]. There k_dim is a multiple of x. */
typedef enum cpa_kv_layout { CPA_TOKEN_MAJOR = 0, CPA_HEAD_MAJOR, CPA_VLLM_X } cpa_kv_layout;

/* The shape of an attention and of its cache. Embedded by value wherever these are named; what is reserved is 0.
 *
 * v_in_k = 1 says that the value of a row is the first v_dim elements of its key, so that the cache has one pool, of
 * latents, and none of values (multi-head latent attention, DeepSeek-AI, arXiv:2405.04434: k_dim = latent + rope, v_dim =
 * latent, one KV head, queries absorbed). Its layout is not CPA_VLLM_X, and scales are those of keys: v_scale is k_scale,
 * or 0, v_scales is k_scales, or NULL. k_scale and v_scale are those of all keys and of all values, for
 * CPA_FP8_E4M3 and CPA_FP8_E5M2; both 0: each row has its own, or k_scales and v_scales are given: n_scales of each in memory of the
 * device, 1 for all heads or kv_heads. They are read when work of a stream comes to them, belong to the caller, and
 * hold the same numbers on every rank. */
typedef struct cpa_attention_shape {
    int32_t q_heads; /* a multiple of kv_heads; query head h reads KV head h / (q_heads / kv_heads) */
    int32_t kv_heads;
    int32_t k_dim; /* width of a key (and query) head */
    int32_t v_dim; /* width of a value (and output) head */
    int32_t v_in_k;
    cpa_dtype dtype;      /* dtype of queries, new keys and values, and results */
    cpa_dtype kv_dtype;   /* dtype of the cache */
    cpa_kv_layout layout; /* layout of the cache, where the library lays it out */
    float k_scale, v_scale;
    const float *k_scales, *v_scales; /* NULL, or device: see above */
    int32_t n_scales;                 /* scales in k_scales and in v_scales; 0: none */
    int32_t reserved[1];
} cpa_attention_shape;

/* Bytes of one token in all heads, in `dtype`: its queries, its new keys, its new values, its result. */
CPA_INLINE int64_t cpa_shape_q_bytes(const cpa_attention_shape *shape) {
    return (int64_t)shape->q_heads * shape->k_dim * cpa_dtype_bytes(shape->dtype);
}
CPA_INLINE int64_t cpa_shape_k_bytes(const cpa_attention_shape *shape) {
    return (int64_t)shape->kv_heads * shape->k_dim * cpa_dtype_bytes(shape->dtype);
}
CPA_INLINE int64_t cpa_shape_v_bytes(const cpa_attention_shape *shape) {
    return (int64_t)shape->kv_heads * shape->v_dim * cpa_dtype_bytes(shape->dtype);
}
CPA_INLINE int64_t cpa_shape_out_bytes(const cpa_attention_shape *shape) {
    return (int64_t)shape->q_heads * shape->v_dim * cpa_dtype_bytes(shape->dtype);
}

/* Bytes of the row of one token and head in the cache, without the scales behind the rows of its block. */
CPA_INLINE int64_t cpa_shape_row_bytes(const cpa_attention_shape *shape, cpa_kv_part part) {
    return cpa_kv_row_bytes(shape->kv_dtype, part, part == CPA_KEYS ? shape->k_dim : shape->v_dim);
}

/* What tells whether rows have scales of their own: not 0 where the tensor, or each head, has one. */
CPA_INLINE float cpa_shape_tensor_scale(const cpa_attention_shape *shape, cpa_kv_part part) {
    return shape->k_scales ? 1 : part == CPA_KEYS || shape->v_in_k ? shape->k_scale : shape->v_scale;
}

/* Bytes of one block of keys, or of values, of a layer; 0 where the values lie in the keys. */
CPA_INLINE int64_t cpa_shape_block_bytes(const cpa_attention_shape *shape, cpa_kv_part part, int32_t block_size) {
    if (part == CPA_VALUES && shape->v_in_k) return 0;
    return cpa_kv_block_bytes(shape->kv_dtype, part, cpa_shape_tensor_scale(shape, part), block_size, shape->kv_heads,
                              part == CPA_KEYS ? shape->k_dim : shape->v_dim);
}

#ifdef __cplusplus
}
#endif
#endif
