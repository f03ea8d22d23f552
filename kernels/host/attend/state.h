/* The merge of two partial states: the one arithmetic of attend's fold over splits and of the merge operation.
 *     m = max(lse_a, lse_b), w = exp(lse - m), O = (w_a O_a + w_b O_b) / (w_a + w_b), lse = m + ln(w_a + w_b)
 * Files that include it are compiled without contraction of a * b + c, so that they agree to the bit. */
#ifndef CPA_HOST_STATE_H
#define CPA_HOST_STATE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* +inf counts as -inf. NaN is that of a row with a score that was no number, and stays. */
static inline float cpa_state_lse(float lse) {
    return lse == INFINITY ? -INFINITY : lse;
}

/* The state of a row with a score that was NaN or +inf: always the same NaN. */
static inline void cpa_state_set_nan(float *o, float *lse, int64_t n) {
    for (int64_t i = 0; i < n; i++) o[i] = NAN;
    *lse = NAN;
}

/* Folds the state (lse_b, o_b [n]) into (*lse_a, o_a [n]); an O of zero weight is not read. An empty state of
 * undefined O becomes b exactly, and NaN in either LSE makes all NaN. */
static inline void cpa_state_fold(float *restrict o_a, float *lse_a, const float *restrict o_b, float lse_b,
                                  int64_t n) {
    float a = cpa_state_lse(*lse_a), b = cpa_state_lse(lse_b);
    *lse_a = a;
    if (isnan(a) || isnan(b)) {
        cpa_state_set_nan(o_a, lse_a, n);
        return;
    }
    if (b == -INFINITY) return;
    float max = a > b ? a : b;
    float w_a = expf(a - max), w_b = expf(b - max), sum = w_a + w_b;
    *lse_a = max + logf(sum);
    w_a /= sum;
    w_b /= sum;
    if (w_b == 0) return;
    if (w_a == 0) {
        memcpy(o_a, o_b, (size_t)n * sizeof *o_a);
        return;
    }
    for (int64_t i = 0; i < n; i++) o_a[i] = w_a * o_a[i] + w_b * o_b[i];
}

#endif
