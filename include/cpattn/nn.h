/* Operators beside attention: norms, rotary positions, activations, products and sampling. Enqueued on a stream; they
 * allocate nothing and do not synchronise.
 *
 * Tensors are on the stream's device, aligned to their elements and in the dtype that is named. Strides are from row to
 * row, in elements, 0 for contiguous rows; what is within a row is contiguous. Arithmetic is fp32 or wider, and a
 * result is rounded once, to nearest even, when it is stored. A row does not depend on what the rows beside it hold, so
 * that what a padded row holds is its own matter; on the host it has the same bits in any batch and any place of it. No
 * rows is no error. `size` is sizeof the struct. A status other than CPA_OK means that nothing was enqueued, and
 * cpa_stream_error tells why.
 *
 * `weight` is a constant: a CUDA device may read it while a kernel that was enqueued in front still runs. Synchronise
 * the stream after a kernel that writes one. */
#ifndef CPATTN_NN_H
#define CPATTN_NN_H

#include <cpattn/device.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What rmsnorm writes: rows in dtype, or codes of 8 bits and their scales, for products that take such rows.
 *
 *     FP8_STATIC  e4m3 of x / static_scale[0]
 *     FP8_TOKEN   e4m3 of x / s, s of the row: max(min(m, scale_bound[0]) / 448, 1 / (448 * 512)), without a bound
 *                 max(m / 448, 1 / (448 * 512))
 *     FP8_GROUP   e4m3 of x / s, s of each `group` elements of a row: max(m, 1e-10) / 448
 *     INT8_TOKEN  x / s, s of the row: m / 127
 *
 * where x is the norm in fp32, before any rounding to dtype, and m the largest |x| of what the scale serves; infinities
 * and NaN take no part in it. Quotients are those of fp32, rounded to nearest even; what lies beyond the range, -448 to
 * 448 or -127 to 127, saturates, infinities as well, and NaN becomes 0, as all of a row of zeros does. */
typedef enum cpa_norm_codes {
    CPA_NORM_PLAIN = 0,
    CPA_NORM_FP8_STATIC,
    CPA_NORM_FP8_TOKEN,
    CPA_NORM_FP8_GROUP,
    CPA_NORM_INT8_TOKEN,
    CPA_NORM_CODES_COUNT
} cpa_norm_codes;

/* rmsnorm (Zhang and Sennrich, arXiv:1910.07467): out = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) in each
 * row. With a residual: residual += x, rounded to dtype, and out is the norm of that rounded sum. */
typedef struct cpa_rmsnorm_args {
    size_t size;
    int64_t rows;
    int32_t width;
    cpa_dtype dtype; /* dtype of x and residual, and of weight and out where they say no other */
    const void *x;   /* [rows, width] */
    int64_t x_stride;
    void *residual;      /* [rows, width], or NULL */
    const void *weight;  /* [width] of dtype, or see weight_is_f32 */
    float weight_offset; /* 1 where weights are stored around zero, else 0 */
    float eps;
    void *out; /* [rows, width]; may be x, with the strides of x, where rows are plain; must not be the residual */
    int64_t residual_stride, out_stride;
    int32_t weight_is_f32;     /* 1: weights are fp32, whatever dtype is */
    cpa_norm_codes codes;      /* other than CPA_NORM_PLAIN: out is bytes, as out_stride counts them */
    int32_t group;             /* FP8_GROUP: 64 or 128 elements that share a scale; the last of a row may be fewer */
    int32_t scales_pow2;       /* FP8_GROUP: 1: scales are rounded up to powers of two */
    int32_t scales_by_column;  /* FP8_GROUP: 1: scales are [groups, rows up to a multiple of 4], filled up with 0 */
    const float *static_scale; /* FP8_STATIC: device, [1], above 0 */
    const float *scale_bound;  /* FP8_TOKEN: device, [1], or NULL */
    float *scales;             /* FP8_GROUP: [rows, groups], groups = width / group, rounded up; of tokens: [rows] */
    uint8_t *nonfinite;        /* [rows] or NULL: becomes 1 for a row with an infinity or NaN that codes do not show */
} cpa_rmsnorm_args;
CPA_API cpa_status cpa_rmsnorm(const cpa_rmsnorm_args *args, cpa_stream *stream);

/* rmsnorm2: two rows of their own widths and weights for each i of `rows`, as two rmsnorm would norm them, in one launch:
 * the latents of queries and of keys, say, that are slices of one product. The bits are those of rmsnorm, on CUDA where
 * both are aligned alike. */
typedef struct cpa_norm_rows {
    const void *x; /* [rows, width] */
    int64_t x_stride;
    const void *weight; /* [width] */
    void *out;          /* [rows, width]; may be x, with its strides */
    int64_t out_stride;
    int32_t width;
    int32_t reserved[5]; /* zero */
} cpa_norm_rows;
typedef struct cpa_rmsnorm2_args {
    size_t size;
    int64_t rows;
    cpa_dtype dtype;     /* dtype of x and out of both, and of weights unless weight_is_f32 */
    float weight_offset; /* as in rmsnorm */
    float eps;
    int32_t weight_is_f32;
    cpa_norm_rows parts[2]; /* `out` of either overlaps nothing of the other */
} cpa_rmsnorm2_args;
CPA_API cpa_status cpa_rmsnorm2(const cpa_rmsnorm2_args *args, cpa_stream *stream);

/* The frequencies of rotary positions (Su et al., arXiv:2104.09864), f_i = theta^(-2 i / dim) for i < dim / 2:
 *
 *     linear  f_i / factor
 *     llama3  f_i where the wave length 2 pi / f_i is below original / high_freq_factor, f_i / factor where it is above
 *             original / low_freq_factor, and between them (1 - s) f_i / factor + s f_i with
 *             s = (original / wave length - low_freq_factor) / (high_freq_factor - low_freq_factor)
 *     YaRN    (Peng et al., arXiv:2309.00071) f_i (1 - r_i) + f_i / factor r_i with the ramp
 *             r_i = clamp((i - low) / (high - low), 0, 1), low = max(floor(c(beta_fast)), 0),
 *             high = min(ceil(c(beta_slow)), dim - 1), 0.001 more where both are equal, and
 *             c(r) = dim ln(original / (2 pi r)) / (2 ln theta); cosines and sines are multiplied by attention_factor,
 *             or, where that is 0, by m(mscale) / m(mscale_all_dim) with m(x) = 0.1 x ln(factor) + 1, as DeepSeek's
 *             models have it, whose scores m(mscale_all_dim)^2 scales in return */
typedef enum cpa_rope_scaling {
    CPA_ROPE_PLAIN = 0,
    CPA_ROPE_LINEAR,
    CPA_ROPE_LLAMA3,
    CPA_ROPE_YARN,
    CPA_ROPE_SCALING_COUNT
} cpa_rope_scaling;
typedef struct cpa_rope_config {
    size_t size;
    cpa_rope_scaling scaling;
    int32_t dim;                              /* rotated elements of a head, even */
    double theta;                             /* the base, above 1 */
    int64_t max_position;                     /* rows of the table */
    double factor;                            /* scaling factor of all kinds but plain, at least 1 */
    double low_freq_factor, high_freq_factor; /* llama3: above 0, the second larger */
    double beta_fast, beta_slow;              /* YaRN; 0: 32 and 1 */
    double attention_factor;                  /* YaRN; 0: that of mscale and mscale_all_dim */
    int64_t original_max_position;            /* llama3 and YaRN */
    double mscale, mscale_all_dim;            /* YaRN; mscale 0: 1. Both 0: 0.1 ln(factor) + 1 */
} cpa_rope_config;
/* Fills `table` [max_position, dim] on the host: dim / 2 cosines, then dim / 2 sines of each position, computed in
 * float64. Any threads at once. */
CPA_API cpa_status cpa_rope_table(const cpa_rope_config *config, float *table, cpa_error *err);

/* How queries and keys are rotated: (x, y) becomes (x cos - y sin, y cos + x sin) for the pairs (i, i + dim / 2), or
 * (2 i, 2 i + 1) with `interleaved`, of the elements [first, first + dim) of a head; the others pass unchanged. A
 * position outside of the table gives a row of NaN.
 *
 * With sections (M-RoPE; Wang et al., Qwen2-VL, arXiv:2409.12191) a row has three positions, of time, height and width,
 * and positions are [3, rows]. The first sections[0] pairs turn by time, the next sections[1] by height, the last
 * sections[2] by width; with sections_interleaved, pair i turns by height where i % 3 = 1 and i < 3 sections[1], by
 * width where i % 3 = 2 and i < 3 sections[2], and by time elsewhere. Each position has to lie in the table. */
typedef struct cpa_rope {
    const float *table;   /* [max_position, dim], as cpa_rope_table fills it; NULL: nothing is rotated */
    int64_t max_position; /* rows of the table */
    int32_t dim, first;
    int32_t interleaved;          /* pairs; 0: neox, 1: gptj */
    int32_t inverse;              /* 1: rotated back, by the negated sines */
    int32_t sections[3];          /* they sum to dim / 2; all 0: a row has one position */
    int32_t sections_interleaved; /* 0 or 1, see above */
    int32_t reserved[4];          /* zero */
} cpa_rope;

/* rotate: the heads of rows, rotated, and rounded to dtype once. What of x is no head lies between the strides: the last
 * 64 elements of heads of 192 are x + 128 with dim 64 and head strides of 192. */
typedef struct cpa_rotate_args {
    size_t size;
    int64_t rows;
    int32_t heads, dim; /* dim: elements of a head */
    cpa_dtype dtype;
    const void *x;                   /* [rows, heads, dim] */
    int64_t x_stride, x_head_stride; /* from head to head; 0: dim. x_stride 0: heads * x_head_stride */
    cpa_rope rope;                   /* its table is not NULL */
    const int64_t *positions;        /* [rows], or [3, rows] with sections */
    void *out;                       /* [rows, heads, dim]; may be x, with the strides of x */
    int64_t out_stride, out_head_stride;
    uint8_t *outside; /* [rows] or NULL: becomes 1 for a row with a position outside of the table */
} cpa_rotate_args;
CPA_API cpa_status cpa_rotate(const cpa_rotate_args *args, cpa_stream *stream);

/* qk_norm_rope: from the rows of one product, [q_heads queries | kv_heads keys | kv_heads values], makes queries, keys
 * and values: each head of queries and keys is normed over its k_dim as by rmsnorm, then rotated, and rounded to dtype
 * once. Keys and values go to their pages as by cpa_kv_write, from what was rounded, so that both ways give the same
 * bits; or to k and v, which may be those columns of qkv, with its stride; or both. A cache of CPA_TQ_ is refused, as its
 * rows are made of whole heads. The heads may be a slice of a model's, even none of a kind. */
typedef struct cpa_qk_norm_rope_args {
    size_t size;
    int64_t rows;
    cpa_attention_shape shape; /* q_heads, kv_heads, k_dim, v_dim and dtype bind; the rest may be left out */
    const void *qkv;           /* [rows, q_heads * k_dim + kv_heads * (k_dim + v_dim)] */
    int64_t qkv_stride;
    const void *q_weight, *k_weight; /* [k_dim]; NULL: no norm */
    float weight_offset;
    float eps;
    cpa_rope rope;
    const int64_t *positions; /* [rows], or [3, rows] with sections; may be NULL where nothing is rotated */
    void *q;                  /* [rows, q_heads, k_dim] */
    int64_t q_stride;
    void *k, *v; /* [rows, kv_heads, k_dim] and [rows, kv_heads, v_dim], or NULL */
    int64_t k_stride, v_stride;
    const int64_t
        *slot_mapping; /* [rows] as for cpa_kv_write, -1 writes nothing; NULL: no cache, `kv` is not looked at */
    cpa_kv_view kv;
    uint8_t *nonfinite; /* [rows] or NULL, as for cpa_kv_write: of rows that go to the cache */
} cpa_qk_norm_rope_args;
CPA_API cpa_status cpa_qk_norm_rope(const cpa_qk_norm_rope_args *args, cpa_stream *stream);

/* latent_norm_rope: rows of latents and their pages from the rows of a product, [v_dim elements of a latent | k_dim -
 * v_dim of a key that is rotated], as multi-head latent attention has them (DeepSeek-AI, arXiv:2405.04434): the latent
 * is normed as by rmsnorm, the key rotated as by rotate. Rows go to their pages as by cpa_kv_write, or to `out`, or
 * both. In the same launch rotate is done to the rotated parts of queries. On the host all bits are those of these
 * calls; on CUDA they are those of calls whose rows are as well aligned. */
typedef struct cpa_latent_norm_rope_args {
    size_t size;
    int64_t rows;
    cpa_attention_shape
        shape;     /* v_in_k and kv_heads 1; q_heads, k_dim, v_dim and dtype bind, the rest may be left out */
    const void *x; /* [rows, k_dim] */
    int64_t x_stride;
    const void *weight;  /* [v_dim] */
    float weight_offset; /* as in rmsnorm */
    float eps;
    cpa_rope rope;            /* of heads of k_dim - v_dim elements; its table is not NULL */
    const int64_t *positions; /* [rows], or [3, rows] with sections */
    const void *q;            /* [rows, q_heads, k_dim - v_dim], strides as in rotate; NULL: no queries */
    int64_t q_stride, q_head_stride;
    void *q_out; /* [rows, q_heads, k_dim - v_dim]; may be q, with its strides */
    int64_t q_out_stride, q_out_head_stride;
    void *out; /* [rows, k_dim] or NULL; may be x, with its stride */
    int64_t out_stride;
    const int64_t
        *slot_mapping; /* [rows] as for cpa_kv_write, -1 writes nothing; NULL: no cache, `kv` is not looked at */
    cpa_kv_view kv;
    uint8_t *nonfinite; /* [rows] or NULL, as for cpa_kv_write: of rows that go to the cache */
} cpa_latent_norm_rope_args;
CPA_API cpa_status cpa_latent_norm_rope(const cpa_latent_norm_rope_args *args, cpa_stream *stream);

/* swiglu (Shazeer, arXiv:2002.05202): out = gate / (1 + exp(-gate)) * up. */
typedef struct cpa_swiglu_args {
    size_t size;
    int64_t rows;
    int32_t width;
    cpa_dtype dtype;
    const void *gate_up; /* [rows, 2 * width], contiguous: the gates of a row, then what they scale */
    void *out;           /* [rows, width], contiguous */
} cpa_swiglu_args;
CPA_API cpa_status cpa_swiglu(const cpa_swiglu_args *args, cpa_stream *stream);

/* embed: row i is row tokens[i] of the table; a token outside of it gives a row of NaN. It gathers any rows: -1 in
 * place of a token is one for a row of NaN. */
typedef struct cpa_embed_args {
    size_t size;
    int64_t rows;
    int32_t width;
    cpa_dtype dtype;
    int64_t vocabulary;     /* rows of the table, up to 2^32 - 1 */
    const void *table;      /* [vocabulary, width], contiguous */
    const uint32_t *tokens; /* [rows] */
    void *out;              /* [rows, width], contiguous */
} cpa_embed_args;
CPA_API cpa_status cpa_embed(const cpa_embed_args *args, cpa_stream *stream);

/* linear: out = x * weight^T + bias, accumulated in fp32 and rounded once. CUDA devices need cuBLASLt for fp32 and for
 * more than 16 rows (CPA_UNSUPPORTED without it); the first such product on a stream allocates what it needs and must not
 * be captured. With weight_scale the weights are codes of FP8 as cpattn/experts.h has them (expert_linear), without
 * cuBLASLt; a view then begins at a multiple of 128 outputs and inputs, with the scales of its own blocks. */
typedef struct cpa_linear_args {
    size_t size;
    int64_t rows;
    int32_t inputs, outputs;
    cpa_dtype dtype;     /* dtype of x, weight and bias */
    cpa_dtype out_dtype; /* dtype, or CPA_F32 */
    const void *x;       /* [rows, inputs] */
    int64_t x_stride;
    const void *weight; /* [outputs, inputs]: a slice of a larger matrix is a view */
    int64_t weight_stride;
    const void *bias; /* [outputs], or NULL */
    void *out;        /* [rows, outputs]; overlaps nothing that is read */
    int64_t out_stride;
    /* [weight_scale_rows, weight_scale_columns], contiguous: the weights are CPA_FP8_E4M3; NULL: they are of dtype. */
    const float *weight_scale;
    int32_t weight_scale_rows, weight_scale_columns;
    /* Above 1: so many products of these sizes, without bias and scales, such as one for each head of a row. x, weight and out of
     * each begin a stride, in elements, behind those of the one before; on the host each has the bits of one alone. */
    int32_t batch;
    int64_t x_batch_stride, weight_batch_stride, out_batch_stride;
} cpa_linear_args;
CPA_API cpa_status cpa_linear(const cpa_linear_args *args, cpa_stream *stream);

/* sample: a token for each row of logits.
 *
 *   1. A row with given[i] >= 0 gets that token.
 *   2. Biases are added to the logits of their tokens.
 *   3. Penalties: the logit l of a token in the prompt or in the output (bitmaps and path) becomes
 *      l > 0 ? l / repetition : l * repetition
 *      (Keskar et al., arXiv:1909.05858); that of one that is in the output n times is lowered by n * `frequency`, then
 *      by `presence`.
 *   4. The logit of a token that the row's mask leaves out becomes -infinity.
 *   5. Temperature 0: the largest logit, of equal ones the first.
 *   6. Else z = (l - the largest l) / temperature. Of those the top_k largest stay, of their softmax the largest that
 *      together reach top_p (Holtzman et al., arXiv:1904.09751), and of these the ones that have at least min_p of the
 *      largest probability. What equals the last that stays stays too.
 *   7. The largest z + g of what stays, of equal ones the first, where g = -ln(-ln u) and u in (0, 1) is a hash of seed,
 *      position and token: a draw from the softmax (Gumbel, 1954) that depends on these three alone.
 *
 * A row with a NaN, masked or not, or whose largest logit is then infinite, as where the mask leaves none, gets
 * CPA_NO_TOKEN. The same logits give the same tokens on
 * every back end. A number outside of the range that is named counts as the default, 0. */
#define CPA_NO_TOKEN 0xffffffffu
typedef struct cpa_sample_args {
    size_t size;
    int64_t rows;
    int64_t vocabulary;  /* up to 2^22 */
    const float *logits; /* [rows, vocabulary]; not changed */
    int64_t logits_stride;
    /* [rows] each; all may be NULL, which is 0 everywhere (for `given`, -1). */
    const float *temperature;   /* 0: the largest logit; above 0 */
    const int32_t *top_k;       /* 0: all; above 0 */
    const float *top_p, *min_p; /* 0: all; up to 1 */
    const float *repetition;    /* 0: none, as 1 is; above 0 */
    const float *presence;      /* any number */
    const uint64_t *seed;
    const int64_t *position; /* position of the token that is drawn */
    const int64_t *given;
    /* Tokens in the prompt, and in the output, of the sequence that sequence[i] names: [sequences, words], words =
     * (vocabulary + 31) / 32, token t at bit t % 32 of word t / 32; both may be NULL. A sequence outside of
     * 0..sequences-1 has no tokens. */
    const uint32_t *in_prompt, *in_output;
    const int32_t *sequence; /* [rows]; NULL where both bitmaps are */
    int64_t sequences;
    uint32_t *tokens; /* [rows] */
    /* [rows] or NULL: the log-softmax of the logits as they are given, at the token; NaN for a token that has no logit. */
    float *logprobs;
    int64_t tokens_stride, logprobs_stride;
    /* Tokens that count as output for single rows, beside the bitmaps: those on the path of row i, which are entry
     * path_ends[i] of path_tokens, then entry path_parents of that, which is a lower one, and so on; it ends where
     * there is no such entry, as -1 is none. As a row of drafts needs the drafts before it. All NULL: no paths. */
    const uint32_t *path_tokens; /* [path_entries] */
    const int32_t *path_parents; /* [path_entries] */
    const int32_t *path_ends;    /* [rows] */
    int64_t path_entries;
    const float *frequency; /* [rows] or NULL, which is 0 everywhere; any number */
    /* [sequences, vocabulary] how often the tokens of in_output are there; NULL: once each. Each place on a path counts
     * once more. */
    const uint32_t *output_counts;
    /* Masks: row i draws tokens alone that have a bit in mask mask_index[i], as bitmaps have them; one outside of
     * 0..n_masks-1, such as -1, is none: any token. Both NULL: no masks. */
    const uint32_t *masks;     /* [n_masks, words] */
    const int32_t *mask_index; /* [rows] */
    int64_t n_masks;
    /* Biases: those of row i are the bias_count[i] entries from bias_first[i] on, whose tokens ascend, each at most once;
     * none where they do not lie within bias_entries. A value of -infinity keeps a token out. All NULL: no biases. */
    const uint32_t *bias_tokens;            /* [bias_entries] */
    const float *bias_values;               /* [bias_entries] */
    const int32_t *bias_first, *bias_count; /* [rows] */
    int64_t bias_entries;
} cpa_sample_args;
CPA_API cpa_status cpa_sample(const cpa_sample_args *args, cpa_stream *stream);

/* rank_tokens: what each row of logits says of a token, and which tokens it says are the most probable: the log-softmax
 * of the logits as they are given, whatever is drawn from them. */
enum { CPA_MOST_TOP_LOGPROBS = 20 };
typedef struct cpa_token_logprob {
    uint32_t token;
    float logprob;
} cpa_token_logprob;
typedef struct cpa_token_ranks {
    float logprob; /* log-probability of the token; NaN for one outside of the vocabulary */
    int32_t rank;  /* rank of the token: 1 + how many logits are larger; 0 for a token outside of the vocabulary */
    /* Tokens of the largest logits, of equal ones the first, from the largest on, as many as are asked for; then
     * CPA_NO_TOKEN and NaN. A row with a NaN, or whose largest logit is infinite, has none, and NaN and 0 above. */
    cpa_token_logprob top[CPA_MOST_TOP_LOGPROBS];
} cpa_token_ranks;
typedef struct cpa_rank_tokens_args {
    size_t size;
    int64_t rows;
    int64_t vocabulary;  /* up to 2^22 */
    const float *logits; /* [rows, vocabulary] */
    int64_t logits_stride;
    const uint32_t *tokens; /* [rows] */
    int64_t tokens_stride;
    const int32_t *top;     /* [rows] how many of the most probable, up to CPA_MOST_TOP_LOGPROBS; NULL: none */
    cpa_token_ranks *ranks; /* [rows] */
    float *logprobs;        /* [rows] or NULL: log-probabilities of the tokens, as in `ranks` */
    int64_t logprobs_stride;
} cpa_rank_tokens_args;
CPA_API cpa_status cpa_rank_tokens(const cpa_rank_tokens_args *args, cpa_stream *stream);

/* mark_tokens: keeps the bitmaps and counts that sample reads. First those of the sequences in `restarts` are cleared;
 * then each token of the list gets its bit, and one of the output counts one more. Sequences outside of 0..sequences-1,
 * such as -1, and tokens outside of the vocabulary are passed over. */
typedef struct cpa_mark_tokens_args {
    size_t size;
    int64_t vocabulary, sequences;
    uint32_t *in_prompt, *in_output; /* [sequences, (vocabulary + 31) / 32] */
    int64_t n_restarts;
    const int32_t *restarts; /* [n_restarts] */
    int64_t count;
    const int32_t *sequence; /* [count] */
    const uint32_t *tokens;  /* [count] */
    const int32_t *outputs;  /* [count] 1: of the output; 0: of the prompt */
    uint32_t *output_counts; /* [sequences, vocabulary], or NULL */
} cpa_mark_tokens_args;
CPA_API cpa_status cpa_mark_tokens(const cpa_mark_tokens_args *args, cpa_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
