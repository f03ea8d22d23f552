/* What every back end routes tokens by (expert_route of cpattn/experts.h): scores and weights. As in kernels/draw.h
 * operations are in the order written, each rounded once; compiled without contraction (CUDA: -fmad=false), so that the
 * same logits give the same experts and weights everywhere. Exponentials and their sums are fp64, so that a score is the
 * exact one rounded to fp32, but for one in some ten million. */
#ifndef CPA_KERNELS_ROUTE_H
#define CPA_KERNELS_ROUTE_H

#include "kernels/draw.h"

/* The sum of a softmax is that of so many sums, expert e in number e modulo this, ascending; then the upper half of
 * these is added to the lower until one is left. */
enum { CPA_ROUTE_SUMS = 32 };

CPA_HOST_DEVICE static inline double cpa_route_exp(float logit, float largest) {
    return cpa_draw_exp((double)logit - (double)largest);
}

CPA_HOST_DEVICE static inline float cpa_route_sigmoid(float logit) {
    const double e = cpa_draw_exp(logit < 0 ? (double)logit : -(double)logit);
    return (float)((logit < 0 ? e : 1) / (1 + e));
}

/* A logit or biased score that is no number, or infinite. */
CPA_HOST_DEVICE static inline int cpa_route_is_wild(float x) {
    return !(x - x == 0);
}

/* Whether (x, i) is chosen before (y, j): the larger, of equal ones the first. */
CPA_HOST_DEVICE static inline int cpa_route_is_before(float x, int32_t i, float y, int32_t j) {
    return x > y || (x == y && i < j);
}

/* The weight of a chosen expert; `sum`: that of all chosen scores where they are normalised. */
CPA_HOST_DEVICE static inline float cpa_route_weight(float score, float sum, int32_t normalise, float scale) {
    if (normalise) score = score / (sum + 1e-20f);
    return score * scale;
}

#endif
