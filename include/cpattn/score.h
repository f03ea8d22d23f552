/* What attention does to a score between the product of a query and a key and the softmax, beside the mask of a layer:
 * rules that follow from the indices of both alone, and values that are added. Which keys a row attends at all is said
 * by the mask of the layer (cpattn/types.h) and by a selection (cpattn/selection.h).
 *
 * All scores are fp32, and the order is fixed. With p the index of the query and t that of the key in their sequence
 * (0 for its first token), for query head h,
 *
 *     s  = scale * (q . k)
 *     s  = softcap * tanh(s / softcap)                         if softcap > 0 (Gemma 2, arXiv:2408.00118)
 *     s *= log2(p) / log2(temperature_len)                     if temperature_len > 0 and p > temperature_len
 *     s += alibi_slopes[h] * (t - p)                           Press et al., arXiv:2108.12409
 *     s += bias(row, h, t)
 *     s  = -inf                                                where the row does not attend the key
 *     LSE = ln sum exp(s),  O = sum exp(s - LSE) v
 *     out = O / (1 + exp(sink_logits[h] - LSE))                the result alone, see below
 *
 * A softcap bounds what it is given: of -inf and +inf it makes -softcap and softcap, scores like others; NaN stays NaN.
 * tanh is off by at most 1e-6 of its value. ALiBi counts from the query's own index, whatever shard holds the key, so
 * that states over disjoint keys merge; others count from the sequence's end, which gives the same O and another LSE.
 *
 * A sink logit is one more term of the denominator that has no value (gpt-oss; Xiao et al., arXiv:2309.17453, name the
 * effect): once a row, however its keys are split. So it is part of no state and of no LSE; it is applied to what
 * finishes a row: `out` of attend and of the merges. A row that sees no key has O = 0 with or without.
 *
 * ALiBi and biases go by index: on the host for all tokens that there can be, on CUDA devices for sequences of up
 * to 2^30 tokens; attend refuses longer ones there.
 *
 * Structs here are on the host, what they point to is on the device of the call; all zero is no rule. */
#ifndef CPATTN_SCORE_H
#define CPATTN_SCORE_H

#include <cpattn/shape.h>
#include <cpattn/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cpa_score_rules {
    float softcap;             /* 0: none */
    float temperature_len;     /* 0: none, else above 1 */
    const float *alibi_slopes; /* [q_heads], or NULL */
    const float *sink_logits;  /* [q_heads], or NULL; -inf: that head has none */
    int64_t reserved[4];       /* zero */
} cpa_score_rules;

/* Values that are added to scores, by index in the sequence: of a row, a head and the key t in [first, first + width)
 *
 *     values[row * row_stride + head * head_stride + t - first]
 *
 * and 0 for other keys. -inf hides a key, and so do the lowest numbers of fp32 and bf16 (CPA_LOWEST_EXPONENT), if its
 * score is a number before: a bias is added, and -inf and a score of NaN or +inf give NaN. A selection hides any key. */
typedef struct cpa_score_bias {
    const void *values;
    cpa_dtype dtype;        /* fp32, bf16 or fp16 */
    int64_t row_stride;     /* elements from row to row; 0: all rows have the same bias */
    int64_t head_stride;    /* elements from query head to query head; 0: all have the same bias */
    int64_t first, width;   /* first index in the sequence that has a bias, and how many have one */
    const int32_t *row_map; /* [rows]: the row in `values` of each row of q; NULL: the identity */
    int64_t reserved[4];    /* zero */
} cpa_score_bias;

#ifdef __cplusplus
}
#endif
#endif
