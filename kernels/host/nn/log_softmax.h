/* The log-softmax of a row of logits in float64. */
#ifndef CPA_HOST_NN_LOG_SOFTMAX_H
#define CPA_HOST_NN_LOG_SOFTMAX_H

#include <math.h>
#include <stdint.h>

/* Log-probabilities are the logits less this: ln(sum(exp(logits))). NaN where a logit is NaN or the largest infinite. */
static inline double cpa_host_log_sum(const float *logits, int64_t vocabulary) {
    float largest = -INFINITY;
    double sum = 0;
    for (int64_t t = 0; t < vocabulary; t++) largest = logits[t] > largest ? logits[t] : largest;
    for (int64_t t = 0; t < vocabulary; t++) sum += exp((double)logits[t] - (double)largest);
    return (double)largest + log(sum);
}

#endif
