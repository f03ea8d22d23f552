/* Attention without a cache: queries, keys and values of many segments lie one behind the other in tensors, as encoders
 * of images and sound, and decoders that read what these give, have them (known elsewhere as varlen attention).
 *
 * For row i of a segment of n_q queries and n_k keys, whose index among the keys is p = i + n_k - n_q (aligned bottom
 * right: the last row sees the last key),
 *
 *     s_j = scale * (q_i . k_j)
 *     s_j = softcap * tanh(s_j / softcap)      if softcap > 0
 *     s_j = -inf                               where the row does not see key j
 *     LSE = ln sum_j exp(s_j),  O = sum_j exp(s_j - LSE) v_j
 *
 * and it sees the keys j of its own segment with j <= p if causal, p - j < left if left > 0, and j - p < right if
 * right > 0. A row that sees none, as in a segment without keys, has O = 0 and LSE = -inf.
 *
 * Nothing is kept after a call. Conventions are those of cpattn/ops.h. */
#ifndef CPATTN_VARLEN_H
#define CPATTN_VARLEN_H

#include <cpattn/ops.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The segments of a batch, the same for every layer: segment s has the rows [q_starts[s], q_starts[s + 1]) of q and the
 * rows [k_starts[s], k_starts[s + 1]) of k and v. Starts ascend from 0 or more; segments may be empty. At most 2^30
 * rows of keys. */
typedef struct cpa_varlen_batch {
    size_t size;
    int32_t q_heads, kv_heads; /* query head h reads KV head h / (q_heads / kv_heads) */
    int32_t k_dim, v_dim;      /* 1 to CPA_MAX_HEAD_DIM each */
    int64_t n_segments;
    const int64_t *q_starts, *k_starts; /* host [n_segments + 1]; k_starts NULL: those of q */
    int32_t causal;                     /* 1: attends will be causal. How work is dealt; any attend gives its result */
} cpa_varlen_batch;

/* Makes a plan of cpa_attend_plan_create that of these segments, for cpa_varlen_attend alone, until it is set again;
 * what cpattn/ops.h says of cpa_attend_plan_set holds here too. The starts are copied. */
CPA_API cpa_status cpa_varlen_plan_set(cpa_attend_plan *plan, const cpa_varlen_batch *batch, cpa_error *err);

/* Attends every row of every segment of the plan. Rows in no segment are left alone, and keys and values in none may
 * hold anything. `resume`, `state` and `out` are as in cpa_attend, and so are results that are not finite; of rows of
 * keys, no more is read than up to the last k_starts.
 *
 * On a CUDA device bf16 and fp16 run on tensor cores where q, k, v, out and state.o are aligned to 16 bytes, dims and
 * row strides are multiples of 8 elements (4 of state.o) and scale is positive; all else is computed by plain, slower
 * kernels. On the host the result of a row has the same bits whatever other segments the batch has. */
typedef struct cpa_varlen_attend_args {
    size_t size;
    cpa_dtype dtype; /* of q, k, v and out */
    const void *q;   /* [rows of q, q_heads, k_dim] */
    const void *k;   /* [rows of k, kv_heads, k_dim] */
    const void *v;   /* [rows of k, kv_heads, v_dim] */
    int64_t
        q_row_stride; /* elements, so that q, k and v may be parts of the rows of one tensor; 0: rows are contiguous */
    int64_t k_row_stride, v_row_stride;
    int32_t causal;
    int64_t left, right; /* 0: no bound on that side */
    float scale;         /* 0 = 1 / sqrt(k_dim) */
    int32_t resume;
    cpa_partial state;
    void *out; /* [rows of q, q_heads, v_dim] contiguous, or NULL */
} cpa_varlen_attend_args;
CPA_API cpa_status cpa_varlen_attend(const cpa_attend_plan *plan, const cpa_varlen_attend_args *args,
                                     cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
