/* XAttention (Xu et al., arXiv:2503.16428): which blocks of keys the queries of a prompt are worth attending, estimated
 * from sums of the scores along antidiagonals, by chunks of queries and of keys.
 *
 * A group is `stride` tokens, S; a block of the mask is `block` tokens, so many whole groups. With group i of queries of
 * a head, group j of keys of its KV head, counted in the sequence, and tokens past its end as zeros,
 *
 *     z(i, j) = scale * sum over s < S of q[i S + S - 1 - s] . k[j S + s]
 *     p(i, .) = softmax of z(i, .) over the groups j that have a token and, if causal, j <= i
 *     A[I, J] = sum of p(i, j) over the groups i of block I of queries and j of block J of keys
 *
 * and a row I of blocks keeps those blocks J that make up the share tau of its A, the largest first (xattn_select).
 *
 * The stages, each enqueued for a chunk of queries and one of keys of a sequence:
 *
 *     xattn_pack_q, xattn_pack_k   rows of groups, out of a tensor and out of the pages of a cache
 *     xattn_stats                  maximum and sum of the softmax of each group of queries, chunk after chunk of keys
 *     xattn_merge_stats            those of chunks, or shards, that were made apart
 *     xattn_block_sums             A of the blocks of a chunk, once the statistics are those of all keys
 *     xattn_select                 the bits of the blocks that are kept (cpa_key_blocks of cpattn/selection.h)
 *
 * Nothing of the size of queries times keys is stored but A. Chunks begin at multiples of the block and end there or at
 * the end of what the sequence has; the mask does not depend on them. Under context parallelism the interleave is a
 * multiple of the block, so that groups and blocks never straddle ranks.
 *
 * Pointers lie on the stream's device. Structs, errors and streams are as in cpattn/ops.h. Sums are fp32. On the host
 * results have the same bits however queries and keys are cut, with resumed statistics; on a device whenever they are
 * repeated, and up to the rounding of sums otherwise. On compute capability 9.0 bf16 and fp16 run on tensor cores, with
 * blocks of 8, 16 or 32 groups, whose z is within 3e-5 (1 + |z|); all else is computed by plain kernels. */
#ifndef CPATTN_XATTN_H
#define CPATTN_XATTN_H

#include <cpattn/device.h>
#include <cpattn/owner_map.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CPA_XATTN_MOST_STRIDE = 16,
    CPA_XATTN_MOST_BLOCK = 128,
    CPA_XATTN_MOST_GROUPS = 32, /* of a block */
    CPA_XATTN_MOST_DIM = 256
};
/* The most blocks of keys of a row that xattn_select takes. */
#define CPA_XATTN_MOST_BLOCKS 16384

/* What is estimated. Embedded by value; what is reserved is 0. */
typedef struct cpa_xattn_shape {
    int32_t
        stride; /* tokens of a group, up to CPA_XATTN_MOST_STRIDE; the block is up to CPA_XATTN_MOST_GROUPS of them */
    int32_t block; /* tokens of a block, up to CPA_XATTN_MOST_BLOCK; 0 = 128 */
    int32_t q_heads, kv_heads;
    int32_t dim;     /* of a head, a multiple of 8 */
    cpa_dtype dtype; /* of groups: fp32, bf16 or fp16 */
    int32_t causal;  /* 0 or 1 */
    float scale;     /* 0: 1 / (sqrt(dim) * stride) */
    int32_t reserved[8];
} cpa_xattn_shape;

/* Groups and blocks that so many tokens have, and elements of a group. */
CPA_INLINE int64_t cpa_xattn_groups(const cpa_xattn_shape *shape, int64_t tokens) {
    return (tokens + shape->stride - 1) / shape->stride;
}
CPA_INLINE int64_t cpa_xattn_blocks(const cpa_xattn_shape *shape, int64_t tokens) {
    const int32_t block = shape->block ? shape->block : CPA_XATTN_MOST_BLOCK;
    return (tokens + block - 1) / block;
}
CPA_INLINE int64_t cpa_xattn_width(const cpa_xattn_shape *shape) {
    return (int64_t)shape->stride * shape->dim;
}

/* Bytes of the packed groups of so many heads; of the statistics of a chunk of queries, both arrays; of the A of a chunk
 * of queries and one of keys; and of the scores, which only xattn_scores stores. */
CPA_INLINE int64_t cpa_xattn_packed_bytes(const cpa_xattn_shape *shape, int32_t heads, int64_t tokens) {
    return heads * cpa_xattn_groups(shape, tokens) * cpa_xattn_width(shape) * cpa_dtype_bytes(shape->dtype);
}
CPA_INLINE int64_t cpa_xattn_stats_bytes(const cpa_xattn_shape *shape, int64_t q_tokens) {
    return 2 * (int64_t)sizeof(float) * shape->q_heads * cpa_xattn_groups(shape, q_tokens);
}
CPA_INLINE int64_t cpa_xattn_sums_bytes(const cpa_xattn_shape *shape, int64_t q_tokens, int64_t k_tokens) {
    return (int64_t)sizeof(float) * shape->q_heads * cpa_xattn_blocks(shape, q_tokens) *
           cpa_xattn_blocks(shape, k_tokens);
}
CPA_INLINE int64_t cpa_xattn_scores_bytes(const cpa_xattn_shape *shape, int64_t q_tokens, int64_t k_tokens) {
    return (int64_t)sizeof(float) * shape->q_heads * cpa_xattn_groups(shape, q_tokens) *
           cpa_xattn_groups(shape, k_tokens);
}

/* xattn_pack_q: the groups of queries as rows, the tokens of a group in descending order, zeros for those that the last
 * one lacks: element (S - 1 - s) * dim + d of row i is d of token i S + s. */
typedef struct cpa_xattn_pack_q_args {
    size_t size;
    cpa_xattn_shape shape;
    int64_t tokens;
    const void *q;         /* [tokens, q_heads, dim], shape.dtype */
    int64_t q_row_stride;  /* elements; 0 = q_heads * dim */
    int64_t q_head_stride; /* elements; 0 = dim */
    void *out;             /* [q_heads, groups, stride * dim] */
} cpa_xattn_pack_q_args;
CPA_API cpa_status cpa_xattn_pack_q(const cpa_xattn_pack_q_args *args, cpa_stream *stream);

/* xattn_pack_k: groups of keys, the tokens of a group in ascending order, zeros for those that the last one lacks. What
 * codes stand for is rounded to shape.dtype. Values are not read, nor tokens past the last one. */
typedef struct cpa_xattn_pack_k_args {
    size_t size;
    cpa_xattn_shape shape;
    int64_t tokens;
    cpa_kv_view kv;       /* of elements, of codes of one scale a row or a head, or of CPA_TQ_; its k_dim is `dim` */
    const int32_t *table; /* [ceil(tokens / block_size)]: the blocks that the tokens lie in, from the first one on */
    void *out;            /* [kv_heads, groups, stride * dim] */
    int64_t out_stride;   /* elements from head to head; 0 = groups * stride * dim */
} cpa_xattn_pack_k_args;
CPA_API cpa_status cpa_xattn_pack_k(const cpa_xattn_pack_k_args *args, cpa_stream *stream);

/* A chunk of groups of queries, and one of groups of keys. Each is a range of local indices of a set of the sequence's
 * tokens, as of a cpa_attend_item, that begins at a multiple of the block. */
typedef struct cpa_xattn_chunks {
    cpa_owner_map map;
    cpa_token_set q_set, k_set;
    int64_t q_first, k_first;   /* local indices of the first tokens */
    int64_t q_tokens, k_tokens; /* tokens, and of them cpa_xattn_groups in q and k */
    const void *q;              /* [q_heads, groups, stride * dim], as packed */
    const void *k;              /* [kv_heads, groups, stride * dim], as packed */
    int64_t k_stride;           /* elements from head to head of k; 0: dense */
    int64_t reserved[4];        /* zero */
} cpa_xattn_chunks;

/* xattn_stats: of each group of queries the maximum of z over the keys of the chunk that it sees, and the sum of
 * exp(z - max). A group that sees none has -inf and 0. resume = 1 goes on from what the arrays hold: the statistics of
 * the chunks of keys before. */
typedef struct cpa_xattn_stats_args {
    size_t size;
    cpa_xattn_shape shape;
    cpa_xattn_chunks chunks;
    float *max, *sum; /* [q_heads, groups] */
    int32_t resume;
} cpa_xattn_stats_args;
CPA_API cpa_status cpa_xattn_stats(const cpa_xattn_stats_args *args, cpa_stream *stream);

/* xattn_merge_stats: statistics of the same groups over n chunks of keys, joined from the first to the last; (-inf, 0)
 * changes nothing. max and sum may be those of part 0. */
typedef struct cpa_xattn_merge_stats_args {
    size_t size;
    int64_t rows;                     /* q_heads * groups */
    int32_t n;                        /* parts, at least 1 */
    const float *part_max, *part_sum; /* [n, rows] */
    int64_t part_stride;              /* elements from part to part; 0 = rows */
    float *max, *sum;                 /* [rows] */
} cpa_xattn_merge_stats_args;
CPA_API cpa_status cpa_xattn_merge_stats(const cpa_xattn_merge_stats_args *args, cpa_stream *stream);

/* xattn_block_sums: A of the blocks of both chunks, given the statistics over all keys of the sequence; 0 for blocks
 * that no group of the row sees. */
typedef struct cpa_xattn_block_sums_args {
    size_t size;
    cpa_xattn_shape shape;
    cpa_xattn_chunks chunks;
    const float *max, *sum; /* [q_heads, groups] */
    float *sums;            /* [q_heads, q_blocks, k_blocks of the chunk] */
    int64_t row_stride;     /* elements from block row to block row; 0 = k_blocks of the chunk */
} cpa_xattn_block_sums_args;
CPA_API cpa_status cpa_xattn_block_sums(const cpa_xattn_block_sums_args *args, cpa_stream *stream);

/* xattn_scores: z itself, -inf for keys that a group of queries does not see, for tests and for work on the scores. */
typedef struct cpa_xattn_scores_args {
    size_t size;
    cpa_xattn_shape shape;
    cpa_xattn_chunks chunks;
    float *scores; /* [q_heads, q_groups, k_groups] */
} cpa_xattn_scores_args;
CPA_API cpa_status cpa_xattn_scores(const cpa_xattn_scores_args *args, cpa_stream *stream);

/* xattn_select: the blocks that each row of blocks keeps. Row I, causal: forced are block 0 and the last `recent`, at
 * least 1, up to I; none behind I is kept. The others follow by A, the largest first, of equal ones the smaller index,
 * and one is kept if the A of all before it, the forced included, is below tau times that of the row. Not causal: none is
 * forced. Sums are fp64, in that order. A row whose A is no number keeps all that it may. */
typedef struct cpa_xattn_select_args {
    size_t size;
    cpa_xattn_shape shape; /* of which block, q_heads and causal bind */
    cpa_owner_map map;
    cpa_token_set q_set;
    int64_t q_first;      /* local index of the first query, a multiple of the block */
    int64_t q_blocks;     /* block rows */
    int64_t k_blocks;     /* blocks of keys of the sequence, up to CPA_XATTN_MOST_BLOCKS */
    const float *sums;    /* A: [q_heads, q_blocks, k_blocks]; or of each shard of map those of its own blocks */
    int64_t row_stride;   /* elements from block row to block row; 0 = k_blocks */
    int64_t shard_stride; /* elements from the A of a rank to that of the next; 0 where map has one */
    int32_t first_rank;   /* the rank that has shard 0 */
    float tau;            /* above 0, at most 1 */
    const float *taus;    /* [q_heads], taken in place of tau; or NULL */
    int32_t recent;       /* causal alone */
    uint32_t *bits; /* [q_heads, q_blocks, words], heads bits_stride apart: block J is bit J mod 32 of word J / 32 */
    int64_t words;  /* of a block row; 0 = cpa_mask_words(k_blocks) */
    int64_t bits_stride; /* words from head to head; 0 = q_blocks * words */
    int32_t *counts;     /* [q_heads, q_blocks]: blocks that are kept; or NULL */
    float *kept;         /* [q_heads, q_blocks]: their share of the row's A, 1 where that is 0; or NULL */
} cpa_xattn_select_args;
CPA_API cpa_status cpa_xattn_select(const cpa_xattn_select_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
