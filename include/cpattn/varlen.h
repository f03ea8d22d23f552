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

#include <cpattn/comm.h>
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
    const int64_t *q_starts, *k_starts; /* host [n_segments + 1]; k_starts NULL: as q_starts, and
                                           k_counts as q_counts */
    int32_t causal;                     /* 1: attends will be causal. How work is dealt; any attend gives its result */
    /* host [n_segments] or NULL: rows of each segment, from its start on, where it does not go on to the next start */
    const int64_t *q_counts, *k_counts;
} cpa_varlen_batch;

/* Makes a plan of cpa_attend_plan_create that of these segments, for cpa_varlen_attend alone, until it is set again;
 * what cpattn/ops.h says of cpa_attend_plan_set holds here too. The starts are copied. */
CPA_API cpa_status cpa_varlen_plan_set(cpa_attend_plan *plan, const cpa_varlen_batch *batch, cpa_error *err);

/* Attends every row of every segment of the plan. Rows in no segment are left alone, and keys and values in none may
 * hold anything. `resume`, `state` and `out` are as in cpa_attend, and so are results that are not finite; nothing is
 * read past the last row of queries and of keys that a segment has.
 *
 * On a CUDA device bf16 and fp16 run on tensor cores where q, k, v, out and state.o are aligned to 16 bytes, dims and
 * strides are multiples of 8 elements (4 of state.o) and scale is positive; all else is computed by plain, slower
 * kernels. On the host the result of a row has the same bits whatever other segments the batch has. */
typedef struct cpa_varlen_attend_args {
    size_t size;
    cpa_dtype dtype; /* dtype of q, k, v and out */
    const void *q;   /* [rows of q, q_heads, k_dim] */
    const void *k;   /* [rows of k, kv_heads, k_dim] */
    const void *v;   /* [rows of k, kv_heads, v_dim] */
    int64_t
        q_row_stride; /* elements, so that q, k and v may be parts of the rows of one tensor; 0: rows are contiguous */
    int64_t k_row_stride, v_row_stride;
    int32_t causal;
    int64_t left, right; /* 0: no bound on that side */
    float scale;         /* 0 = 1 / sqrt(k_dim) */
    float softcap;       /* a rule of cpattn/score.h, for devices whose attend takes it; 0: none */
    int32_t resume;
    cpa_partial state;
    void *out; /* [rows of q, q_heads, v_dim], or NULL */
    /* Elements from head to head, and from row to row of out; 0: dense, as in cpa_attend, whose rules hold. Contiguous
     * tensors [batch, heads, tokens, dim] are rows of dim elements with heads tokens * dim apart: segment b starts at
     * row b * heads * tokens and has `tokens` rows (q_counts, k_counts), heads being those of each tensor. */
    int64_t q_head_stride, k_head_stride, v_head_stride;
    int64_t out_row_stride, out_head_stride;
    int64_t lse_head_stride; /* as in cpa_attend */
} cpa_varlen_attend_args;
CPA_API cpa_status cpa_varlen_attend(const cpa_attend_plan *plan, const cpa_varlen_attend_args *args,
                                     cpa_stream *stream);

/* Segments over ranks. Each is attended whole on one rank, without an exchange, or cut: rank r of n then has its rows
 * [cpa_slice_begin(length, n, r), cpa_slice_begin(length, n, r + 1)) of queries, and so many of keys and values, which
 * all ranks get from each other. */
#define CPA_VARLEN_CUT (-1)

typedef struct cpa_varlen_deal_args {
    size_t size;
    int32_t ranks;
    cpa_dtype dtype;  /* of keys and values on their way */
    double flops;     /* FLOP/s of attention on one rank, and */
    double bandwidth; /* bytes/s that it receives; one of them 0: nothing is cut */
} cpa_varlen_deal_args;

/* Deals the segments: owners[s] becomes the rank of segment s, or CPA_VARLEN_CUT. The longest goes first, each to the
 * rank that has least to do then (longest processing time, Graham, doi:10.1137/0117039), and as many of the longest are
 * cut as end the work of all ranks soonest, if the exchange of those is hidden by nothing. The same on every rank that
 * is given the same numbers. Pure; thread-safe. */
CPA_API cpa_status cpa_varlen_deal(const cpa_varlen_batch *batch, const cpa_varlen_deal_args *args,
                                   int32_t *owners /* [n_segments] */, cpa_error *err);

/* What a rank has of a segment, counted from the segment's first row. */
typedef struct cpa_varlen_part {
    int64_t q_first, q_count, k_first, k_count;
} cpa_varlen_part;
CPA_INLINE cpa_varlen_part cpa_varlen_part_of(const cpa_varlen_batch *batch, int32_t owner, int64_t segment,
                                              int32_t ranks, int32_t rank) {
    const int64_t *k_starts = batch->k_starts ? batch->k_starts : batch->q_starts;
    const int64_t *k_counts = batch->k_counts || batch->k_starts ? batch->k_counts : batch->q_counts;
    const int64_t rows =
        batch->q_counts ? batch->q_counts[segment] : batch->q_starts[segment + 1] - batch->q_starts[segment];
    const int64_t keys = k_counts ? k_counts[segment] : k_starts[segment + 1] - k_starts[segment];
    cpa_varlen_part part = {0, 0, 0, 0};
    if (owner == CPA_VARLEN_CUT) {
        part.q_first = cpa_slice_begin(rows, ranks, rank);
        part.q_count = cpa_slice_begin(rows, ranks, rank + 1) - part.q_first;
        part.k_first = cpa_slice_begin(keys, ranks, rank);
        part.k_count = cpa_slice_begin(keys, ranks, rank + 1) - part.k_first;
    } else if (owner == rank) {
        part.q_count = rows;
        part.k_count = keys;
    }
    return part;
}

typedef struct cpa_varlen_context cpa_varlen_context;

typedef struct cpa_varlen_context_options {
    size_t size;
    int32_t q_heads, kv_heads, k_dim, v_dim;
    cpa_dtype dtype;
} cpa_varlen_context_options;

/* Collective over `comm`, with the same options on every rank; as for cpa_context_create, `comm` and `device` outlive
 * the context, which is used by the thread of its communicator. *out is set only on success. */
CPA_API cpa_status cpa_varlen_context_create(cpa_comm *comm, cpa_device *device,
                                             const cpa_varlen_context_options *options, cpa_varlen_context **out,
                                             cpa_error *err);
/* Collective. NULL does nothing. */
CPA_API void cpa_varlen_context_destroy(cpa_varlen_context *context);

/* Plans a batch with its owners, as cpa_varlen_deal gives them or the caller likes; heads and widths are those of the
 * context. Collective: every rank gives the same, or all get CPA_INVALID. What was enqueued before must be done. Memory
 * grows to the keys and values of all segments that are cut. */
CPA_API cpa_status cpa_varlen_context_plan(cpa_varlen_context *context, const cpa_varlen_batch *batch,
                                           const int32_t *owners /* [n_segments] */);

/* Attends a layer of the planned batch. The rows of q, of out and of state.lse, which may be NULL, are this rank's: its
 * parts of the segments one behind the other, in their order; those of k and v likewise. resume is 0 and state.o NULL,
 * and heads and rows of out have no strides (CPA_UNSUPPORTED).
 * Collective if segments are cut, with the same mask, scale and order of layers on every rank. Segments that are cut
 * travel while whole ones are attended. On the host a row has the bits that it has on one rank. */
CPA_API cpa_status cpa_varlen_context_attend(cpa_varlen_context *context, const cpa_varlen_attend_args *args,
                                             cpa_stream *stream);

/* The message of the last call that failed on this context; empty if none did, or for NULL. Owned by the context. */
CPA_API const char *cpa_varlen_context_error(const cpa_varlen_context *context);

#ifdef __cplusplus
}
#endif
#endif
