/* Attention of each row over keys of its own that a list names by their slots in a cache, as an indexer or an earlier
 * top-k has chosen them (sparse attention of DeepSeek-V3.2, arXiv:2512.02556; selected keys of grouped heads). Lists of
 * indices in a sequence, with its block table, are a selection of cpa_attend (cpattn/selection.h).
 *
 * Pointers lie on the stream's device unless a comment says host. Structs, errors and streams are as in cpattn/ops.h. */
#ifndef CPATTN_SPARSE_H
#define CPATTN_SPARSE_H

#include <cpattn/device.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A cache, and which of its tokens each row attends. The list of row r and KV head h is
 *
 *     slots[r * row_stride + h * head_stride + i],   0 <= i < counts[r]
 *
 * in any order. An entry e stands for the `unit` tokens from slot e * unit on, slots being block * block_size + offset.
 * One that is negative, and slots past the pool, are no key; nothing is read there, nor of the list behind its count.
 * What occurs twice counts twice. Blocks of lengths that are no powers of two are read as blocks of one token: slots
 * then count rows, k_block_stride and v_block_stride elements apart, those between blocks included. */
typedef struct cpa_sparse_scope {
    cpa_kv_view kv;
    const int32_t *slots;
    int64_t row_stride;    /* elements; 0: all rows have the same lists */
    int64_t head_stride;   /* from KV head to KV head; 0: all have the same */
    const int32_t *counts; /* [rows], at most `width`; negative counts as 0; NULL: `width` */
    int32_t width;         /* the most entries of a list */
    int32_t unit;          /* tokens, a power of two of at most a block unless blocks have one; 0 = 1 */
    int64_t reserved[4];   /* zero */
} cpa_sparse_scope;

enum { CPA_SPARSE_MOST_SCOPES = 2 }; /* of a call */

/* sparse_attend (known elsewhere as flash_mla_sparse_fwd, sparse MLA decode): softmax(scale * Q K^T) V of each row over
 * the keys of its lists in all scopes, the union counted as said, with its LSE. Two scopes are two caches, of a
 * compressed and a sliding window, say; they agree in KV heads and widths. With v_in_k values are the first v_dim
 * elements of keys. resume, state, out, scores that are no numbers and rows without a key (O = 0, LSE = -inf) are as in
 * cpa_attend. Values of keys in no list weigh exactly nothing, whatever they hold.
 *
 * sink_logits are as in cpattn/score.h: they count in `out` alone. max_logits is the largest scaled score of the keys of
 * this call, -inf without any.
 *
 * On the host the result of a row has the same bits whatever other rows there are and whatever the threads; it depends
 * on the order of its list. On a CUDA device bf16 and fp16 run on tensor cores, aligned as cpa_attend asks for: latents
 * of 576 and 512 columns in q_dtype, CPA_FP8_T128 and CPA_FP8_E4M3 of one scale on compute capability 9.0, the scopes
 * alike; heads of up to 256 columns in q_dtype, multiples of 16, in groups of up to 16 from 8.0 on, in one scope. All
 * else is computed by the plain kernel. A call enqueues one kernel and may be captured in a graph. */
typedef struct cpa_sparse_attend_args {
    size_t size;
    int64_t rows;
    int32_t q_heads;
    cpa_dtype q_dtype;
    const void *q;                  /* [rows, q_heads, k_dim] */
    int64_t q_row_stride;           /* elements; 0 = q_heads * k_dim */
    const cpa_sparse_scope *scopes; /* host [n_scopes] */
    int32_t n_scopes;               /* 1 or 2 */
    float scale;                    /* 0 = 1 / sqrt(k_dim); not over latents */
    cpa_partial state;
    void *out;                /* [rows, q_heads, v_dim], q_dtype; or NULL: a state is wanted */
    int64_t out_row_stride;   /* elements; 0 = q_heads * v_dim */
    int32_t resume;           /* 1: goes on from the state */
    const float *sink_logits; /* [q_heads], or NULL */
    float *max_logits;        /* [rows, q_heads], contiguous, or NULL */
} cpa_sparse_attend_args;
CPA_API cpa_status cpa_sparse_attend(const cpa_sparse_attend_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
