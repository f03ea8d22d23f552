/* Operators of an indexer, which tells for each query the keys that are worth attending (DeepSeek-AI, DeepSeek-V3.2,
 * arXiv:2512.02556): few narrow heads of queries over one narrow key a token, the score of a key being
 *
 *     L[i, j] = sum over heads h of max(q_ih . k_j, 0) * w_ih * s_j
 *
 * with weights w of queries and, where keys are codes, their scales s. Pointers lie on the stream's device unless a
 * comment says host. Structs, errors and streams are as in cpattn/ops.h.
 *
 * How keys and queries are made of a model's rows, in fp32, each operation rounded by itself, so that all devices have
 * the same bits, with n for their width:
 *
 *     norm      LayerNorm (Ba et al., arXiv:1607.06450), y = (x - m) * (1 / sqrt(v + eps)) * gamma + beta, m the sum of
 *               x over n, and v that of (x - m)^2; a sum folds the second half of 2^k elements, 0 beyond n, onto the
 *               first, until one is left
 *     rotation  cpa_rope of cpattn/nn.h, each product rounded before it is added; NaN outside of the table
 *     bf16      rounded to nearest even; not where keys and queries are fp32
 *     Hadamard  H x n^-0.5 with H in Sylvester's order, n a power of two; sums are those of neighbours, of pairs of
 *               neighbours and so on; then bf16 once more. It changes no product of a query and a key, but spreads
 *               what codes would lose: both have it, or neither
 *     codes     e4m3 of x / s, s = max(max |x|, floor) / 448, rounded up to a power of two where that is asked for;
 *               what is no number is 0 and takes no part in s */
#ifndef CPATTN_INDEXER_H
#define CPATTN_INDEXER_H

#include <cpattn/nn.h>
#include <cpattn/ops.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Widths are multiples of 8. */
enum { CPA_INDEX_MOST_DIM = 256, CPA_INDEX_MOST_HEADS = 128, CPA_INDEX_MOST_UNIT = 16 };

/* The index keys of a layer: a cache of one KV head whose keys are all there is (v_in_k is 1, v_dim is k_dim), so that
 * what copies, swaps, moves and packs a cache does the same to it. Its dtype is CPA_FP8_E4M3, each row with its own
 * scale: a block is [block_size, dim] codes and behind them [block_size] fp32 scales; or CPA_BF16, or CPA_F32, which
 * devices compare without tensor cores. Rows are in one
 * piece, not CPA_VLLM_X. `hadamard` says that its rows have been transformed. */
typedef struct cpa_index_cache {
    cpa_kv_view kv;
    int32_t hadamard;     /* 0 or 1 */
    int32_t reserved[15]; /* zero */
} cpa_index_cache;

/* index_write: index keys of new tokens to their slots: normed, rotated, transformed where the cache is, and rounded to
 * bf16, or from there to codes. Slots are those of cpa_kv_write, but any that is negative skips its token. */
typedef struct cpa_index_write_args {
    size_t size;
    int64_t tokens;
    cpa_dtype dtype;             /* dtype of k: fp32, bf16 or fp16 */
    const void *k;               /* [tokens, dim], dim the k_dim of the cache */
    int64_t k_row_stride;        /* elements; 0: contiguous */
    const float *gamma, *beta;   /* [dim]; both NULL: no norm */
    float eps;                   /* of the norm */
    cpa_rope rope;               /* rope.table NULL: nothing is rotated */
    const int64_t *positions;    /* [tokens], or [3, tokens] with sections; NULL where nothing is rotated */
    const int64_t *slot_mapping; /* [tokens] */
    cpa_index_cache cache;       /* with codes: k_scale is 0 and k_scales NULL */
    float floor;                 /* of codes; 0: 1e-4 */
    int32_t scales_pow2;         /* of codes; 1: scales are rounded up to powers of two */
} cpa_index_write_args;
CPA_API cpa_status cpa_index_write(const cpa_index_write_args *args, cpa_stream *stream);

/* What index_q makes of queries:
 *
 *     FP8    codes of e4m3, whose scales, powers of two, go into the weights
 *     BF16   bf16
 *     F32    fp32, that is not rounded to bf16 before either
 *     MXFP4  codes of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two in a byte, that of the even element in
 *            the low half; 32 of them share s = max(max |x|, 6 * 2^-126) / 6, rounded up to a power of two, of which
 *            the exponent plus 127 is stored (Open Compute Project, Microscaling formats v1.0). For products that are
 *            made elsewhere: index_logits takes none */
typedef enum cpa_index_format {
    CPA_INDEX_FP8 = 0,
    CPA_INDEX_BF16,
    CPA_INDEX_MXFP4,
    CPA_INDEX_F32,
    CPA_INDEX_FORMAT_COUNT
} cpa_index_format;

/* index_q: queries of an indexer, rotated, transformed and rounded to bf16, and from there to a format; and weights_out =
 * w * s * softmax_scale * head_scale, multiplied in that order, s being the scale of FP8, else 1. */
typedef struct cpa_index_q_args {
    size_t size;
    int64_t tokens;
    int32_t heads, dim;
    cpa_dtype dtype;      /* dtype of q: fp32, bf16 or fp16 */
    const void *q;        /* [tokens, heads, dim] */
    int64_t q_row_stride; /* elements from token to token; 0: contiguous */
    cpa_rope rope;
    const int64_t *positions; /* as of index_write */
    int32_t hadamard;         /* 0 or 1: what the keys have */
    cpa_index_format format;
    void *out;           /* [tokens, heads, dim], of MXFP4 [tokens, heads, dim / 2]; contiguous */
    const void *weights; /* [tokens, heads]; NULL: the indexer has none; not with codes */
    cpa_dtype weight_dtype;
    int64_t weight_row_stride;       /* elements; 0: contiguous */
    float *weights_out;              /* [tokens, heads], contiguous; NULL where there are no weights */
    float softmax_scale, head_scale; /* 0: dim^-0.5 and heads^-0.5 */
    float floor;                     /* of FP8; 0: 1e-4 */
    uint8_t *scales;                 /* of MXFP4: [tokens, heads, dim / 32], contiguous; else NULL */
} cpa_index_q_args;
CPA_API cpa_status cpa_index_q(const cpa_index_q_args *args, cpa_stream *stream);

/* Which rows of queries meet which keys: the items of a cpa_attend_batch, set once a step and used for every layer. Of
 * the batch the map, block_size, items and tables bind; its shape is checked as that of the attention which follows.
 * The row of an item at position p sees the keys of its set that stand for tokens up to p: with tokens_per_key = 1 those
 * at positions up to p; with more, key m stands for the tokens [m * tokens_per_key, (m + 1) * tokens_per_key), is there
 * once the last of them is, and has its place in the set by the map whose runs are interleave / tokens_per_key keys,
 * which has to divide. Then k_first and k_count count keys.
 *
 * Setting a plan copies items and tables, and on a device waits until they are there, unless it is reserved; not in
 * a capture, and not while work that uses it is in flight. With block_tables_on_device the tables are read there by
 * each call. Used by one thread at a time; calls that use it may be enqueued on any streams. */
typedef struct cpa_index_plan cpa_index_plan;
CPA_API cpa_status cpa_index_plan_create(cpa_device *device, cpa_index_plan **out, cpa_error *err);
CPA_API cpa_status cpa_index_plan_set(cpa_index_plan *plan, const cpa_attend_batch *batch, int32_t tokens_per_key,
                                      cpa_error *err);
CPA_API void cpa_index_plan_destroy(cpa_index_plan *plan);

/* Plans for graphs: a reserved plan has memory for all that its limits allow, and what index_logits enqueues of it
 * depends on the limits alone, not on its items, so that a graph of it can be launched again for others. The map,
 * block_size, tokens_per_key and tables on the device are then those of the setting that was captured. Results have
 * the bits of a plan that is not reserved. */
typedef struct cpa_index_limits {
    size_t size;
    int64_t items;         /* most items that have rows; at least 1 */
    int64_t item_rows;     /* most rows of one; at least 1 */
    int64_t rows;          /* most rows of all, and the end of the rows: what q, weights and logits have room for */
    int64_t keys;          /* most keys of an item, up to 2^30 */
    int64_t table_entries; /* most entries of tables on the host; 0: they lie on the device */
} cpa_index_limits;

/* Reserves a plan, which is to be set then, by cpa_index_plan_set as ever: what is beyond the limits is refused. On
 * a device setting it waits for nothing, and cpa_index_plan_upload enqueues a copy of fixed size that makes what
 * comes behind it on the stream that of the setting; a plan may be set while work of its last setting is in flight,
 * once that of the setting before is done. On the host a setting counts at once, and an upload does nothing. A plan
 * may be reserved anew while no work of it is in flight; graphs of it are launched no more then. Allocates; not in a
 * capture. */
CPA_API cpa_status cpa_index_plan_reserve(cpa_index_plan *plan, const cpa_index_limits *limits, cpa_error *err);
CPA_API cpa_status cpa_index_plan_upload(const cpa_index_plan *plan, cpa_stream *stream);

/* index_logits (known elsewhere as fp8_mqa_logits, fp8_paged_mqa_logits): L for each row of each item of the plan.
 * Column j of a row is the j-th key of its item, the one at local index k_first + j; or with unit > 1 the largest L of
 * the keys [j * unit, (j + 1) * unit) that the row sees. Columns without a key that the row sees, as far as `width`, are
 * -inf. Rows of no item, and what lies beyond `width`, are left alone. A product that is no number counts as 0. No
 * other keys than those of the item count, but of a block that has some of them all may be read. Sums are fp32; on the
 * host they have the same bits in any batch, on a device whenever they are repeated. With unit = 1 the result is exact
 * to fp32's rounding of sums over dim and heads; tensor cores of compute capability 9.0 keep fewer bits of sums of
 * codes, and are within 5e-6 of 1 - 2 <x, y> / (|x|^2 + |y|^2). */
typedef struct cpa_index_logits_args {
    size_t size;
    int32_t heads;
    const void *q;             /* [rows, heads, dim] in the dtype of the cache */
    int64_t q_row_stride;      /* elements; 0: contiguous */
    const float *weights;      /* [rows, heads]; NULL: all are 1; not with codes */
    int64_t weight_row_stride; /* elements; 0: contiguous */
    int32_t hadamard;          /* what index_q was told: has to be that of the cache */
    cpa_index_cache cache;     /* codes with k_scale: all keys have that scale */
    float *logits;             /* [rows, width] */
    int64_t width;
    int64_t row_stride; /* elements; 0: width */
    int32_t unit;       /* a power of two up to CPA_INDEX_MOST_UNIT; 0: 1 */
    /* NULL, or [num_blocks * block_size]: keys lie in a tensor, which the cache describes as blocks without scales
     * (k_scale 1), and the scales of its rows apart, that of a slot in its place. With CPA_FP8_E4M3 alone. */
    const float *k_scales;
} cpa_index_logits_args;
CPA_API cpa_status cpa_index_logits(const cpa_index_plan *plan, const cpa_index_logits_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
