/* What every back end draws tokens by (sample of cpattn/nn.h): random numbers from a counter, and the numbers by which
 * tokens stay or go. fp32 and fp64 +, -, *, / in the order written, each rounded once, and integers; compiled without
 * contraction (CUDA: -fmad=false), so that the same logits give the same tokens everywhere.
 *
 *     l    the logit after bias, penalties and mask, fp32
 *     z    (l - the largest l) / temperature, fp32: 0 for the largest
 *     w    floor(2^40 exp(z)): sums of it are exact, whatever their order
 *
 * A token stays if z >= the top_k-th largest z, counting each token; if z >= t, where t is the largest z of a token for
 * which the w of all tokens with z >= t sum to top_p of the sum of all that top_k left; and if exp(z) >= min_p. The
 * token is the first of those with the largest z + gumbel(key, token), in fp64. */
#ifndef CPA_KERNELS_DRAW_H
#define CPA_KERNELS_DRAW_H

#include <math.h>
#include <string.h>

#include "base/hash.h"

/* The most tokens of a vocabulary: their weights then sum to less than 2^63. */
#define CPA_DRAW_MOST_TOKENS ((int64_t)1 << 22)

/* exp(x) for x <= 0: 2^k exp(r), |r| <= ln(2) / 2, by the Taylor series of exp(r) to the 13th power, whose rest is
 * below 2^-57. 0 below exp(-700). */
CPA_HOST_DEVICE static inline double cpa_draw_exp(double x) {
    const double log2_e = 0x1.71547652b82fep+0;
    const double ln2_high = 0x1.62e42feep-1,
                 ln2_low = 0x1.a39ef35793c76p-33; /* the first has 32 bits: k times it is exact */
    if (!(x > -700)) return 0;
    const int64_t k = (int64_t)(x * log2_e - 0.5);
    const double r = (x - (double)k * ln2_high) - (double)k * ln2_low;
    const double inverse_factorials[] = {
        1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       1.0 / 2,      1,           1};
    double sum = 0;
    for (int i = 0; i < 14; i++) sum = sum * r + inverse_factorials[i];
    const uint64_t bits = (uint64_t)(1023 + k) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

/* ln(x) for a normal x > 0: with x = 2^e m, m within a factor of sqrt(2) of 1, and s = (m - 1) / (m + 1), e ln(2) +
 * 2 (s + s^3 / 3 + s^5 / 5 + ... + s^21 / 21); the rest is below 2^-59. */
CPA_HOST_DEVICE static inline double cpa_draw_log(double x) {
    const double ln2 = 0x1.62e42fefa39efp-1, root2 = 0x1.6a09e667f3bcdp+0;
    uint64_t bits;
    double m;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    memcpy(&m, &bits, sizeof m);
    if (m > root2) m = m / 2, e++;
    const double s = (m - 1) / (m + 1), z = s * s;
    const double inverse_odds[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                                   1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1};
    double sum = 0;
    for (int i = 0; i < 11; i++) sum = sum * z + inverse_odds[i];
    return (double)e * ln2 + 2 * s * sum;
}

/* Stands for the draws of a seed at a position. */
CPA_HOST_DEVICE static inline uint64_t cpa_draw_key(uint64_t seed, int64_t position) {
    return cpa_mix64((cpa_mix64(seed + CPA_GOLDEN) ^ (uint64_t)position) + CPA_GOLDEN);
}

/* No draw is further from 0 than this: -ln(2^-53) = 36.74, and so -ln(-ln u) lies between -3.61 and 36.74. */
#define CPA_DRAW_MOST_GUMBEL 36.75

/* -ln(-ln u) with u = (the upper 52 bits of mix(key + (token + 1) CPA_GOLDEN) + 1/2) / 2^52. */
CPA_HOST_DEVICE static inline double cpa_draw_gumbel(uint64_t key, int64_t token) {
    const uint64_t h = cpa_mix64(key + (uint64_t)(token + 1) * CPA_GOLDEN);
    const double u = ((double)(int64_t)(h >> 12) + 0.5) * 0x1p-52;
    return -cpa_draw_log(-cpa_draw_log(u));
}

/* What min_p lies below: it may be 1, which leaves the best alone, where a top_p of 1 is none. */
#define CPA_DRAW_ABOVE_ONE 0x1.000002p+0f

/* The weight w of a token: 0 below 2^-40, which is above exp(-28). */
CPA_HOST_DEVICE static inline uint64_t cpa_draw_weight(float z) {
    return z < -28 ? 0 : (uint64_t)(cpa_draw_exp((double)z) * 0x1p40);
}

/* The bits of -z, which order tokens from the largest z on: 0 for z = 0. */
CPA_HOST_DEVICE static inline uint32_t cpa_draw_order(float z) {
    const float distance = 0 - z;
    uint32_t bits;
    memcpy(&bits, &distance, sizeof bits);
    return bits;
}

/* Whether weights that sum to `sum` are top_p of those that sum to `total`. */
CPA_HOST_DEVICE static inline int cpa_draw_reaches(uint64_t sum, uint64_t total, float top_p) {
    return (double)sum >= (double)top_p * (double)total;
}

/* How often a token is on the path that ends with entry `at`; see cpa_sample_args. Parents are lower, so that it ends.
 */
CPA_HOST_DEVICE static inline uint32_t cpa_draw_times_on_path(const uint32_t *tokens, const int32_t *parents,
                                                              int64_t entries, int32_t at, int64_t token) {
    uint32_t times = 0;
    while (at >= 0 && at < entries) {
        times += (int64_t)tokens[at] == token;
        at = parents[at] < at ? parents[at] : -1;
    }
    return times;
}

/* What lowers logits; a penalty that is none changes no bit. */
typedef struct cpa_draw_penalties {
    float repetition, presence, frequency; /* 0: none */
} cpa_draw_penalties;

/* The logit of a token after penalties, of one that is in the output so many times. */
CPA_HOST_DEVICE static inline float cpa_draw_penalise(float l, int in_prompt, uint32_t outputs,
                                                      cpa_draw_penalties penalties) {
    if ((in_prompt || outputs > 0) && penalties.repetition > 0)
        l = l > 0 ? l / penalties.repetition : l * penalties.repetition;
    if (outputs == 0) return l;
    l = l - penalties.frequency * (float)outputs;
    return l - penalties.presence;
}

/* The logit of a token that has a bias, or none: those of a row ascend by token. */
CPA_HOST_DEVICE static inline float cpa_draw_add_bias(float l, const uint32_t *tokens, const float *values,
                                                      int32_t count, int64_t token) {
    int32_t low = 0, high = count;
    while (low < high) {
        const int32_t middle = (low + high) / 2;
        if ((int64_t)tokens[middle] < token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < count && (int64_t)tokens[low] == token ? l + values[low] : l;
}

/* The logit of a token that a mask leaves out; a NaN shows through it. */
CPA_HOST_DEVICE static inline float cpa_draw_leave_out(float l) {
    return l != l ? l : -(float)INFINITY;
}

#endif
