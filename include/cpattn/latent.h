/* Operators on rows of latents (multi-head latent attention: DeepSeek-AI, arXiv:2405.04434), beside those of cpattn/ops.h
 * that take a cache with v_in_k: a row is a latent c of latent_dim elements and, behind it, the rope_dim rotated
 * elements r that all heads share.
 *
 * With the up-projections folded into queries and results, cpa_attend attends such rows as they lie: one KV head, k_dim
 * = latent_dim + rope_dim, v_dim = latent_dim. Expanded, head h has the key [W_UK_h c, r] and the value W_UV_h c.
 *
 * Pointers lie on the stream's device unless a comment says host. Structs, errors and streams are as in cpattn/ops.h. */
#ifndef CPATTN_LATENT_H
#define CPATTN_LATENT_H

#include <cpattn/device.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* latent_gather (known elsewhere as gather_and_maybe_dequant_cache, cp_gather_cache): rows of paged sequences into rows
 * of a tensor: each element, or the fp32 product of a code and its scale, is rounded once to dst_dtype, NaN staying NaN;
 * or with `raw` the bytes of the rows go as they are. To bf16 rows become what attend reads. Rows of
 * dst that no span names are left as they were. */
typedef struct cpa_latent_gather_args {
    size_t size;
    cpa_kv_view src;             /* v_in_k = 1, one KV head */
    const int32_t *block_tables; /* [n_table_entries], host */
    int64_t n_table_entries;
    const cpa_kv_span *spans; /* [n_spans], host */
    int64_t n_spans;
    void *dst; /* [dst_rows, k_dim] of dst_dtype, or [dst_rows, bytes of a row]; does not overlap src */
    int64_t dst_rows;
    int64_t dst_row_stride; /* elements, or bytes with raw; 0: contiguous */
    cpa_dtype dst_dtype;    /* fp32, bf16 or fp16; not looked at with raw */
    int32_t raw;            /* 1: bytes, of a cache whose rows have no scales behind those of their block */
} cpa_latent_gather_args;
CPA_API cpa_status cpa_latent_gather(const cpa_latent_gather_args *args, cpa_stream *stream);

/* latent_expand: the keys and values of all heads from rows of latents, k_h = [W_kv_b[h, 0..nope_dim) c, r] and v_h =
 * W_kv_b[h, nope_dim..nope_dim + v_dim) c, summed in fp32 and rounded once; r keeps its bits. The row of a token does
 * not depend on those beside it; on the host it has the same bits in any call. CUDA devices need cuBLASLt
 * (CPA_UNSUPPORTED without it); the first call on a stream allocates what that needs and must not be captured. */
typedef struct cpa_latent_expand_args {
    size_t size;
    int64_t tokens;
    cpa_dtype dtype;              /* fp32, bf16 or fp16: dtype of all tensors */
    int32_t latent_dim, rope_dim; /* rope_dim may be 0 */
    int32_t heads;                /* a model's, or a slice of them */
    int32_t nope_dim, v_dim;      /* widths of a head's keys without their rotated part, and of its values */
    const void *latents;          /* [tokens, latent_dim + rope_dim] */
    int64_t latent_row_stride;    /* elements; 0: contiguous */
    const void *w_kv_b;           /* [heads, nope_dim + v_dim, latent_dim], contiguous */
    void *k;                      /* [tokens, heads, nope_dim + rope_dim]; overlaps nothing that is read */
    int64_t k_row_stride;         /* elements; 0: contiguous */
    void *v;                      /* [tokens, heads, v_dim]; overlaps nothing that is read */
    int64_t v_row_stride;         /* elements; 0: contiguous */
} cpa_latent_expand_args;
CPA_API cpa_status cpa_latent_expand(const cpa_latent_expand_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
