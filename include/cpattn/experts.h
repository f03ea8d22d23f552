/* Operators of mixtures of experts (Shazeer et al., arXiv:1701.06538): a layer whose feed-forward is one of many for each
 * token. A layer is
 *
 *     logits = cpa_linear(x, router)                    [tokens, experts], fp32
 *     ids, weights = cpa_expert_route(logits)           which experts a token chooses, and how much each counts
 *     offsets, tokens, places = cpa_expert_permute(ids) the choices, sorted by expert
 *     gate_up = cpa_expert_linear(x by tokens, gate_up weights)
 *     inner = cpa_swiglu(gate_up)
 *     y = cpa_expert_linear(inner, down weights)
 *     out = cpa_expert_combine(y by places, weights)    + what the shared experts made
 *
 * A choice is a token and a rank k: number token * top_k + k. The place of a choice is where it stands when choices are
 * sorted by expert, those of an expert by number; rows of gate_up, inner and y are places. What is here follows the
 * conventions of cpattn/nn.h: a row's result does not depend on the rows beside it, on the host to the last bit, so that
 * it is the same wherever its expert lives; nothing depends on the order in which threads come.
 *
 * Experts over ranks: rank r of N has experts [cpa_first_expert(E, N, r), cpa_first_expert(E, N, r + 1)). Since places
 * are sorted by expert, what goes to rank r are the places [offsets[first], offsets[next first]), in one piece; cpa_embed
 * gathers the rows of x in that order (its tokens are those of permute). Who receives rows with their experts' numbers
 * sorts them by cpa_expert_permute with top_k = 1, multiplies, and sends back what cpa_embed gathers by `places`; then
 * the rows come home in the order in which they left, and combine reads them there. */
#ifndef CPATTN_EXPERTS_H
#define CPATTN_EXPERTS_H

#include <cpattn/device.h>
#include <cpattn/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The most experts of a layer, and the most that a token chooses. */
enum { CPA_MOST_EXPERTS = 1024, CPA_MOST_TOP_K = 32 };

/* The first expert of a rank, where ranks have ranges of experts whose lengths differ by at most one. */
CPA_INLINE int32_t cpa_first_expert(int32_t experts, int32_t ranks, int32_t rank) {
    return (int32_t)((int64_t)experts * rank / ranks);
}

/* What a router makes of its logits: their softmax over all experts, or the sigmoid of each. */
typedef enum cpa_expert_scores {
    CPA_SCORES_SOFTMAX = 0, /* exp(l - the largest l) / the sum of these */
    CPA_SCORES_SIGMOID,     /* 1 / (1 + exp(-l)) */
    CPA_EXPERT_SCORES_COUNT
} cpa_expert_scores;

/* By what a group of experts is chosen. */
typedef enum cpa_group_scores {
    CPA_GROUP_BEST = 0, /* its largest biased score (DeepSeek-V2, arXiv:2405.04434) */
    CPA_GROUP_BEST_TWO, /* sum of its two largest, or of its only one (DeepSeek-V3, arXiv:2412.19437) */
    CPA_GROUP_SCORES_COUNT
} cpa_group_scores;

/* expert_route: the experts of each token, and their weights.
 *
 *   1. Scores, fp32, from the logits; the biased score is score + bias.
 *   2. With n_group > 1 the experts are n_group groups of neighbours, of which the topk_group with the largest group
 *      scores take part; the others take no part, whatever the scores of those (as if theirs were -infinity).
 *   3. Of the experts that take part, those with the top_k largest biased scores are chosen, the largest first. Without
 *      a bias experts are compared by logit, which is the same order but where scores round to one number. Of equal
 *      experts, and of equal groups, the lower number goes first.
 *   4. The weight of a chosen expert is its score, without bias; with `normalise` divided by the sum of the chosen
 *      scores, added from the first to the last, + 1e-20; then times `scale`.
 *
 * So Mixtral and Qwen3-MoE with norm_topk_prob are softmax with normalise (a softmax over the chosen logits is the same
 * thing), DeepSeek-V2 is softmax with groups by their best, DeepSeek-V3 sigmoid with a bias, groups by their best two and
 * normalise. A token with a logit or biased score that is no finite number gets experts 0 to top_k - 1 with weights of
 * NaN. All back ends give the same bits. */
typedef struct cpa_expert_route_args {
    size_t size;
    int64_t rows;
    int32_t experts, top_k; /* 1 <= top_k <= experts */
    const float *logits;    /* [rows, experts] */
    int64_t logits_stride;
    cpa_expert_scores scores;
    cpa_group_scores group_scores;
    int32_t n_group;    /* groups, which divide the experts; 0 or 1: none */
    int32_t topk_group; /* groups that take part, with at least top_k experts; 0 with n_group 0 */
    const float *bias;  /* [experts], added for the choice alone; NULL: none */
    int32_t normalise;  /* 0 or 1 */
    float scale;        /* factor of the weights, above 0 */
    int32_t *ids;       /* [rows, top_k] */
    float *weights;     /* [rows, top_k] */
} cpa_expert_route_args;
CPA_API cpa_status cpa_expert_route(const cpa_expert_route_args *args, cpa_stream *stream);

/* expert_permute: sorts choices by expert. Those of experts outside of [first_expert, first_expert + experts), which
 * live elsewhere, have no place. rows * top_k is at most 2^31 - 1. */
typedef struct cpa_expert_permute_args {
    size_t size;
    int64_t rows;
    int32_t top_k;
    int32_t first_expert, experts; /* experts that have places */
    const int32_t *ids;            /* [rows, top_k] */
    int32_t
        *offsets; /* [experts + 1] expert first_expert + e has places [offsets[e], offsets[e + 1]); offsets[0] is 0 */
    uint32_t *tokens; /* [rows * top_k] token of each place; all ones behind the last */
    int32_t *places;  /* [rows, top_k] place of each choice, -1: it has none */
} cpa_expert_permute_args;
CPA_API cpa_status cpa_expert_permute(const cpa_expert_permute_args *args, cpa_stream *stream);

/* expert_linear: the row of `out` at each place is x * weight^T with the weights of its expert, accumulated in fp32 and
 * rounded once. What each expert has is read where the work is done, so that the host need not know it; places that no
 * expert has are neither read nor written. Offsets ascend; what they name beyond `rows` is left out. On the host a row has the bits that
 * cpa_linear gives it. CUDA devices multiply bf16 and fp16 by tensor cores where strides, widths and addresses are
 * multiples of 16 bytes, and all else slowly.
 *
 * Weights in FP8: with weight_scale, weights are codes of CPA_FP8_E4M3 (a byte each, as strides count) and w = code *
 * scale, in fp32. Scales are [outputs, 1], one for each output, or [ceil(outputs / 128), ceil(inputs / 128)], one for
 * each block of 128 x 128, as checkpoints have them (weight_scale, weight_scale_inv). x is never quantised. On the host w
 * is what is multiplied; a CUDA device multiplies by the codes, or these times powers of two, which are exact in bf16 and
 * fp16, and the fp32 sums of blocks of 128 inputs by the rest of their scales. */
typedef struct cpa_expert_linear_args {
    size_t size;
    int32_t experts;
    int64_t rows; /* places: rows of out */
    int32_t inputs, outputs;
    cpa_dtype dtype;        /* dtype of x, and of weights that have no scales */
    cpa_dtype out_dtype;    /* dtype, or CPA_F32 */
    const int32_t *offsets; /* [experts + 1], as expert_permute gives them */
    const void *x;          /* [x_rows, inputs] */
    int64_t x_rows, x_stride;
    const void *weight;                   /* [experts, outputs, inputs] */
    int64_t weight_stride, expert_stride; /* from output to output, and from expert to expert (0: contiguous) */
    void *out;                            /* [rows, outputs]; overlaps nothing that is read */
    int64_t out_stride;
    const uint32_t
        *tokens; /* [rows] row of x of each place, NaN for one that x does not have; NULL: row i for place i */
    /* [experts, weight_scale_rows, weight_scale_columns], contiguous; NULL: the weights are of dtype. */
    const float *weight_scale;
    int32_t weight_scale_rows, weight_scale_columns;
} cpa_expert_linear_args;
CPA_API cpa_status cpa_expert_linear(const cpa_expert_linear_args *args, cpa_stream *stream);

/* expert_combine: out = the sum over k = 0, 1, ... of weight[k] * y[place[k]], in fp32 and in this order, + shared,
 * rounded once. All back ends give the same bits. */
typedef struct cpa_expert_combine_args {
    size_t size;
    int64_t rows;
    int32_t top_k, width;
    cpa_dtype dtype;   /* dtype of shared and out */
    cpa_dtype y_dtype; /* dtype, or CPA_F32; any where dtype is CPA_F32 */
    const void *y;     /* [y_rows, width] */
    int64_t y_rows, y_stride;
    const int32_t *places; /* [rows, top_k] rows of y; one outside of it, such as -1, adds nothing */
    const float *weights;  /* [rows, top_k] */
    void *out;             /* [rows, width], contiguous; may be `shared` */
    const void *shared;    /* [rows, width], contiguous: the result of experts that every token has; NULL: none */
} cpa_expert_combine_args;
CPA_API cpa_status cpa_expert_combine(const cpa_expert_combine_args *args, cpa_stream *stream);

/* Whether scales in the host's memory may be those of FP8 weights of a matrix: that [rows, columns] is one of the two
 * shapes above and each is a finite number above 0. For whoever loads weights: operators check the shape alone. `name`
 * begins the line that says what is wrong. Any threads at once. */
CPA_API cpa_status cpa_weight_scale_check(const char *name, int32_t outputs, int32_t inputs, const float *scales,
                                          int64_t rows, int64_t columns, cpa_error *err);

#ifdef __cplusplus
}
#endif
#endif
